"""Every part's bench at tiny sizes, and what is said when one has become slower."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import bench_dequant
import bench_reader
import bench_sampler
import bench_text
import pytest
from figures import Figure
from run import FULL, QUICK, main


def part(*ratios: float) -> Callable[[], list[Figure]]:
    """A part with one figure, whose ratio is the next of ``ratios`` each time."""
    left = list(ratios)
    return lambda: [Figure("step", 1.0, "us", left.pop(0))]


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    path = tmp_path / "baseline.json"
    path.write_text(json.dumps({"ring: step": 2.0, "other: step": 5.0}))
    return path


def test_within_the_tolerance_all_is_well(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--baseline", str(baseline), "--tolerance", "0.5"], {"ring": part(2.9)}) == 0
    assert "+45%" in capsys.readouterr().out


def test_what_is_slower_twice_is_named(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--baseline", str(baseline), "--tolerance", "0.5"], {"ring": part(9.0, 4.0)}) == 1
    said = capsys.readouterr()
    assert "SLOWER" in said.out
    assert "slower: ring: step, 4.00 instead of 2.00" in said.err


def test_a_moment_of_noise_is_forgiven(baseline: Path) -> None:
    assert main(["--baseline", str(baseline), "--tolerance", "0.5"], {"ring": part(9.0, 2.1)}) == 0


def test_a_new_figure_has_nothing_to_be_slower_than(baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--baseline", str(baseline)], {"fresh": part(99.0)}) == 0
    assert "new" in capsys.readouterr().out


def test_update_takes_the_median_and_leaves_other_parts_alone(baseline: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    arguments = ["--baseline", str(baseline), "--update", "--json", str(figures)]
    assert main(arguments, {"ring": part(7.0, 3.0, 4.0)}) == 0
    assert json.loads(baseline.read_text()) == {"ring: step": 4.0, "other: step": 5.0}
    assert json.loads(figures.read_text())[0]["figure"]["ratio"] == 4.0


@pytest.mark.parametrize("wrong", [["--only", "nothing"], ["--tolerance", "0"]])
def test_wrong_use_is_refused(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(wrong, {"ring": part(1.0)})
    assert ended.value.code == 2
    assert wrong[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("measure", "names"),
    [
        (lambda: bench_text.measure(rows=3, tokens=4, repeats=1), {"detokenise, token", "journal, token"}),
        (lambda: bench_reader.measure(mib=12, repeats=1), {"reader, bytes", "stream, bytes"}),
        (lambda: bench_sampler.measure(vocab=300, rows=2, repeats=1), {"greedy, row", "top_k, top_p, row"}),
        (lambda: bench_dequant.measure(rows=128, cols=512, tries=1), {"BF16", "Q4_K", "awq"}),
    ],
)
def test_parts_measure_at_any_size(measure: Callable[[], list[Figure]], names: set[str]) -> None:
    figures = {figure.name: figure for figure in measure()}
    assert set(figures) >= names
    assert all(figure.value > 0 and figure.ratio > 0 for figure in figures.values())


def test_the_stored_baseline_knows_every_part() -> None:
    known = {
        name.partition(":")[0]
        for name in json.loads(Path(main.__code__.co_filename).with_name("baseline.json").read_text())
    }
    assert set(QUICK) == set(FULL) == known
