from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A power loss cannot be had here, and fsync on a busy disk takes longer than all the rest. What a run syncs, and
    in which order, is a test of its own (test_sink)."""
    monkeypatch.setattr(os, "fsync", lambda fd: None)
