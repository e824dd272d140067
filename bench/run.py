"""Every part's bench in one go, against a stored baseline: what has become slower?

    python bench/run.py [--full] [--only TEXT] [--tolerance 0.75] [--json FILE] [--update]

Compared are ratios to a reference measured beside each part (figures.py), so that the baseline is worth something on
other machines and at other moments. What seems slower is measured once more, and the better of the two counts. Exit
code 1 if a part is slower than its baseline by more than the tolerance, 0.75 = three quarters. ``--update`` writes the
baseline anew, the median of three; figures of parts that were not run stay as they are. Do it on a machine that does
nothing else. The default takes well under a minute, ``--full`` a few.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import bench_dequant
import bench_reader
import bench_sampler
import bench_scheduler
import bench_text
from figures import Figure

BASELINE = Path(__file__).with_name("baseline.json")
TOLERANCE = 0.75

Part = Callable[[], list[Figure]]

QUICK: dict[str, Part] = {
    "scheduler": lambda: bench_scheduler.measure((100, 1_000), sweeps=12),
    "text": bench_text.measure,
    "sampler": bench_sampler.measure,
    "reader": lambda: bench_reader.measure(mib=128),
    "decoders": lambda: bench_dequant.measure(rows=256, tries=12),
}
FULL: dict[str, Part] = {
    "scheduler": lambda: bench_scheduler.measure((100, 1_000, 10_000), sweeps=30),
    "text": lambda: bench_text.measure(rows=2_000, tokens=100, repeats=5),
    "sampler": lambda: bench_sampler.measure(repeats=10),
    "reader": lambda: bench_reader.measure(mib=1024, repeats=5),
    "decoders": lambda: bench_dequant.measure(tries=30),
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """One figure against the baseline; ``before`` None: it has none yet."""

    name: str
    figure: Figure
    before: float | None
    slower: bool

    def line(self) -> str:
        change = "new" if self.before is None else f"{self.figure.ratio / self.before - 1:+.0%}"
        mark = "  SLOWER" if self.slower else ""
        figure = self.figure
        return f"{self.name:<42} {figure.value:>12,.2f} {figure.unit:<22} {figure.ratio:>9.2f} x {change:>7}{mark}"


def judge(name: str, figures: Sequence[Figure], baseline: Mapping[str, float], tolerance: float) -> list[Verdict]:
    """The figures of part ``name`` against ``baseline``."""
    verdicts = []
    for figure in figures:
        full = f"{name}: {figure.name}"
        before = baseline.get(full)
        slower = before is not None and figure.ratio > before * (1 + tolerance)
        verdicts.append(Verdict(full, figure, before, slower))
    return verdicts


def better(one: Sequence[Figure], other: Sequence[Figure]) -> list[Figure]:
    """The lower ratio of each figure."""
    return [min(pair, key=lambda figure: figure.ratio) for pair in zip(one, other, strict=True)]


def middle(runs: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The median ratio of each figure."""
    return [sorted(same, key=lambda figure: figure.ratio)[len(same) // 2] for same in zip(*runs, strict=True)]


def run(
    parts: Mapping[str, Part], baseline: Mapping[str, float], tolerance: float, *, update: bool = False
) -> list[Verdict]:
    """Measure and judge ``parts``, printing each as it is done."""
    everything = []
    for name, measure in parts.items():
        figures = middle([measure() for _ in range(3)]) if update else measure()
        if not update and any(verdict.slower for verdict in judge(name, figures, baseline, tolerance)):
            figures = better(figures, measure())
        verdicts = judge(name, figures, baseline, tolerance)
        everything += verdicts
        print("\n".join(verdict.line() for verdict in verdicts), flush=True)
    return everything


def load(path: Path) -> dict[str, float]:
    """Ratios by name; none if there is no baseline yet."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def save(path: Path, old: Mapping[str, float], verdicts: Sequence[Verdict]) -> None:
    ratios = {**old, **{verdict.name: round(verdict.figure.ratio, 3) for verdict in verdicts}}
    path.write_text(json.dumps(ratios, indent=1) + "\n")


def main(
    arguments: Sequence[str] | None = None, quick: Mapping[str, Part] = QUICK, full: Mapping[str, Part] = FULL
) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="All parts against the stored baseline.")
    parser.add_argument("--full", action="store_true", help="larger sizes, more repeats")
    parser.add_argument("--only", help=f"parts whose name contains this; there are {', '.join(quick)}")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    parser.add_argument("--baseline", type=Path, default=BASELINE)
    parser.add_argument("--update", action="store_true", help="let these figures be the baseline")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    options = parser.parse_args(arguments)
    if options.tolerance <= 0:
        parser.error(f"--tolerance is {options.tolerance}: it must be above 0; 0.75 allows three quarters more")
    parts = {name: part for name, part in (full if options.full else quick).items() if (options.only or "") in name}
    if not parts:
        parser.error(f"--only {options.only!r} fits no part; there are {', '.join(quick)}")
    baseline = load(options.baseline)
    verdicts = run(parts, baseline, options.tolerance, update=options.update)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(verdict) for verdict in verdicts], indent=1) + "\n")
    if options.update:
        save(options.baseline, baseline, verdicts)
        return 0
    slower = [verdict for verdict in verdicts if verdict.slower]
    for verdict in slower:
        print(f"slower: {verdict.name}, {verdict.figure.ratio:.2f} instead of {verdict.before:.2f}", file=sys.stderr)
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
