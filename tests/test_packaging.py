"""The wheel holds every package, and nothing of ours can be imported as ``kernels`` or ``offload``."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = {"batchgen_lite": "batchgen_lite", "kernels": "batchgen_lite.kernels", "offload": "batchgen_lite.offload"}


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def folders_with_init() -> set[str]:
    """Dotted names of all package folders in the tree, as they are imported."""
    found = set()
    for folder, package in ROOMS.items():
        for init in (ROOT / folder).rglob("__init__.py"):
            inside = init.parent.relative_to(ROOT / folder).parts
            found.add(".".join([package, *inside]))
    return found


def modules_in_tree() -> set[str]:
    """Paths of all modules as they must stand in the wheel."""
    return {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
        for folder, package in ROOMS.items()
        for path in (ROOT / folder).rglob("*.py")
    }


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead an interpreter back to the repository."""
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy of the sources, so that nothing left in build/ can slip in."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for folder in ROOMS:
        shutil.copytree(ROOT / folder, source / folder, ignore=shutil.ignore_patterns("__pycache__"))
    target = tmp_path_factory.mktemp("wheel")
    build = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    run(sys.executable, "-c", build, target, cwd=source)
    (built,) = target.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh environment that holds the wheel; third-party packages come from the one that runs this test.

    A path file lends them. Path files inside the lent folder are not read, so the editable install of the
    development environment stays out of sight."""
    home = tmp_path_factory.mktemp("environment")
    venv.create(home, with_pip=False, symlinks=True)
    scheme = {"base": str(home), "platbase": str(home)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", vars=scheme))
    python = home / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python]
    run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=home)
    lent = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages / "lent.pth").write_text("".join(f"{path}\n" for path in sorted(lent)))
    return home


def test_packages_are_the_folders_with_init() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    assert len(listed) == len(set(listed))
    assert set(listed) == folders_with_init()


def test_every_folder_with_modules_has_init() -> None:
    bare = {
        path.parent.relative_to(ROOT)
        for folder in ROOMS
        for path in (ROOT / folder).rglob("*.py")
        if not (path.parent / "__init__.py").exists()
    }
    assert bare == set()


def test_wheel_holds_every_module_and_one_top_level_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert names >= modules_in_tree()
    assert "batchgen_lite/py.typed" in names
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"batchgen_lite"}


def test_wheel_holds_data_files(wheel: Path) -> None:
    data = {
        "/".join([*package.split("."), *path.relative_to(ROOT / folder).parts])
        for folder, package in ROOMS.items()
        for path in (ROOT / folder).rglob("*.json")
    }
    with zipfile.ZipFile(wheel) as archive:
        assert set(archive.namelist()) >= data


def test_installed_wheel_serves_every_package_from_itself(installed: Path, tmp_path: Path) -> None:
    check = "import importlib.util, sys\nfor name in sys.argv[1:]:\n    print(importlib.util.find_spec(name).origin)\n"
    packages = project()["tool"]["setuptools"]["packages"]
    origins = run(installed / "bin" / "python", "-c", check, *packages, cwd=tmp_path).split()
    assert len(origins) == len(packages)
    assert all(Path(origin).is_relative_to(installed) for origin in origins), origins


def test_installed_command_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    shown = run(installed / "bin" / "batchgen-lite", "--help", cwd=tmp_path)
    assert "generate" in shown


def test_installed_wheel_exposes_no_bare_rooms(installed: Path, tmp_path: Path) -> None:
    check = (
        "import importlib.util as u; print(*[getattr(u.find_spec(n), 'origin', None) for n in ('kernels', 'offload')])"
    )
    origins = run(installed / "bin" / "python", "-c", check, cwd=tmp_path).split()
    assert len(origins) == 2
    assert not [origin for origin in origins if Path(origin).is_relative_to(installed)]


@pytest.mark.parametrize("name", ["kernels", "offload"])
def test_bare_room_names_never_resolve_to_the_repository(name: str) -> None:
    spec = importlib.util.find_spec(name)
    places = [] if spec is None else [spec.origin or "", *(spec.submodule_search_locations or [])]
    assert not [place for place in places if Path(place).resolve().is_relative_to(ROOT / name)]


def test_rooms_import_without_torch_or_triton() -> None:
    """transformers may import a folder called kernels to look for a version; ours must stay light all the same."""
    check = (
        "import sys, batchgen_lite.kernels, batchgen_lite.offload\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])\n"
    )
    assert run(sys.executable, "-P", "-c", check, cwd=ROOT).strip() == "[]"
