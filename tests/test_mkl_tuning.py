"""MKL's reproducible mode is set where its bits need it, before it is used, and never against the user."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from batchgen_lite import mkl_tuning

SHOW = "import batchgen_lite, os, sys; print(os.environ.get('MKL_CBWR'), 'torch' in sys.modules)"


def cpu_info(vendor: str, flags: str) -> str:
    one = f"processor\t: 0\nvendor_id\t: {vendor}\nmodel name\t: Some Processor\nflags\t\t: fpu vme {flags} aes\n\n"
    return one + one.replace(flags, "")  # what the second core says does not count


@pytest.mark.parametrize(
    ("vendor", "flags", "given", "expected"),
    [
        ("GenuineIntel", "avx2 avx512f avx512bw", None, "AVX2,STRICT"),
        ("GenuineIntel", "avx2 avx512f", "COMPATIBLE", "COMPATIBLE"),
        ("GenuineIntel", "avx2", None, None),
        ("AuthenticAMD", "avx2 avx512f", None, None),
    ],
)
def test_only_where_it_is_needed(
    vendor: str, flags: str, given: str | None, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpuinfo").write_text(cpu_info(vendor, flags))
    monkeypatch.setattr(mkl_tuning, "CPU_INFO", tmp_path / "cpuinfo")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    if given is not None:
        monkeypatch.setenv("MKL_CBWR", given)
    mkl_tuning.tune_mkl()
    assert os.environ.get("MKL_CBWR") == expected


def test_a_system_without_that_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mkl_tuning, "CPU_INFO", tmp_path / "absent")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    mkl_tuning.tune_mkl()
    assert "MKL_CBWR" not in os.environ


def test_it_is_set_when_the_package_is_imported_which_loads_no_torch() -> None:
    without = {key: value for key, value in os.environ.items() if key != "MKL_CBWR"}
    done = subprocess.run([sys.executable, "-c", SHOW], env=without, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(mkl_tuning.MODE if mkl_tuning._needs_mode() else None), "False"]
