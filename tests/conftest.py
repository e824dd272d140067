"""Settings of every test run. Comes before any import of ours, of torch or of triton."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# `python -m pytest` puts the working directory on sys.path, and the folder kernels/ would then be found as the
# top-level module "kernels", which transformers looks for (it belongs to another distribution).
sys.path[:] = [entry for entry in sys.path if Path(entry or os.curdir).resolve() != ROOT]

HAS_CUDA = any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))
if not HAS_CUDA:
    # Read by triton when a kernel is decorated, so it must be set before the first of ours is imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tiny shapes gain nothing from many threads; a test that is about threads sets its own count.
os.environ.setdefault("OMP_NUM_THREADS", str(min(2, os.cpu_count() or 1)))
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# A test that reaches for the network is a mistake and shall fail at once, not after a time-out.
os.environ["HF_HUB_OFFLINE"] = "1"
# Mirrors of flags that the developer may have set in the shell.
for name in [name for name in os.environ if name.startswith("BATCHGEN_")]:
    del os.environ[name]

if importlib.util.find_spec("batchgen_lite") is None:
    pytest.exit(
        'batchgen_lite is not installed here: run `make test`, or `pip install -e ".[dev]"` first', returncode=2
    )


def pytest_configure(config: pytest.Config) -> None:
    from hypothesis import settings

    # The same examples in every run: a failure in CI is then one that a developer can repeat. Time limits per
    # example would only measure how busy the machine is.
    settings.register_profile("repeatable", derandomize=True, deadline=None, max_examples=100)
    settings.load_profile("repeatable")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests out, and say so, that need what this machine lacks: marked ``gpu`` or ``browser``. `make browser`
    installs one."""
    lacking = set() if HAS_CUDA else {"gpu"}
    from browser import find_chromium

    if find_chromium() is None:
        lacking.add("browser")
    without = [item for item in items if any(item.get_closest_marker(name) is not None for name in lacking)]
    if without:
        left_out = set(without)
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=without)
