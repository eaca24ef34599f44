"""Tiny models on a shared machine: one thread each, since waiting for a second one costs more than it computes."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
