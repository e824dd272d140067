"""Every kernel configuration is compiled for the cards it is for, and takes no more than it did before.

The compiler runs in a process of its own, because in this one kernels may be interpreted. What it found is compared
with kernels/compiled.json; ``python -m batchgen_lite.kernels.aot --write`` makes that file anew after a change.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from batchgen_lite.kernels import config
from batchgen_lite.kernels.aot import SHARED_LIMIT, TABLE
from batchgen_lite.kernels.aot_cases import FULL, SAMPLED, cases

CASES = cases()
RECORDED = json.loads(TABLE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    report = tmp_path_factory.mktemp("aot") / "report.json"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-P", "-m", "batchgen_lite.kernels.aot", "--output", str(report)]
    command += ["--jobs", str(min(4, os.cpu_count() or 1))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert report.exists(), done.stderr[-4000:]
    result: dict[str, Any] = json.loads(report.read_text(encoding="utf-8"))
    return result


def test_the_table_names_these_cases() -> None:
    assert sorted(RECORDED["cases"]) == sorted(case.key for case in CASES)
    assert len({case.key for case in CASES}) == len(CASES)


def test_every_kernel_is_compiled_for_every_card() -> None:
    kernels = {case.launch().kernel.__name__ for case in CASES}
    for capability in FULL + SAMPLED:
        assert {case.launch().kernel.__name__ for case in CASES if case.capability == capability} == kernels


def test_every_rule_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    used: set[tuple[str, int]] = set()
    original = config.find_rule

    def recording(op: str, **key: Any) -> int | None:
        number = original(op, **key)
        if number is not None:
            used.add((op, number))
        return number

    monkeypatch.setattr(config, "find_rule", recording)
    for case in CASES:
        case.launch()
    assert used == {(op, number) for op, rules in config.all_rules().items() for number in range(len(rules))}


@pytest.mark.parametrize("key", [case.key for case in CASES])
def test_compiles_within_its_resources(compiled: dict[str, Any], key: str) -> None:
    got, recorded = compiled["cases"][key], RECORDED["cases"][key]
    assert isinstance(got, dict), got
    assert got["shared"] <= SHARED_LIMIT
    assert got["stack"] <= recorded["stack"], "spills more than before"
    if compiled["triton"] == RECORDED["triton"]:  # another compiler allocates otherwise
        assert got["registers"] <= recorded["registers"]
        assert got["shared"] <= recorded["shared"]


def test_recorded_spills_are_few() -> None:
    """A kernel may spill a little where a card's compiler insists; the table may not be loosened by the way."""
    spilling = {key: case["stack"] for key, case in RECORDED["cases"].items() if case["stack"]}
    assert all(stack <= 64 for stack in spilling.values()), spilling


def test_the_table_is_in_the_package() -> None:
    assert Path(config.__file__).with_name("compiled.json") == TABLE
