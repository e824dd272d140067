from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

_MEMORY = Path("/dev/shm")


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """On a file system in memory where there is one: these tests start many processes, each of which syncs its files,
    and on a busy disk that takes longer than all the rest. What is synced when is tested in tests/jobs/test_sink.py."""
    where = _MEMORY if _MEMORY.is_dir() and os.access(_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="batchgen-lite-test-", dir=where) as folder:
        yield Path(folder)
