"""Computing beside the engine: on threads that are gone afterwards, and with the process's setting as before."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from make_checkpoint import Shape, write_checkpoint

from batchgen_lite.runtime.compute_apart import compute_apart

SHAPE = Shape(layers=2, hidden=192, heads=4, kv_heads=2, head_dim=48, experts=16, top_k=2, width=192, vocab=431)
WORKERS = """
import os, threading

def workers():
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())
"""
RUN = """
import sys
from pathlib import Path
import torch
from engine_runs import Collecting, random_prompts, run_engine
from batchgen_lite.offload.probe import DEFAULT_SETTING
from batchgen_lite.runtime import build
from batchgen_lite.runtime.machine import Machine
from batchgen_lite.runtime.rates import MachineRates

def watching(self, token):
    seen.append(workers() - idle)
    return accept(self, token)

rates = MachineRates(1e9, 1e11, 2, source="measured")
build.look_at_machine = lambda paths, threads: Machine(DEFAULT_SETTING, 2, rates)
seen, accept = [], Collecting.accept
Collecting.accept = watching
torch.set_num_threads(2)  # torch starts threads for other purposes then
idle = workers()
run_engine(Path(sys.argv[1]), random_prompts([40] * 12), 4, threads=2)
print(seen[-1])
"""

PROBE = """
import sys, time
from pathlib import Path
import torch
from batchgen_lite.offload.probe_cache import ProbeCache
from batchgen_lite.runtime import machine

torch.set_num_threads(2)
idle, machine.WORTH_PROBING = workers(), 1
machine.look_at_machine([Path(sys.argv[1])], 2, cache=ProbeCache(Path(sys.argv[2])))
deadline = time.monotonic() + 30
while workers() > idle and time.monotonic() < deadline:  # they end by themselves, a moment later
    time.sleep(0.01)
print(workers() - idle)
"""


def workers() -> int:
    """Threads of this process that are not Python's: those of OpenMP, and some of libraries."""
    return len(os.listdir("/proc/self/task")) - len(threading.enumerate())


def test_the_team_ends_with_the_computing_and_the_setting_is_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(before)
    idle, team = workers(), []

    def compute() -> torch.Tensor:
        alone = workers()
        product = torch.ones(256, 256) @ torch.ones(256, 256)
        team.append((torch.get_num_threads(), workers() - alone))
        return product

    assert compute_apart(before + 2, compute)[0, 0] == 256
    assert team == [(before + 2, before + 1)]
    assert torch.get_num_threads() == before
    deadline = time.monotonic() + 30
    while workers() != idle:  # they end by themselves, a moment later
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_is_raised_is_passed_on() -> None:
    before = torch.get_num_threads()

    def compute() -> None:
        raise MemoryError("no more")

    with pytest.raises(MemoryError, match="no more"):
        compute_apart(before + 1, compute)
    assert torch.get_num_threads() == before


def test_a_run_has_one_team_of_workers(tmp_path: Path) -> None:
    """With the kernels probed before it."""
    write_checkpoint(tmp_path / "model", SHAPE)
    assert output_of(RUN, tmp_path, tmp_path / "model") == ["1"]


def test_the_probe_of_the_machine_leaves_no_team_behind(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(64 << 20))
    assert output_of(PROBE, tmp_path, file, tmp_path / "cache") == ["0"]


def output_of(script: str, cache: Path, *arguments: Path) -> list[str]:
    """What ``script`` prints in a process of its own; in this one other tests have computed."""
    environment = dict(os.environ, XDG_CACHE_HOME=str(cache), PYTHONPATH=os.pathsep.join(sys.path))
    command = [sys.executable, "-c", WORKERS + script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()
