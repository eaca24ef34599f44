"""A tiny model in a folder, and one server of it for the tests that only ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from tests.engine.api.model_folder import save_tiny_model
from tests.engine.api.served import Served

KEY = "sk-not-needed-here"


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def served(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    options = ("--store", "none", "--precision", "fp32", "--block-tokens", "16", "--pool-bytes", "16MiB")
    with Served(model_folder, tmp_path_factory.mktemp("served"), *options) as served:
        yield served


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    """Without retries, so that what fails is seen to fail."""
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=KEY, max_retries=0, timeout=60) as client:
        yield client
