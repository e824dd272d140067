"""``doctor``: facts about this machine, problems with advice, and nothing that can break it."""

from __future__ import annotations

import io
import json
import platform
import resource
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file

from batchgen_lite.cli import doctor_compute, doctor_machine, doctor_storage
from batchgen_lite.cli.app import run
from batchgen_lite.cli.doctor import show
from batchgen_lite.cli.doctor_finding import Finding, run_checks
from batchgen_lite.offload.budget import GIB, AvailableMemory
from batchgen_lite.offload.probe_disk import Disk


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "batchgen-lite"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.zeros(3 << 20)}, folder / "model.safetensors")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def doctor(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["doctor", "--json", *arguments]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


def by_name(output: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {finding["name"]: finding for finding in output["findings"]}


def test_everything_for_real(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = doctor(capsys, "--model", str(model))
    findings = by_name(output)
    assert output["problems"] == sum(finding["problem"] for finding in output["findings"])
    assert findings["checkpoint"]["data"] == {
        "format": "safetensors",
        "files": 1,
        "bytes": (model / "model.safetensors").stat().st_size,
    }
    assert set(findings["read rate"]["data"]["bytes_per_second"]) == {"1", "4", "16"}
    assert min(findings["read rate"]["data"]["bytes_per_second"].values()) > 0
    assert findings["reader"]["data"]["source"] == "measured"
    assert set(findings["matrix products"]["data"]["flops"]) == {"float32", "bfloat16", "float16"}
    assert min(findings["matrix products"]["data"]["flops"].values()) > 0
    assert findings["torch"]["value"] == torch.__version__
    assert findings["cores"]["data"]["usable"] >= 1
    assert findings["RAM"]["data"]["total"] == psutil.virtual_memory().total
    assert {
        "type",
        "direct reads",
        "huge pages",
        "GPUDirect Storage",
        "device",
        "pinned memory",
        "supply",
        "open files",
    } <= set(findings)


def test_quick_measures_nothing(model: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    findings = by_name(doctor(capsys, "--quick", "--model", str(model)))
    assert not {"read rate", "reader", "matrix products"} & set(findings)
    assert "type" in findings
    assert not cache.exists()


def test_for_people_without_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--quick"]) == 0
    output = capsys.readouterr().out
    for word in ("versions", "processor", "memory", "limits", "GPUDirect Storage", "Give --model PATH"):
        assert word in output


def test_a_model_that_is_not_there_is_wrong_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["doctor", "--model", str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist; give a directory with the weights" in capsys.readouterr().err


def test_a_damaged_model_is_a_finding_and_the_rest_goes_on(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 100)
    findings = by_name(doctor(capsys, "--quick", "--model", str(model)))
    assert findings["checkpoint"]["problem"]
    assert "model.safetensors" in findings["checkpoint"]["value"]
    assert findings["checkpoint"]["advice"]
    assert "GPUDirect Storage" in findings


def test_a_check_that_breaks_is_a_finding_and_the_next_one_runs() -> None:
    def _odd_hardware() -> Iterator[Finding]:
        yield Finding("x", "first", "fine")
        raise FileNotFoundError("/proc/odd")

    def other() -> Iterator[Finding]:
        yield Finding("x", "other", "fine")

    findings = list(run_checks("x", [_odd_hardware, other]))
    assert [finding.name for finding in findings] == ["first", "odd hardware", "other"]
    assert [finding.is_problem for finding in findings] == [False, True, False]
    assert "FileNotFoundError: /proc/odd" in findings[1].value


def test_problems_are_repeated_at_the_end_with_their_advice() -> None:
    console = Console(file=io.StringIO(), width=100)
    findings = [Finding("disk", "type", "hdd [sda]", "buy an SSD"), Finding("power", "supply", "mains")]
    show(iter(findings), console, Path("m"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.rstrip().endswith("1 problem:\n- disk, type: hdd [sda]\n    buy an SSD")
    show(iter(findings[1:]), console, None)
    assert "No problems found." in console.file.getvalue()  # type: ignore[attr-defined]


# ---- the machine ----


def only(findings: Iterator[Finding], name: str) -> Finding:
    return next(finding for finding in findings if finding.name == name)


@pytest.mark.parametrize(
    ("machine", "flags", "features", "problem"),
    [
        ("x86_64", "flags\t\t: fpu sse2 avx2 fma f16c amx_bf16", "avx2, fma, f16c, amx_bf16", False),
        ("x86_64", "flags\t\t: fpu sse2 avx", "none of those that matter", True),
        ("aarch64", "Features\t: fp asimd bf16", "asimd, bf16", False),
    ],
)
def test_processor_features(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, flags: str, features: str, problem: bool
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor\t: 0\nmodel name\t: Quick 9000\n{flags}\n\nprocessor\t: 1\n{flags}\n")
    monkeypatch.setattr(platform, "machine", lambda: machine)
    findings = list(doctor_machine.processor(cpuinfo))
    assert findings[0].value.startswith("Quick 9000; ")
    assert findings[1].value == features
    assert findings[1].is_problem == problem


@pytest.mark.parametrize(
    ("available", "advice"),
    [
        (AvailableMemory(30 * GIB, 32 * GIB, "the machine"), ""),
        (AvailableMemory(1 * GIB, 32 * GIB, "the machine"), "close other programs"),
        (AvailableMemory(1 * GIB, 3 * GIB // 2, "cgroup v2 memory.max of /x"), "raise the container's memory limit"),
    ],
)
def test_too_little_memory(monkeypatch: pytest.MonkeyPatch, available: AvailableMemory, advice: str) -> None:
    monkeypatch.setattr(doctor_machine, "available_memory", lambda: available)
    monkeypatch.setattr(doctor_machine, "resident_bytes", lambda: GIB // 4)
    findings = list(doctor_machine.memory())
    assert only(iter(findings), "default --ram").advice.startswith(advice)
    assert only(iter(findings), "default --ram").is_problem == bool(advice)
    assert ("cgroup" in only(iter(findings), "limit").value) == ("cgroup" in available.bound_by)


@pytest.mark.parametrize(
    ("soft", "hard", "advice"),
    [
        (20_000, 20_000, ""),
        (256, 524_288, "raise it before the run: ulimit -n 65536"),
        (64, 128, "raise it before the run: ulimit -n 128; the hard limit of 128 is set in /etc/security/limits.conf"),
    ],
)
def test_open_files(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, advice: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    assert only(doctor_machine.limits(), "open files").advice == advice


@pytest.mark.parametrize(
    ("said", "value", "problem"),
    [
        ("always [madvise] never\n", "madvise", False),
        ("[always] madvise never\n", "always", False),
        ("always madvise [never]\n", "never", True),
        (None, "not in this kernel", False),
    ],
)
def test_huge_pages(said: str | None, value: str, problem: bool, tmp_path: Path) -> None:
    enabled = tmp_path / "enabled"
    if said is not None:
        enabled.write_text(said)
    finding = only(doctor_machine.memory(enabled), "huge pages")
    assert finding.value == value
    assert finding.is_problem == problem
    assert ("echo madvise | sudo tee /sys/kernel/mm" in finding.advice) == problem


def test_on_battery(monkeypatch: pytest.MonkeyPatch) -> None:
    battery = types.SimpleNamespace(percent=55.4, power_plugged=False)
    monkeypatch.setattr(psutil, "sensors_battery", lambda: battery, raising=False)
    finding = only(doctor_machine.power(), "supply")
    assert finding.value == "battery at 55 %"
    assert "plug the machine in" in finding.advice
    battery.power_plugged = True
    assert only(doctor_machine.power(), "supply").value == "mains"


@pytest.mark.parametrize(
    ("version", "advice"),
    [
        ("2.9.0", ""),
        ("2.13.0+cpu", ""),
        ("2.8.1", "too old: pip install --upgrade 'torch>=2.9'"),
        ("", "install it: pip install 'torch>=2.9'"),
    ],
)
def test_versions(monkeypatch: pytest.MonkeyPatch, version: str, advice: str) -> None:
    monkeypatch.setattr(doctor_machine, "_version", lambda name: version)
    assert only(doctor_machine.versions(), "torch").advice == advice


def test_wsl_is_known_by_its_kernel() -> None:
    assert doctor_machine.is_wsl("5.15.153.1-microsoft-standard-WSL2")
    assert not doctor_machine.is_wsl("6.8.0-45-generic")


# ---- disk and GPU ----


@pytest.mark.parametrize("kind", ["nvme", "ssd", "hdd", "network", "memory", "virtual", "unknown"])
def test_disk_types(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(doctor_storage, "disk_of", lambda path: Disk(kind, "sdx", "Model", "ext4", "/"))
    finding = only(doctor_storage.disk(tmp_path), "type")
    assert finding.value == f"{kind} (sdx Model), ext4 on /"
    assert finding.is_problem == (kind in {"hdd", "network", "memory"})


@pytest.mark.parametrize(
    ("alignment", "value", "problem"),
    [(512, "yes, aligned to 512 bytes", False), (0, "no", True), (None, "the kernel does not say", False)],
)
def test_direct_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, alignment: int | None, value: str, problem: bool
) -> None:
    monkeypatch.setattr(doctor_storage, "direct_alignment", lambda path: alignment)
    finding = only(doctor_storage.disk(tmp_path), "direct reads")
    assert finding.value.startswith(value)
    assert finding.is_problem == problem


@pytest.mark.parametrize(("rate", "problem"), [(0.2e9, True), (3e9, False)])
def test_a_slow_disk_is_a_problem(model: Path, monkeypatch: pytest.MonkeyPatch, rate: float, problem: bool) -> None:
    from batchgen_lite.offload import probe_measure

    monkeypatch.setattr(probe_measure, "read_window", lambda paths, setting, window: rate)
    finding = only(doctor_storage.read_rates(doctor_storage.weight_files(model)), "read rate")
    assert finding.is_problem == problem
    if problem:
        assert "takes 107 s" in finding.advice


@pytest.mark.parametrize(
    ("node", "cuda", "advice"),
    [
        ("", None, ""),
        ("nvidiactl", None, "this torch is built without CUDA"),
        ("dxg", "13.0", "the driver does not serve CUDA 13.0"),
    ],
)
def test_a_card_that_torch_cannot_use(tmp_path: Path, node: str, cuda: str | None, advice: str) -> None:
    if node:
        (tmp_path / node).touch()
    assert advice in doctor_compute._no_gpu_advice(cuda, tmp_path)
    assert bool(advice) == bool(doctor_compute._no_gpu_advice(cuda, tmp_path))


@pytest.mark.parametrize(
    ("capability", "advice"),
    [
        ((6, 1), "--device cuda:1 is refused: Card has compute capability 6.1"),
        ((7, 5), "products run in torch, in float32, as the kernels cannot be used: Card has compute capability 7.5"),
    ],
)
def test_cards_that_are_too_old(capability: tuple[int, int], advice: str) -> None:
    assert doctor_compute.card_advice(1, "Card", capability).startswith(advice)
