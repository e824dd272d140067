"""How memory is divided: a pure function from sizes and rates to a plan. No torch, no allocation, no measuring.

The order of claims on a budget:

1. what every run needs: the process itself, a workspace for one sweep's activations, a ring for weights in flight;
2. KV pages, until they cover all rows of the job: a sweep costs one pass over the streamed weights, so while the model
   exceeds memory, a byte of KV (a larger batch) is worth more than a byte of resident weights (reference: throughput
   is proportional to (R - x) / (W - x) for x of R bytes spent on residents of W, falling in x as long as R < W);
3. the embedding, then resident tiles, spread evenly over the layers.

If the whole model fits beside enough pages to keep the cores busy, all of it becomes resident and there is no ring.

Where rates are known, 2 stops where computing saturates: several divisions are compared by the cost model's time for
this job, and of those that are as good as equal the one with the most residents wins, as they also shorten the tail.
A sweep's tokens are at least clamp(max(slack, T_MIN), memory), slack being those whose computing hides behind the
reading; more, where fewer passes over the weights are worth their memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.padding import padded
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.cost import Remaining, page_visits, remaining_seconds
from batchgen_lite.runtime.interface import RequestSize
from batchgen_lite.runtime.rates import MachineRates, ModelWork, sweep_cost

MIB = 1 << 20
MARGIN = 40 * MIB  # the allocator's slack, BLAS' packing buffers, thread stacks, event loop
PROCESS_NOISE = 1 * MIB  # that processes differ by from start to start; the budget that is named shall work
SEQUENCE_BYTES = 16 << 10  # of Python objects for one running sequence
TOKEN_STEPS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048, 3072, 4096)
T_MIN = 512  # tokens of a sweep that are worth having even if they compute for longer than the sweep reads
ROWS_AN_EXPERT = 64  # the same for experts: fewer rows leave the cores waiting for weights
LARGEST_SLICE = 256
ENOUGH_ROWS = 64  # a batch from which on a resident model keeps the cores busy
SHARE_OF_ACTIVATIONS = 6  # a workspace takes at most this fraction of the room
KV_ACCOUNT, RESIDENTS_ACCOUNT = "KV cache", "residents"
RING_SECONDS = 0.2  # of reading that a ring is to hold: cores seldom compute for longer without taking weights from it
LEAST_LOADS, MOST_LOADS = 2, 12  # of the largest kind that a ring holds
DIVISIONS = 16  # numbers of KV pages that are compared
AS_GOOD = 1.01


@dataclass(frozen=True, slots=True)
class DeviceSize:
    """Bytes of a model as it will lie in the memory of a device that has its own: all tiles, the largest one, and the
    vectors of its skeleton."""

    tiles: int
    largest_tile: int
    skeleton: int


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes of a model as it will lie in memory, over-reads included. ``page``: one KV page in all layers,
    ``layer_page``: the largest layer's share of it, ``int8_page``: were it int8, 0 = not known; ``skeleton``: vectors,
    part of the process once they are loaded; ``widened``: packed tiles in fp32; ``work``: None where nothing is to be
    compared."""

    tiles: int
    largest_load: int
    embedding: int
    page: int
    activations: ActivationShape
    skeleton: int = 0
    int8_page: int = 0
    layer_page: int = 0
    widened: int = 0
    work: ModelWork | None = None
    device: DeviceSize | None = None


@dataclass(frozen=True, slots=True)
class JobSize:
    """What is known of a job beforehand. ``pages``: to hold every row to its last possible token, all at once;
    ``new_tokens`` and ``longest_new``: at most, of all rows and of one; ``usual_prompt``: at most a tenth of the
    prompts are longer than this."""

    rows: int
    prompt_tokens: int
    longest_prompt: int
    pages: int
    new_tokens: int = 0
    longest_new: int = 1
    usual_prompt: int | None = None

    @classmethod
    def of(cls, sizes: Iterable[RequestSize], expected: float | None = None) -> JobSize:
        """Totals over rows; each generates ``expected`` tokens where it may, or all it may if None. Pages are counted
        for all they may, as a run cannot know better."""
        rows = list(sizes)
        new = [size.max_tokens if expected is None else min(size.max_tokens, round(expected)) for size in rows]
        return cls(
            rows=len(rows),
            prompt_tokens=sum(size.prompt_tokens for size in rows),
            longest_prompt=max((size.prompt_tokens for size in rows), default=1),
            pages=max(1, sum(pages_for(size.prompt_tokens + size.max_tokens) for size in rows)),
            new_tokens=sum(new),
            longest_new=max(new, default=1),
            usual_prompt=_usual(sorted(size.prompt_tokens for size in rows)),
        )


def _usual(lengths: list[int]) -> int:
    """See JobSize.usual_prompt; ``lengths`` ascending."""
    return lengths[len(lengths) - len(lengths) // 10 - 1] if lengths else 1


@dataclass(frozen=True, slots=True)
class Overrides:
    """Values that somebody insists on, for experiments and tests; None = planned. ``fixed_division``: memory stays
    divided as planned in the job's tail, too (runtime/tail.py)."""

    token_budget: int | None = None
    max_sequences: int | None = None
    slice_tokens: int | None = None
    kv_pages: int | None = None
    ring_bytes: int | None = None
    resident_bytes: int | None = None
    device_ring_bytes: int | None = None
    device_resident_bytes: int | None = None
    kv_window_pages: int | None = None
    held_pages: int | None = None
    fixed_division: bool = False


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division. ``resident_bytes`` is an upper bound that whole tiles will fill; ``all_resident`` means that
    nothing streams from the disk, so on the CPU there is no ring, and ``widened_bytes`` of weights are kept in fp32 as
    well. ``accounts``: (name, bytes) of everything, together at most the budget.

    Where the device has memory of its own, workspace and KV lie there, with a ring, tiles that stay, and the model's
    vectors, all in ``device_accounts``; ``staging_bytes`` on the host carry embeddings there and logits back.
    ``kv_window_pages`` above 0: KV lies on the host, and the device has two windows of so many pages of one layer.
    ``held_pages``: room on the host for the KV of rows that have to wait."""

    token_budget: int
    max_sequences: int
    slice_tokens: int
    kv_pages: int
    ring_bytes: int
    resident_bytes: int
    embedding_resident: bool
    workspace_bytes: int
    transient_bytes: int
    all_resident: bool
    accounts: tuple[tuple[str, int], ...] = ()
    widened_bytes: int = 0
    device_ring_bytes: int = 0
    device_resident_bytes: int = 0
    staging_bytes: int = 0
    kv_window_pages: int = 0
    held_pages: int = 0
    device_accounts: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Division:
    """What the room behind the workspace becomes."""

    pages: int
    ring: int
    resident: int
    embedding: bool
    whole: bool = False


_Option = tuple[int, int, _Division]
"""Tokens of a sweep, sequences at once, and what the rest becomes."""


def plan_memory(
    model: ModelSize, job: JobSize, ram: int, process: int, wish: Overrides, rates: MachineRates | None = None
) -> MemoryPlan:
    """Divide ``ram`` bytes, of which the process itself, skeleton included, holds ``process`` already.

    A few prompts that are longer than the rest and do not fit get no room: they end with an error record of their own.
    Raises BudgetError, with the smallest budget that works, if one sweep of the smallest kind does not fit.
    """
    need, options = _options(model, job, ram, process, wish, rates)
    return _plan_of(need, *_choose(need, options, rates), ram, process)


def plan_candidates(
    model: ModelSize, job: JobSize, ram: int, process: int, wish: Overrides, rates: MachineRates | None = None
) -> list[MemoryPlan]:
    """All divisions that ``plan_memory`` compares and some with smaller sweeps, for a closer look (plan_search.py).
    Raises BudgetError as it does."""
    need, options = _options(model, job, ram, process, wish, rates, useful=T_MIN)
    return [_plan_of(need, *option, ram, process) for option in options]


def _options(
    model: ModelSize,
    job: JobSize,
    ram: int,
    process: int,
    wish: Overrides,
    rates: MachineRates | None,
    useful: int = TOKEN_STEPS[-1],
) -> tuple[Need, list[_Option]]:
    need = Need(model, job, wish)
    room = ram - process - MARGIN
    need.leave_out_the_longest(room)
    if room < need.least():
        mib = -(-(process + PROCESS_NOISE + MARGIN + need.least()) // MIB)
        raise BudgetError(
            f"--ram {ram / MIB:.0f}MiB is too small for this model and input: at least {mib}MiB are needed "
            f"(the process itself takes {process / MIB:.0f}MiB, the {need.whose} KV cache "
            f"{need.pages * model.page / MIB:.0f}MiB); give --ram {mib}MiB or more, or shorten the longest prompt",
            smallest=mib * MIB,
        )
    options = []
    for tokens in need.token_budgets(room, rates, useful):
        sequences = need.max_sequences(tokens, room)
        left = room - need.fixed(tokens, sequences)
        options += [(tokens, sequences, division) for division in _divisions(need, left, rates)]
    return need, options


def sequences_at_once(job: JobSize, pages: int, max_sequences: int) -> int:
    """How many rows of average size run together in ``pages``."""
    a_row = max(1.0, job.pages / max(1, job.rows))
    return max(1, min(max_sequences, job.rows, int(pages / a_row)))


def job_remaining(job: JobSize, group: int) -> Remaining:
    """All of a job, as the cost model counts work; ``group`` query heads share a KV head."""
    context = (job.prompt_tokens + job.new_tokens // 2) // max(1, job.rows)
    visits = page_visits(context, 1, group, PAGE_TOKENS)
    return Remaining(job.rows, job.prompt_tokens, job.new_tokens, job.longest_new, visits=visits)


def _divisions(need: Need, left: int, rates: MachineRates | None) -> Iterator[_Division]:
    """The divisions of ``left`` bytes worth comparing; only one where rates are not known. ``need.rest`` fits."""
    model, wish = need.model, need.wish
    wanted = wish.kv_pages or max(need.pages, need.job.pages)
    enough = min(wanted, max(need.pages, -(-wanted * ENOUGH_ROWS // max(1, need.job.rows))))
    whole = model.tiles + model.embedding
    if wish.resident_bytes is None and whole + enough * model.page <= left:
        pages = min(wanted, (left - whole) // model.page)
        yield _Division(pages, 0, model.tiles, True, whole=True)
        if rates is None or pages == wanted:  # nothing is better than everything
            return
    fixed = need.pages * model.page + (wish.resident_bytes or 0)
    ring = wish.ring_bytes or min(_ring_bytes(left, model.largest_load, rates), left - fixed)
    left -= ring + (wish.resident_bytes or 0)
    most = max(need.pages, min(wanted, left // model.page))
    counts = (
        {most} if rates is None else {need.pages + (most - need.pages) * i // DIVISIONS for i in range(DIVISIONS + 1)}
    )
    for pages in sorted(counts):
        rest = left - pages * model.page
        embedding = model.embedding <= rest
        resident = rest - (model.embedding if embedding else 0) if wish.resident_bytes is None else wish.resident_bytes
        yield _Division(pages, ring, min(resident, model.tiles), embedding)


def _ring_bytes(left: int, load: int, rates: MachineRates | None) -> int:
    """Of a ring within ``left`` bytes, for loads of up to ``load``. A slow disk fills a small one, and what is not the
    ring's is read once instead of in every sweep."""
    most = MOST_LOADS * load
    if rates is not None:
        most = clamp(int(rates.read_rate * RING_SECONDS), LEAST_LOADS * load, most)
    return clamp(left // 10, LEAST_LOADS * load, most)


def _choose(need: Need, options: list[_Option], rates: MachineRates | None) -> _Option:
    """The fastest option; of those as good as equal the one with the most residents, then the smallest sweeps."""
    work, job = need.model.work, need.job
    if rates is None or work is None or len(options) == 1:
        return options[-1]
    left = job_remaining(job, work.group)

    def seconds(option: _Option) -> float:
        tokens, sequences, division = option
        cost = sweep_cost(work, rates, division.resident, all_resident=division.whole)
        running = sequences_at_once(job, division.pages, sequences)
        first = cost.resident_bytes / cost.bytes_per_second
        return first + remaining_seconds(cost, left, running, tokens)

    times = [seconds(option) for option in options]
    good = [option for option, time in zip(options, times, strict=True) if time <= min(times) * AS_GOOD]
    return max(good, key=lambda option: (option[2].resident, -option[0]))


def _plan_of(need: Need, tokens: int, sequences: int, chosen: _Division, ram: int, process: int) -> MemoryPlan:
    model = need.model
    workspace, transient = need.workspace(tokens, sequences), need.transient(tokens)
    accounts = (
        ("interpreter", process - model.skeleton),
        ("skeleton", model.skeleton),
        (KV_ACCOUNT, chosen.pages * model.page),
        (RESIDENTS_ACCOUNT, chosen.resident),
        ("embedding", model.embedding if chosen.embedding else 0),
        ("ring", chosen.ring),
        ("workspace", workspace),
        ("transient", transient),
        ("sequences", sequences * SEQUENCE_BYTES),
        ("margin", MARGIN),
    )
    # What is left beside a model that is resident as a whole saves decoding packed weights in every sweep.
    left = ram - sum(nbytes for _, nbytes in accounts)
    widened = max(0, min(model.widened, left)) if chosen.whole else 0
    return MemoryPlan(
        token_budget=tokens,
        max_sequences=sequences,
        slice_tokens=min(tokens, need.wish.slice_tokens or LARGEST_SLICE),
        kv_pages=chosen.pages,
        ring_bytes=chosen.ring,
        resident_bytes=chosen.resident,
        embedding_resident=chosen.embedding,
        workspace_bytes=workspace,
        transient_bytes=transient,
        all_resident=chosen.whole,
        accounts=(*accounts, ("widened weights", widened)) if widened else accounts,
        widened_bytes=widened,
    )


class Need:
    """What a sweep of a given size takes."""

    def __init__(self, model: ModelSize, job: JobSize, wish: Overrides) -> None:
        self.model, self.job, self.wish = model, job, wish
        self.pages = self.longest = wish.kv_pages or pages_for(job.longest_prompt + 1)

    def leave_out_the_longest(self, room: int) -> None:
        """Where the longest prompts alone keep the smallest plan out of ``room`` bytes, ask for no more pages than that
        has, but for as many as the usual prompts need. Otherwise one absurd row would refuse a whole job."""
        if self.wish.kv_pages is not None or self.job.usual_prompt is None or self.least() <= room:
            return
        missing = -(-(self.least() - room) // self.model.page)
        self.pages = min(self.pages, max(pages_for(self.job.usual_prompt + 1), self.pages - missing))

    @property
    def whose(self) -> str:
        """The prompts that ``pages`` are for."""
        return "longest prompt's" if self.pages == self.longest else "longest usual prompt's"

    def least(self) -> int:
        """Bytes of the smallest plan: the fewest tokens, one sequence, two loads in flight."""
        return self.fixed(self.wish.token_budget or TOKEN_STEPS[0], 1) + self.rest()

    def rest(self) -> int:
        """Bytes that no plan can do without, whatever its sweeps."""
        ring = self.wish.ring_bytes or LEAST_LOADS * self.model.largest_load
        return ring + self.pages * self.model.page + (self.wish.resident_bytes or 0)

    def fixed(self, tokens: int, sequences: int) -> int:
        """Bytes that sweeps of ``tokens`` tokens and ``sequences`` sequences take beside weights and KV."""
        return self.workspace(tokens, sequences) + self.transient(tokens) + sequences * SEQUENCE_BYTES

    def workspace(self, tokens: int, sequences: int) -> int:
        return self.model.activations.workspace_bytes(tokens, sequences)

    def transient(self, tokens: int) -> int:
        return self.model.activations.transient_bytes(min(tokens, self.wish.slice_tokens or LARGEST_SLICE))

    def token_budgets(self, room: int, rates: MachineRates | None, useful: int) -> list[int]:
        """Sweep sizes to compare, ascending: from the useful one up, or as near to it as its share of the room holds,
        and none larger than the job. Only the largest where rates are not known. No more than ``useful`` count as the
        least useful ones."""
        if self.wish.token_budget is not None:
            return [self.wish.token_budget]
        most = padded(max(self.job.prompt_tokens, self.job.rows, 1))
        fitting = [TOKEN_STEPS[0]]
        for step in TOKEN_STEPS:
            tokens = min(step, most)
            fits = self.fixed(tokens, 1) + self.rest() <= room
            if tokens > fitting[-1] and fits and self.workspace(tokens, 1) <= room // SHARE_OF_ACTIVATIONS:
                fitting.append(tokens)
        useful = min(useful, self._useful_tokens(rates))
        return [tokens for tokens in fitting if tokens >= useful] or fitting[-1:]

    def _useful_tokens(self, rates: MachineRates | None) -> int:
        """max(slack, T_MIN or what keeps experts busy)."""
        work = self.model.work
        if rates is None or work is None:
            return TOKEN_STEPS[-1]
        experts_busy = ROWS_AN_EXPERT * work.experts // max(1, work.top_k)
        slack = sweep_cost(work, rates, 0).slack_tokens(TOKEN_STEPS[-1])
        return min(TOKEN_STEPS[-1], max(slack, T_MIN, experts_busy))

    def max_sequences(self, tokens: int, room: int) -> int:
        """Sequences at once: each decodes one token a sweep, and its logits have to fit."""
        most = min(self.wish.max_sequences or tokens, tokens, max(1, self.job.rows))
        limit = max(self.workspace(tokens, 1), room // SHARE_OF_ACTIVATIONS)
        for count in range(most, 1, -max(1, most // 64)):
            if self.workspace(tokens, count) <= limit and self.fixed(tokens, count) + self.rest() <= room:
                return count
        return 1


def clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
