"""The rule for warm outputs: what it lets pass, and what it must not."""

from __future__ import annotations

import pytest
import torch

from forebay.engine_adapter.near_tie import (
    first_difference,
    judge,
    largest_engine_logit_change,
    largest_logit_change,
)
from tests.engine.tiny import tiny_model
from tests.engine_adapter.models import qwen

COLD = [5, 6, 7]


def logits(gap: float) -> torch.Tensor:
    """Token 6 leads at step 1, token 9 is `gap` behind."""
    out = torch.zeros(3, 12)
    out[1, 6], out[1, 9] = 4.0, 4.0 - gap
    return out


def test_the_first_difference_is_found_and_a_shorter_text_differs_at_its_end() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 9, 3]) == 1
    assert first_difference([1, 2, 3], [1, 2]) == 2


@pytest.mark.parametrize("exact", [True, False])
def test_equal_outputs_pass(exact: bool) -> None:
    assert judge(COLD, COLD, logits(1.0), exact=exact).identical


def test_a_near_tie_passes_in_sixteen_bits_only() -> None:
    warm = [5, 9, 1]
    assert judge(COLD, warm, logits(0.1), exact=False, logit_change=0.06).ok
    assert not judge(COLD, warm, logits(0.1), exact=True, logit_change=0.06).ok
    assert not judge(COLD, warm, logits(0.1), exact=False, logit_change=0.04).ok


def test_a_token_that_was_not_close_to_the_best_fails_even_at_a_near_tie() -> None:
    verdict = judge(COLD, [5, 3, 7], logits(0.1), exact=False, logit_change=0.06)
    assert not verdict.ok and "token 1: cold 6, warm 3" in verdict.text


def test_an_output_that_ends_early_fails() -> None:
    assert not judge(COLD, COLD[:2], logits(0.0), exact=False, logit_change=1.0).ok


class FeelsItsChunk(torch.nn.Module):
    """An MLP whose result depends a little on how many tokens are computed at once, as rounding does."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1e-4 * x.shape[1]  # type: ignore[no-any-return]


def test_the_change_that_chunking_makes_is_measured() -> None:
    ids = list(range(3, 60))
    model = qwen(torch.float64)
    assert largest_logit_change(model, ids, split=40, keep=4) < 1e-9
    model.model.layers[1].mlp = FeelsItsChunk(model.model.layers[1].mlp)
    assert largest_logit_change(model, ids, split=40, keep=4) > 1e-6
    with pytest.raises(ValueError, match="split"):
        largest_logit_change(model, ids, split=57, keep=4)


def test_chunking_changes_the_engines_logits_by_rounding_only() -> None:
    ids = [3 + 7 * i % 90 for i in range(70)]

    def change(dtype: torch.dtype) -> float:
        model = tiny_model(dtype=dtype)
        return max(largest_engine_logit_change(model, ids, split, 5, block_tokens=16) for split in range(30, 60, 3))

    assert change(torch.float64) < 1e-10
    assert change(torch.bfloat16) < 1


@pytest.mark.parametrize("split", [0, 66, 70])
def test_a_split_that_leaves_too_little_is_refused_for_the_engine_too(split: int) -> None:
    with pytest.raises(ValueError, match="can't split"):
        largest_engine_logit_change(tiny_model(), list(range(70)), split, 5, block_tokens=16)
