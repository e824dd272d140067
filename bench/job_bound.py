"""The time below which a job cannot fall: bytes it must read, operations it must do, at the machine's rates.

    batchgen-lite generate ... --progress json 2> run.jsonl
    python bench/job_bound.py MODEL run.jsonl [--read-rate 200MB]

Both follow from the run: what was read, less the experts that no router chose after all, and the tokens that were
computed, each through the experts it was routed to, and behind the last attention only those whose logits were wanted.
The longer of the two is the bound; attention, norms and sampling are left out of it, and so is everything that keeps a
processor from its peak. The machine's rates are measured here, each with the other resource idle: matrix products of an
expert's size, and the checkpoint read with O_DIRECT.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines import json_lines
from sizes import parse_size

from batchgen_lite.models.load import LoadedModel, load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.offload.checkpoint.tensors import Extent
from batchgen_lite.offload.probe_measure import SUBMISSION_BYTES, measure_alone, read_window
from batchgen_lite.offload.probe_result import ReaderSetting
from batchgen_lite.offload.tiles import SHARED_EXPERT
from batchgen_lite.runtime.model_size import described_size

WINDOW = 256  # submissions to read at most
SETTING = ReaderSetting("direct", 4, 2 << 20)
TRIALS = 3
BEHIND_ATTENTION = ("out", "router", "experts", "dense")


@dataclass(frozen=True, slots=True)
class Bound:
    """``bytes`` that had to be read, ``flop`` that had to be done, and the seconds of each at the given rates."""

    bytes: float
    flop: float
    reading_seconds: float
    computing_seconds: float

    @property
    def seconds(self) -> float:
        """No schedule of these reads and operations is faster."""
        return max(self.reading_seconds, self.computing_seconds)


def job_bound(model: LoadedModel, summary: Mapping[str, object], read_rate: float, flops: float) -> Bound:
    """Of the run whose JSON summary this is; ``read_rate`` bytes/s, ``flops`` FLOP/s."""
    work = described_size(model).work
    assert work is not None
    in_vain = number(summary, "unrouted_expert_reads")
    moe_layers = sum(layer.router is not None for layer in model.spec.layers)
    expert_bytes = work.routed_bytes / (work.experts * moe_layers) if moe_layers else 0.0
    nbytes = number(summary, "bytes_read") - in_vain * expert_bytes
    sampled = number(summary, "tokens_decoded")
    # A row's last token is sampled and never computed with.
    computed = number(summary, "tokens_prefilled") + sampled - number(summary, "ok")
    flop = computed * (work.dense_flops + work.top_k * work.expert_flops) + sampled * work.head_flops
    flop -= (computed - sampled) * behind_last_attention(model)
    return Bound(nbytes, flop, nbytes / read_rate, flop / flops)


def behind_last_attention(model: LoadedModel) -> float:
    """FLOP a token in the last layer's modules behind attention."""
    last, total = len(model.spec.layers) - 1, 0.0
    router = model.spec.layers[last].router
    for module in modules_of(model.spec, model.weights):
        if module.layer == last and module.kind in BEHIND_ATTENTION:
            for tile in module.tiles:
                weights = (tile.stop - tile.start) * tile.matrix.outputs_per_row * tile.matrix.cols
                share = 1.0
                if tile.expert != SHARED_EXPERT:
                    assert router is not None
                    share = router.top_k / router.num_experts
                total += 2.0 * weights * share
    return total


def number(summary: Mapping[str, object], name: str) -> float:
    """A figure of the summary."""
    value = summary[name]
    if not isinstance(value, (int, float)):
        raise TypeError(f"{name} of the summary is {value!r}, not a number")
    return float(value)


def machine_rates(model: LoadedModel, threads: int) -> tuple[float, float]:
    """(bytes/s of the checkpoint's disk, FLOP/s of ``threads``), the best of a few short trials each."""
    files = model.checkpoint.files
    sizes = [(number, file.path.stat().st_size) for number, file in enumerate(files)]
    window = [
        Extent(number, offset, SUBMISSION_BYTES)
        for number, size in sizes
        for offset in range(0, size - SUBMISSION_BYTES, SUBMISSION_BYTES)
    ]
    paths = [file.path for file in files]
    step = max(1, len(window) // (TRIALS * WINDOW))
    reads = [read_window(paths, SETTING, window[trial::TRIALS][::step][:WINDOW]) for trial in range(TRIALS)]
    return max(reads), max(measure_alone(threads) for _ in range(TRIALS))


def main() -> None:
    parser = argparse.ArgumentParser(description="The least time for a job that has been run.")
    parser.add_argument("model", type=Path)
    parser.add_argument("log", type=Path, help="what the run wrote with --progress json, or its summary alone")
    parser.add_argument("--read-rate", type=parse_size, help="bytes/s, where the disk was throttled")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args()
    summaries = [event for event in json_lines(args.log.read_text()) if "bytes_read" in event]
    if not summaries:
        parser.error(f"{args.log} holds no summary; run generate with --progress json and keep its stderr")
    model, summary = load_model(args.model), summaries[-1]
    disk, flops = machine_rates(model, args.threads)
    bound = job_bound(model, summary, args.read_rate or disk, flops)
    took = number(summary, "seconds")
    figures = {
        "bytes": bound.bytes,
        "flop": bound.flop,
        "bytes_per_second": args.read_rate or disk,
        "flop_per_second": flops,
        "reading_seconds": bound.reading_seconds,
        "computing_seconds": bound.computing_seconds,
        "seconds": took,
        "share": bound.seconds / took,
    }
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}, indent=1))


if __name__ == "__main__":
    main()
