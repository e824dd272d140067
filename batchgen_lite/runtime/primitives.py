"""The four primitives of the coroutine model (BatchGen, OSDI'26), on one machine.

`yield_`     A slice parks at a module's exit with its hidden states and gives the device up. Costs a generator switch,
             well under a microsecond; the hidden states stay where they are.
`combine`    Slices parked at the same module become one batch. Costs nothing when their states lie side by side in the
             workspace, as the runtime's own slices' do; else one copy.
`partition`  One sequence's work is split into parts that can run in different sweeps. Costs arithmetic only: positions
             carry all the state there is.
`migrate`    A sequence's KV leaves its tier: for a lower one, which costs its pages' way there and back, or for its
             token ids, which is free now and costs a re-prefill later. runtime/migration.py compares the two.
"""

from __future__ import annotations

from collections.abc import Generator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen_lite.runtime.sequence import Sequence, State

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """A slice's request: run module ``kind`` of ``layer`` on my hidden states ``x`` [n, width]."""

    kind: str
    layer: int
    x: torch.Tensor


def yield_(call: ModuleCall) -> Generator[ModuleCall, torch.Tensor, torch.Tensor]:
    """Park at a module's exit until the combined batch has run; returns this slice's rows of the result."""
    result = yield call
    return result


def combine(calls: Seq[ModuleCall], rows: int) -> torch.Tensor:
    """One batch [rows, width] out of slices parked at the same module, ``rows`` >= their sum (padding).

    Raises ValueError if they are parked at different modules: a batch must want the same weights.
    """
    first = calls[0]
    if any((call.kind, call.layer) != (first.kind, first.layer) for call in calls):
        raise ValueError(f"slices parked at different modules: {sorted({(c.kind, c.layer) for c in calls})}")
    width = first.x.shape[1]
    end = first.x.data_ptr()
    for call in calls:
        if call.x.data_ptr() != end or not call.x.is_contiguous():
            break
        end += call.x.numel() * call.x.element_size()
    else:
        storage = first.x.untyped_storage().nbytes() // first.x.element_size()
        if first.x.storage_offset() + rows * width <= storage:
            return first.x.as_strided((rows, width), (width, 1))
    batch = first.x.new_zeros((rows, width))
    at = 0
    for call in calls:
        batch[at : at + call.x.shape[0]] = call.x
        at += call.x.shape[0]
    return batch


def partition(sequence: Sequence, tokens: int) -> tuple[int, int]:
    """The next part of a sequence's pending work: (start position, count <= ``tokens``). The rest stays pending."""
    return sequence.num_computed, min(sequence.pending, tokens)


def migrate(sequence: Sequence, *, kept: bool = False) -> None:
    """Take a running sequence out: its pages are free at once. ``kept``: its KV has been copied to a lower tier, to
    come back from there. Else a running or held sequence is left with its token ids, and its KV is computed again."""
    sequence.move(State.HELD if kept else State.EVICTED)
