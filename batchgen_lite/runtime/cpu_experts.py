"""A layer's routed experts side by side on the CPU's cores (expert_workers.py says why).

The engine's thread only takes weights as they arrive and hands each expert on as soon as all of it is there. A worker
computes it in memory of its own and leaves the result, a row a token, in the place of the gathered rows, which are not
needed any more; whoever brings the next result in ascending expert number adds it to the tokens. So sums are formed in
the same order, of the same numbers, as one expert after the other.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from batchgen_lite.kernels.experts.reference import Stage, most_stage_rows, widened
from batchgen_lite.kernels.experts.stage_memory import StageMemory
from batchgen_lite.models.layers import Layer
from batchgen_lite.offload.held_tiles import HeldTile
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import ALIGNMENT, Workspace
from batchgen_lite.runtime.activations import FLOAT, RESULTS, worker_floats
from batchgen_lite.runtime.assignments import Assignments, ExpertRows
from batchgen_lite.runtime.cpu_ffn import CpuFFN, FFNMemory, kept_in
from batchgen_lite.runtime.expert_columns import ExpertColumns
from batchgen_lite.runtime.expert_workers import ExpertWorkers, InOrder, WorkerFailed
from batchgen_lite.runtime.gathered import Gathered
from batchgen_lite.runtime.tile_source import HeldTileSource

TAKES = 8  # tensors that a worker has, each rounded up to a cache line
LOOK_AGAIN = 0.1  # seconds between looks at whether another worker has failed


class Space:
    """A worker's memory in one layer: ``scratch`` for widening, ``workspace`` for activations, ``results`` for gathered
    rows and what becomes of them."""

    def __init__(
        self, scratch: StageMemory, workspace: Workspace, results: Sequence[Gathered], columns: ExpertColumns
    ) -> None:
        self._scratch, self._workspace, self._columns = scratch, workspace, columns
        self._memories: dict[int, FFNMemory] = {}
        self._free: queue.SimpleQueue[Gathered] = queue.SimpleQueue()
        for result in results:
            self._free.put(result)

    def stages(self, tile: Tile, parts: Sequence[torch.Tensor]) -> Iterator[Stage]:
        """See kernels/experts/reference.py: widened."""
        return widened(tile.matrix, parts, (tile.start, tile.stop), self._scratch, self._columns.of(tile))

    def memory(self, intermediate: int, count: int, stage_rows: int) -> FFNMemory:
        """For an expert of ``count`` rows, until the next is asked for. All lie in the same place."""
        memory = self._memories.get(count)
        if memory is None:
            self._workspace.rewind(0)
            memory = self._memories[count] = FFNMemory(
                self._workspace, intermediate, count, stage_rows, self._columns.down
            )
        return memory

    def result(self, failed: Callable[[], bool]) -> Gathered:
        """One that has been added, and ``back`` since. Raises WorkerFailed where that may never come."""
        while True:
            try:
                return self._free.get(timeout=LOOK_AGAIN)
            except queue.Empty:
                if failed():
                    raise WorkerFailed from None

    def back(self, result: Gathered) -> None:
        """``result`` is free again."""
        self._free.put(result)


@dataclass(frozen=True, slots=True)
class Crew:
    """Who computes experts side by side, and where the weights for it come from."""

    workers: ExpertWorkers
    source: HeldTileSource


class SideBySide:
    """One layer's experts on the rows ``x`` fp32 [T, hidden], added to ``delta`` of the same shape. ``rows``: how many
    an expert may have to be computed beside others, 0 where memory suffices for none."""

    def __init__(
        self,
        crew: Crew,
        workspace: Workspace,
        scratch: StageMemory,
        layer: Layer,
        module: Module,
        columns: ExpertColumns,
        x: torch.Tensor,
        delta: torch.Tensor,
        chosen: Assignments,
    ) -> None:
        """``scratch``: the first worker's; every one has as much. What else they have lies behind what is taken of
        ``workspace``."""
        assert layer.spec.expert is not None
        self._spec, self._biases = layer.spec.expert, layer.ffns
        self._workers, self._source = crew.workers, crew.source
        self._workspace, self._scratch = workspace, scratch
        self._module, self._columns = module, columns
        self._x, self._delta, self._chosen = x, delta, chosen
        self._mark = workspace.mark()
        matrix = next(tile.matrix for tile in module.tiles if tile.expert != SHARED_EXPERT and tile.role == "gate_up")
        self._stage_rows = most_stage_rows(matrix)
        count = crew.workers.count
        free = workspace.free - (count - 1) * scratch.memory.nbytes - (count + 1) * TAKES * ALIGNMENT
        self.rows = max((size for size in set(chosen.rooms) if count * self._bytes(size) <= free), default=0)

    def _bytes(self, rows: int) -> int:
        return FLOAT * worker_floats(rows, self._columns.gate_up, self._columns.down, self._stage_rows)

    def run(self, alone: Callable[[Tile], CpuFFN]) -> None:
        """All experts that were chosen. ``alone`` makes, for its first tile, what all cores compute an expert with that
        has more than ``rows`` rows, or that all tokens share, behind the mark that the workspace was given with."""
        spaces = [self._space(number) for number in range(self._workers.count)]
        order, number = InOrder(), 0
        mine: list[HeldTile] = []
        current, ffn = None, None
        try:
            for held in self._source.held(self._module, self._chosen.counts, self._workers.idle_since):
                mine.append(held)
                expert = held.tile.expert
                if self._workers.failed:
                    break
                if expert == SHARED_EXPERT or self._chosen.rooms[expert] > self.rows:
                    if expert != current:
                        self._workers.join()  # before its results are added, and before their memory is used
                        self._workspace.rewind(self._mark)
                        current, ffn = expert, alone(held.tile)
                    assert ffn is not None
                    _feed(ffn, mine)
                elif held.last:
                    work = partial(self._compute, spaces, order, number, self._chosen.of(expert), expert, mine)
                    self._workers.submit(work, partial(_release, mine))
                    number += 1
                    mine = []
            self._workers.join()
        except BaseException:
            self._workers.settle()
            raise
        finally:
            _release(mine)
            self._workspace.rewind(self._mark)

    def _space(self, number: int) -> Space:
        hidden, columns = self._x.shape[1], self._columns
        scratch = self._scratch if number == 0 else StageMemory(self._workspace.take(len(self._scratch.memory)))
        floats = self.rows * columns.gate_up
        results = [Gathered(self._workspace.take(floats), hidden, columns.gate_up) for _ in range(RESULTS)]
        rest = self._bytes(self.rows) - FLOAT * RESULTS * floats + TAKES // 2 * ALIGNMENT
        return Space(scratch, self._workspace.part(rest), results, columns)

    def _compute(
        self,
        spaces: Sequence[Space],
        order: InOrder,
        number: int,
        rows: ExpertRows,
        expert: int,
        tiles: list[HeldTile],
        worker: int,
    ) -> None:
        """On a worker's thread: expert ``expert``, the one of this ``number``."""
        space, count = spaces[worker], len(rows.index)
        result = space.result(lambda: self._workers.failed)
        own = result.rows(count)
        x = own.gather(self._x, rows.index)
        memory = space.memory(self._spec.intermediate, count, self._stage_rows)
        keep = kept_in(own.result_spans)
        _feed(CpuFFN(memory, space.stages, self._spec, self._biases[expert], x, rows.weights, keep), tiles)

        def add() -> None:
            self._delta.index_add_(0, rows.tokens, own.result[: len(rows.tokens)])
            space.back(result)

        order.bring(number, add)


def _feed(ffn: CpuFFN, tiles: list[HeldTile]) -> None:
    """All of ``tiles``, each given back behind its use; none are left."""
    while tiles:
        tiles[0].begin()
        ffn.feed(tiles[0].tile, tiles[0].parts)
        tiles.pop(0).release()


def _release(tiles: list[HeldTile]) -> None:
    while tiles:
        tiles.pop().release()
