"""Small tokenizers of each kind as fixtures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_tokenizers import (
    byte_level_tokenizer,
    metaspace_tokenizer,
    spm_tokenizer,
    train_byte_level,
    write_directory,
)

from batchgen_lite.text.tokenizer import Tokenizer


@pytest.fixture
def byte_level_directory(tmp_path: Path) -> Path:
    return write_directory(tmp_path / "model", train_byte_level())


@pytest.fixture(scope="session", params=["byte_level", "spm", "metaspace"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    makers = {"byte_level": byte_level_tokenizer, "spm": spm_tokenizer, "metaspace": metaspace_tokenizer}
    return makers[request.param]()


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def spm() -> Tokenizer:
    return spm_tokenizer()
