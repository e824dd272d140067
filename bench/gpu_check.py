"""What has to be seen on a card once: numbers, bits, models, speed, jobs from disk; one table, one JSON file.

    python bench/gpu_check.py [--json gpu_check.json] [--device cuda:0] [--only TEXT] [--minutes 8]
    python bench/gpu_check.py --dry-run

One process, no network, nothing beforehand: models are written to a temporary directory. Needs torch with CUDA, triton,
numpy and psutil; runs from a checkout, installed or not. What else is missing (transformers, accelerate, kvikio) is
said, and its lines are left out. Sections stand alone: one that fails is a line of the table, and the others run. A
section that has not begun when the time is over is left out, and said so.

``--dry-run`` needs no card: the same code on the smallest sizes, kernels in Triton's interpreter on the CPU. Its speeds
mean nothing. Exits with 1 if anything was found wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Line:
    """One line of the table. ``good``: whether it is as it has to be, None where there is nothing to judge."""

    what: str
    result: str
    good: bool | None = None
    data: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Context:
    """What sections are given. ``dry``: no card, smallest sizes; ``work``: a directory for checkpoints."""

    device: str
    dry: bool
    work: Path
    deadline: float

    def left(self) -> float:
        """Seconds until the time is over."""
        return self.deadline - time.monotonic()


Section = Callable[[Context], Iterator[Line]]


def make_importable(folder: Path) -> None:
    """Let ``batchgen_lite`` be imported from this checkout where it is not installed: its folders are mapped together
    by packaging, so a tree of links stands in for that."""
    import importlib.util

    if importlib.util.find_spec("batchgen_lite") is not None:
        return
    package = folder / "batchgen_lite"
    package.mkdir()
    for entry in [*(ROOT / "batchgen_lite").iterdir(), ROOT / "kernels", ROOT / "offload"]:
        (package / entry.name).symlink_to(entry)
    sys.path.insert(0, str(folder))


def sections() -> dict[str, Section]:
    """In the order in which they run: what must be right comes before what is fast."""
    import gpu_check_jobs
    import gpu_check_models
    import gpu_check_numerics
    import gpu_check_speed

    return {
        "machine": gpu_check_speed.machine,
        "numbers of kernels": gpu_check_numerics.numbers,
        "bits of a row": gpu_check_numerics.bits,
        "models": gpu_check_models.equality,
        "a row alone, in 7, in 500": gpu_check_models.invariance,
        "jobs": gpu_check_jobs.jobs,
        "copies and disk": gpu_check_speed.links,
        "speed of kernels": gpu_check_speed.kernels,
        "GPUDirect Storage": gpu_check_speed.gds,
    }


def run(name: str, section: Section, context: Context) -> list[Line]:
    """One section; whatever it raises becomes its last line."""
    lines: list[Line] = []
    if context.left() <= 0:
        lines.append(Line("not run", "the time was over"))
    else:
        began = time.monotonic()
        try:
            for line in section(context):
                lines.append(line)
                show(name, line)
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            lines.append(Line("failed", f"{type(error).__name__}: {error}"[:400], False, {"traceback": text}))
            show(name, lines[-1])
        lines.append(Line("seconds", f"{time.monotonic() - began:.1f}"))
    show(name, lines[-1])
    return lines


def show(section: str, line: Line) -> None:
    verdict = {True: "ok", False: "WRONG", None: ""}[line.good]
    print(f"{section:<26} {line.what:<52} {verdict:<6} {line.result}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check BatchGen-Lite on a CUDA card.")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--dry-run", action="store_true", help="no card: smallest sizes, kernels interpreted")
    parser.add_argument("--json", type=Path, default=Path("gpu_check.json"), help="default gpu_check.json")
    parser.add_argument("--only", default="", help="only sections whose name contains this")
    parser.add_argument("--minutes", type=float, default=7.5, help="begin no section after this (default 7.5)")
    parser.add_argument("--work", type=Path, help="where checkpoints are written (default: a temporary directory)")
    options = parser.parse_args()
    if options.dry_run:
        os.environ["TRITON_INTERPRET"] = "1"  # read when kernels are first imported
    with tempfile.TemporaryDirectory(dir=options.work, prefix="gpu-check-") as folder:
        work = Path(folder)
        make_importable(work)
        device = "cpu" if options.dry_run else options.device
        context = Context(device, options.dry_run, work, time.monotonic() + 60 * options.minutes)
        chosen = {name: section for name, section in sections().items() if options.only in name}
        if not chosen:
            parser.error(f"no section's name contains {options.only!r}: {', '.join(sections())}")
        found = {name: run(name, section, context) for name, section in chosen.items()}
    report = {name: [asdict(line) for line in lines] for name, lines in found.items()}
    options.json.write_text(json.dumps({"dry_run": options.dry_run, "sections": report}, indent=1) + "\n")
    wrong = sum(line.good is False for lines in found.values() for line in lines)
    print(f"{wrong} lines are wrong; all of it is in {options.json}")
    return 1 if wrong else 0


if __name__ == "__main__":
    # The sections lie beside this file, also where the interpreter does not look there (PYTHONSAFEPATH); they import it
    # by its name, and it shall not exist twice.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.modules["gpu_check"] = sys.modules["__main__"]
    sys.exit(main())
