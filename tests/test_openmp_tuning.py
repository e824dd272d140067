"""Idle OpenMP workers sleep soon, unless the user wants otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import batchgen_lite, os, sys; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
)
def test_set_before_torch_is_loaded_and_never_against_the_user(given: dict[str, str], spins: str) -> None:
    without = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env={**without, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [spins, "False"]
