"""What a sweep costs: the model behind plans, forecasts and the time left. Pure arithmetic, torch-free.

    seconds = fixed + max(reading, link, computing + drag)

Reading and computing overlap (offload/stream.py reads ahead), so the longer one counts: the roofline of streamed
inference. They share cores and memory, though, so every byte read slows computing a little: the drag. Computing is
what all token rows need, what each touched expert takes for its rows, the head for the rows whose logits are wanted,
and attention over KV pages. Nothing here decides a bit of any result.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from batchgen_lite.kernels.padding import ROW_PADDING
from batchgen_lite.runtime.compute_times import NOTHING, Curve

BLOCK_ROWS = (4, 8, 16, 32, 64)  # as in kernels/attention/reference.py, which needs torch
PAGE_ROWS = 20  # measured: 14 to 21, with 64 and 128 channels a head, blocks of 4 to 64 rows
ALIKE = 1.2  # longest over mean length, up to which rows count as equally long


@dataclass(frozen=True, slots=True)
class SweepLoad:
    """What a sweep carries: tokens, rows whose logits are wanted, and pages visited by blocks of query rows, in units
    of one query row (of one KV head in one layer) against one page."""

    tokens: float
    sampled: float = 0.0
    visits: float = 0.0

    def times(self, factor: float) -> SweepLoad:
        """``factor`` such loads in one."""
        return SweepLoad(self.tokens * factor, self.sampled * factor, self.visits * factor)


@dataclass(frozen=True, slots=True)
class SweepCost:
    """The cost model's coefficients. ``streamed_bytes``: what every sweep reads; ``routed_bytes``: streamed experts, if
    all are touched; ``resident_bytes``: read by the first sweep only; ``linked_bytes``: what crosses the link to an
    accelerator. ``choice``: the share of experts that one token chooses (top-k / experts). ``dense``, ``expert``,
    ``head``: as in ComputeTimes."""

    streamed_bytes: float
    bytes_per_second: float
    seconds_per_token: float = 0.0
    fixed_seconds: float = 0.0
    resident_bytes: float = 0.0
    routed_bytes: float = 0.0
    experts: int = 0
    choice: float = 1.0
    dense: Curve = NOTHING
    expert: Curve = NOTHING
    head: Curve = NOTHING
    seconds_per_visit: float = 0.0
    drag_seconds_per_byte: float = 0.0  # that computing takes longer for a byte read beside it
    linked_bytes: float = 0.0
    link_bytes_per_second: float = 0.0

    def touched(self, tokens: float) -> float:
        """Share of experts that ``tokens`` tokens choose together, were all experts equally likely."""
        if not self.experts or self.choice >= 1.0:
            return 1.0
        return 1.0 - float((1.0 - self.choice) ** tokens)

    def bytes_read(self, load: SweepLoad, *, first: bool = False) -> float:
        """Bytes that the sweep reads."""
        streamed = self.streamed_bytes + self.routed_bytes * self.touched(load.tokens)
        return streamed + (self.resident_bytes if first else 0.0)

    def reading(self, load: SweepLoad, *, first: bool = False) -> float:
        """Seconds of the disk."""
        nbytes = self.bytes_read(load, first=first)
        return nbytes / self.bytes_per_second if nbytes else 0.0

    def linking(self, load: SweepLoad) -> float:
        """Seconds of the link to an accelerator, 0 without one."""
        return self.linked_bytes / self.link_bytes_per_second if self.linked_bytes else 0.0

    def busy(self, load: SweepLoad, *, first: bool = False) -> float:
        """Seconds of the cores while the disk is read beside them."""
        return self.computing(load) + self.drag_seconds_per_byte * self.bytes_read(load, first=first)

    def computing(self, load: SweepLoad) -> float:
        """Seconds of the cores by themselves."""
        seconds = self.dense.at(load.tokens) + load.tokens * self.seconds_per_token
        seconds += load.visits * self.seconds_per_visit
        if load.sampled:
            seconds += self.head.at(load.sampled)
        if self.experts:
            touched = self.touched(load.tokens)
            rows = load.tokens * self.choice / max(touched, 1e-9)  # of each touched expert
            seconds += touched * self.experts * self.expert.at(rows + ROW_PADDING / 2)  # padding: half a block
        return seconds

    def seconds(self, load: SweepLoad, *, first: bool = False) -> float:
        """Of the whole sweep."""
        return self.fixed_seconds + max(
            self.reading(load, first=first), self.linking(load), self.busy(load, first=first)
        )

    def slack_tokens(self, most: int) -> int:
        """The largest number of decoding tokens, at most ``most``, whose computing still hides behind the reading; 0
        if not even one's does."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            load = SweepLoad(middle, middle)
            if self.busy(load) <= max(self.reading(load), self.linking(load)):
                low = middle
            else:
                high = middle - 1
        return low

    def calibrated(self, compute: float, bytes_per_second: float | None) -> SweepCost:
        """With all of computing ``compute`` times as long, and another disk rate unless None."""
        return replace(
            self,
            bytes_per_second=bytes_per_second or self.bytes_per_second,
            seconds_per_token=self.seconds_per_token * compute,
            dense=self.dense.scaled(compute),
            expert=self.expert.scaled(compute),
            head=self.head.scaled(compute),
            seconds_per_visit=self.seconds_per_visit * compute,
            drag_seconds_per_byte=self.drag_seconds_per_byte * compute,
        )


@dataclass(frozen=True, slots=True)
class Remaining:
    """Work still to be done by ``rows``, ``live`` of which run already. ``longest``: sweeps that the longest of them
    needs at least; ``visits``: of a decoding token (see SweepLoad)."""

    rows: int
    prefill_tokens: float
    decode_tokens: float
    longest: float
    live: int = 0
    visits: float = 0.0


def remaining_seconds(cost: SweepCost, left: Remaining, sequences: int, token_budget: int) -> float:
    """Closed form for the time of ``left`` with ``sequences`` at once, for a display and for comparing plans.

    Rows enter as fast as token budget and sequences allow, while those inside decode; then the last ones decode alone
    for as long as the longest takes. Rows of like lengths come in waves: sweeps full of prompts, then sweeps that only
    decode. All sweeps of a phase count as alike; a simulation knows better.
    """
    if left.rows <= 0 or left.prefill_tokens + left.decode_tokens <= 0:
        return 0.0
    running = max(1, min(sequences, left.rows))
    tail = max(1.0, left.longest)
    entering = left.rows - left.live
    if entering <= 0:
        sweeps = max(tail, left.decode_tokens / running)
        tokens = (left.prefill_tokens + left.decode_tokens) / sweeps
        return sweeps * cost.seconds(_decoding(left, tokens, left.decode_tokens / sweeps))
    a_row = max(1.0, left.decode_tokens / left.rows)
    quick = token_budget / (left.prefill_tokens / entering + a_row)  # rows that can enter in a sweep
    first = min(entering, max(0, running - left.live))
    waves = (entering - first) / running  # once there is no room but where others leave
    alike = left.longest <= ALIKE * a_row
    if alike:
        waves = ceil(waves)  # rows that enter together end together: a part of a wave takes as long as a whole one
    filling = max(1.0, entering / quick)
    sweeps = max(filling, first / quick + waves * a_row)
    recent = min(sweeps, a_row)
    late = min(left.decode_tokens, entering / sweeps * (a_row * recent - recent * recent / 2))
    early = left.decode_tokens - late
    if not alike:
        filling = sweeps  # prompts come one by one, beside decoding rows
    beside = early * filling / sweeps
    seconds = filling * cost.seconds(_decoding(left, (left.prefill_tokens + beside) / filling, beside / filling))
    if sweeps > filling:
        alone = (early - beside) / (sweeps - filling)
        seconds += (sweeps - filling) * cost.seconds(_decoding(left, alone, alone))
    return seconds + tail * cost.seconds(_decoding(left, late / tail, late / tail))


def _decoding(left: Remaining, tokens: float, sampled: float) -> SweepLoad:
    return SweepLoad(tokens, sampled, sampled * left.visits)


def page_visits(start: int, count: int, group: int, page: int) -> float:
    """Query rows times pages of a span of ``count`` tokens from position ``start``, ``group`` query heads sharing a KV
    head. Rows come in blocks (kernels/attention/reference.py), each visiting the pages it can see; gathering and
    widening a page counts as PAGE_ROWS rows more."""
    rows = count * group
    size = next((block for block in BLOCK_ROWS if block >= rows), BLOCK_ROWS[-1])
    return -(-rows // size) * (size + PAGE_ROWS) * ((start + (count + 1) / 2) // page + 1)
