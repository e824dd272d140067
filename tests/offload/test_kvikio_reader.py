"""KvikioReader with the real kvikio package: a stub libcuda.so.1, built here, stands for the driver.

kvikio finds the driver when its process starts, so each scenario of tests/support/kvikio_session.py runs in a process
of its own, with LD_LIBRARY_PATH set.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from reading import write_file

from batchgen_lite.errors import UsageError
from batchgen_lite.offload.readers import kvikio_probe
from batchgen_lite.offload.readers.select import open_reader

ROOT = Path(__file__).resolve().parent.parent.parent
SUPPORT = ROOT / "tests" / "support"
REQUIREMENTS = SUPPORT / "kvikio-requirements.txt"


@pytest.fixture(scope="module")
def kvikio_site() -> Path:
    """The folder that `make test` installs kvikio into; installed here if pytest was started by hand."""
    site = ROOT / "build" / "kvikio"
    if not (site / ".made").exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += ["--upgrade", "--target", str(site), "-r", str(REQUIREMENTS)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert result.returncode == 0, f"kvikio cannot be installed for its test:\n{result.stderr}"
        (site / ".made").touch()
    return site


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with a libcuda.so.1 that works, one that does not answer, and none."""
    folders = {}
    for name, options in (("working", []), ("deaf", ["-DDEAF"]), ("absent", None)):
        folder = folders[name] = tmp_path_factory.mktemp(name)
        if options is not None:
            library = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(folder / "libcuda.so.1")]
            subprocess.run(["cc", *options, *library, str(SUPPORT / "stub_libcuda.c")], check=True, timeout=300)
    return folders


def run(scenario: str, path: Path, driver: Path, kvikio_site: Path) -> dict[str, Any]:
    libraries = [str(driver), *(str(folder) for folder in kvikio_site.glob("nvidia/*/lib"))]
    environment = {
        **os.environ,
        "LD_LIBRARY_PATH": os.pathsep.join(libraries),
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(kvikio_site)]),
        "PYTHONSAFEPATH": "1",
    }
    result = subprocess.run(
        [sys.executable, "-W", "error", str(SUPPORT / "kvikio_session.py"), scenario, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    outcome: dict[str, Any] = json.loads(result.stdout)
    return outcome


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_file(tmp_path / "shard.bin", 1_000_003)
    return tmp_path / "shard.bin"


def test_every_byte_arrives_through_the_real_kvikio(path: Path, drivers: dict[str, Path], kvikio_site: Path) -> None:
    assert run("reading", path, drivers["working"], kvikio_site) == {
        "name": "kvikio",
        "asked": True,
        "read_at_least_asked": True,
        "busy": True,
        "settings": [3, 65_536, True],
        "closed": "the reader is closed",
    }


def test_device_memory_goes_through_the_cuda_array_interface(
    path: Path, drivers: dict[str, Path], kvikio_site: Path
) -> None:
    assert run("device", path, drivers["working"], kvikio_site) == {
        "first": True,
        "second": True,
        "refused": "10 bytes at 99991 are outside an arena of 100000",
    }


def test_faults_end_in_errors_that_name_the_file(path: Path, drivers: dict[str, Path], kvikio_site: Path) -> None:
    outcome = run("faults", path, drivers["working"], kvikio_site)
    assert f"{path} ends at offset 100000, but 1000003 bytes at offset 0 were wanted" in outcome["truncated"]
    assert f"{path} changed during the run: it was written to" in outcome["written"]
    assert str(path) in outcome["missing"]
    assert "No such file" in outcome["missing"]


def test_auto_prefers_the_direct_reader_without_gpudirect_storage(
    path: Path, drivers: dict[str, Path], kvikio_site: Path
) -> None:
    outcome = run("selection", path, drivers["working"], kvikio_site)
    assert {kind: name for kind, (name, _) in outcome.items()} == {
        "auto": "direct",
        "kvikio": "kvikio",
        "direct": "direct",
        "buffered": "buffered",
    }
    assert "cuFile finds no GPUDirect Storage" in outcome["auto"][1]


@pytest.mark.parametrize(
    ("driver", "said"),
    [("absent", "libcuda.so.1 is missing, which comes with the NVIDIA driver"), ("deaf", "does not answer")],
)
def test_without_a_working_driver_kvikio_is_refused_and_auto_says_why(
    path: Path, drivers: dict[str, Path], kvikio_site: Path, driver: str, said: str
) -> None:
    outcome = run("selection", path, drivers[driver], kvikio_site)
    name, message = outcome["kvikio"]
    assert name == "refused"
    assert said in message
    assert "--reader direct" in message
    assert outcome["auto"][0] == "direct"
    assert said in outcome["auto"][1]


def test_without_the_package_the_message_says_how_to_get_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kvikio", None)  # how the import system notes "not there"
    with pytest.raises(UsageError, match=r"the package kvikio is not installed; .*batchgen-lite\[gds\]"):
        open_reader("kvikio", [path])
    opened = open_reader("auto", [path])
    opened.reader.close()
    assert opened.reader.name == "direct"
    assert "not installed" in opened.reason
    assert kvikio_probe.gds_state(path)[0] is False


def test_an_unknown_kind_is_a_usage_error(path: Path) -> None:
    with pytest.raises(UsageError, match="--reader 'mmap' is not known; choose one of auto, direct, buffered, kvikio"):
        open_reader("mmap", [path])
