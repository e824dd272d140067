"""How two budgets are divided where the device has memory of its own: pure, torch-free, as planner.py.

On the device, in this order: vectors and a workspace for one sweep, a ring for weights in flight, KV pages until they
cover the job, then tiles that stay. On the host: the process, a staging buffer, a ring between disk and device, the
embedding, then tiles that stay there and cross the link every sweep instead of coming from the disk.

Where the device has no room even for the longest prompt's KV, KV lies on the host, and on the device are two windows
onto it, of the pages of one layer (offload/kv_streamed.py). All of it then crosses the link in every sweep, so this is
not done only to make a batch larger.

The sizes of sweeps are decided by the device's memory, as far as the host can stage them.
"""

from __future__ import annotations

from batchgen_lite.errors import BudgetError
from batchgen_lite.kernels.padding import padded
from batchgen_lite.runtime.activations import FLOAT
from batchgen_lite.runtime.planner import (
    ENOUGH_ROWS,
    LARGEST_SLICE,
    MARGIN,
    MIB,
    SEQUENCE_BYTES,
    TOKEN_STEPS,
    DeviceSize,
    JobSize,
    MemoryPlan,
    ModelSize,
    Need,
    Overrides,
    clamp,
)

LOGITS_AT_ONCE = 16  # rows of logits that come back to the host together
WINDOW_ALIGNMENT = 256
HELD_SHARE = 16  # at most this fraction of the host's room is for rows that wait
PER_TILE = 256  # bytes by which a tile's place on the device is rounded up, at most, in a ring


def plan_device_memory(
    model: ModelSize, job: JobSize, ram: int, process: int, vram: int, wish: Overrides
) -> MemoryPlan:
    """Divide ``ram`` bytes of the host, of which ``process`` are taken, and ``vram`` usable bytes of the device.

    Raises BudgetError, which says both budgets, the one that is too small first, if one sweep of the smallest kind does
    not fit.
    """
    assert model.device is not None, "the model's size on a device is not known"
    need = _DeviceNeed(model, job, wish, model.device)
    fewest = wish.token_budget or TOKEN_STEPS[0]
    room = vram - model.device.skeleton
    if wish.kv_window_pages is not None or need.least() > room:
        streamed = _DeviceNeed(model, job, wish, model.device, streamed=True)
        fits = streamed.least() <= room and process + streamed.host(fewest, 1) + streamed.host_ring() <= ram
        if wish.kv_window_pages is not None or (model.layer_page > 0 and fits):
            need = streamed
    if not need.window_pages:
        need.leave_out_the_longest(room)
    least_vram = model.device.skeleton + need.least()
    least_ram = process + need.host(fewest, 1) + need.host_ring()
    if vram < least_vram or ram < least_ram:
        raise _refusal(need, ram, least_ram, vram, least_vram)
    fitting = [
        tokens for tokens in need.token_budgets_up_to(room) if process + need.host(tokens, 1) + need.host_ring() <= ram
    ]
    tokens = fitting[-1] if fitting else fewest
    sequences = need.max_sequences(tokens, room)
    while sequences > 1 and process + need.host(tokens, sequences) + need.host_ring() > ram:
        sequences //= 2
    return _divided(need, tokens, sequences, ram, process, vram)


def held_page(page: int) -> int:
    """Bytes that a page of held KV takes, with its header (offload/spill.py)."""
    return -(-(page + 128) // 4096) * 4096


def _divided(need: _DeviceNeed, tokens: int, sequences: int, ram: int, process: int, vram: int) -> MemoryPlan:
    model, job, wish, device = need.model, need.job, need.wish, need.device
    left = vram - device.skeleton - need.fixed(tokens, sequences)
    wanted = wish.kv_pages or max(need.pages, job.pages)
    enough = min(wanted, max(need.pages, -(-wanted * ENOUGH_ROWS // max(1, job.rows))))
    whole = wish.device_resident_bytes is None and device.tiles + need.kv(enough) <= left
    if whole:
        device_ring, on_device = 0, device.tiles
    else:
        on_device = wish.device_resident_bytes or 0
        device_ring = wish.device_ring_bytes or min(
            clamp(left // 10, need.device_ring(), 6 * need.device_ring()), left - need.kv(need.pages) - on_device
        )
    pages = need.pages
    if not need.window_pages:
        pages = max(need.pages, min(wanted, (left - device_ring - on_device) // model.page))
    if not whole and wish.device_resident_bytes is None:
        on_device = min(left - device_ring - need.kv(pages), device.tiles)
    host = ram - process - need.host(tokens, sequences)
    ring = wish.ring_bytes or clamp(host // 10, need.host_ring(), 6 * need.host_ring())
    ring = min(ring, host)
    host -= ring
    if need.window_pages:
        more = max(0, min(wanted - pages, host // model.page))
        pages, host = pages + more, host - more * model.page
    held = 0
    if not need.window_pages and pages < wanted:  # rows will have to wait
        held = min(wanted - pages, max(0, host // HELD_SHARE // held_page(model.page) - 1))
    if wish.held_pages is not None:
        held = wish.held_pages
    held_bytes = (held + 1) * held_page(model.page) if held else 0  # and a record on its way
    host -= held_bytes
    embedding = model.embedding <= host - (wish.resident_bytes or 0)
    host -= model.embedding if embedding else 0
    rest = 0 if whole else model.tiles  # at most; what stays on the device does not stay on the host, too
    in_memory = min(host, rest) if wish.resident_bytes is None else wish.resident_bytes
    workspace, transient, staging = (
        need.workspace(tokens, sequences),
        need.transient(tokens),
        need.staging(tokens, sequences),
    )
    return MemoryPlan(
        token_budget=tokens,
        max_sequences=sequences,
        slice_tokens=min(tokens, wish.slice_tokens or LARGEST_SLICE),
        kv_pages=pages,
        ring_bytes=ring,
        resident_bytes=in_memory,
        embedding_resident=embedding,
        workspace_bytes=workspace,
        transient_bytes=transient,
        all_resident=whole or in_memory >= rest,
        accounts=(
            ("interpreter", process - model.skeleton),
            ("skeleton", model.skeleton),
            ("KV cache", pages * model.page if need.window_pages else 0),
            ("held KV", held_bytes),
            ("residents", in_memory),
            ("embedding", model.embedding if embedding else 0),
            ("ring", ring),
            ("staging", staging),
            ("transient", transient),
            ("sequences", sequences * SEQUENCE_BYTES),
            ("margin", MARGIN),
        ),
        device_ring_bytes=device_ring,
        device_resident_bytes=on_device,
        staging_bytes=staging,
        kv_window_pages=need.window_pages,
        held_pages=held,
        device_accounts=(
            ("skeleton", device.skeleton),
            ("KV windows" if need.window_pages else "KV cache", need.kv(pages)),
            ("residents", on_device),
            ("ring", device_ring),
            ("workspace", workspace),
        ),
    )


def _refusal(need: _DeviceNeed, ram: int, least_ram: int, vram: int, least_vram: int) -> BudgetError:
    too_small = []
    if vram < least_vram:
        too_small.append(
            f"--vram {vram / MIB:.0f}MiB is too small for this model and input: at least {-(-least_vram // MIB)}MiB "
            f"are needed (the {need.whose} KV cache takes {need.pages * need.model.page / MIB:.0f}MiB, weights in "
            f"flight {need.device_ring() / MIB:.0f}MiB)"
        )
    if ram < least_ram:
        too_small.append(
            f"--ram {ram / MIB:.0f}MiB is too small beside the device: at least {-(-least_ram // MIB)}MiB are needed "
            f"(weights in flight take {need.host_ring() / MIB:.0f}MiB)"
        )
    other = "" if len(too_small) > 1 else f"; --{'ram' if vram < least_vram else 'vram'} is enough"
    return BudgetError(
        "; ".join(too_small) + f"{other}. Give more, shorten the longest prompt, or use --device cpu",
        smallest=-(-least_ram // MIB) * MIB,
    )


class _DeviceNeed(Need):
    """What a sweep of a given size takes of the device and of the host. ``streamed``: KV lies on the host."""

    def __init__(
        self, model: ModelSize, job: JobSize, wish: Overrides, device: DeviceSize, *, streamed: bool = False
    ) -> None:
        super().__init__(model, job, wish)
        self.device = device
        self.window_pages = (wish.kv_window_pages or self.longest_pages()) if streamed else 0

    # -- of the device: what Need counts of the host --

    def rest(self) -> int:
        return (
            (self.wish.device_ring_bytes or self.device_ring())
            + self.kv(self.pages)
            + (self.wish.device_resident_bytes or 0)
        )

    def kv(self, pages: int) -> int:
        """Of ``pages`` pages, or of the windows onto them."""
        if self.window_pages:
            return 2 * (self.window_pages * self.model.layer_page + WINDOW_ALIGNMENT)
        return pages * self.model.page

    def fixed(self, tokens: int, sequences: int) -> int:
        return self.workspace(tokens, sequences)

    def workspace(self, tokens: int, sequences: int) -> int:
        """With the index tables of a sweep, which the CPU has among its temporaries."""
        pages = self.wish.kv_pages or max(self.pages, self.job.pages)
        shape = self.model.activations
        return shape.workspace_bytes(tokens, sequences) + shape.index_bytes(
            tokens, sequences, self.longest_pages(), pages
        )

    def longest_pages(self) -> int:
        """Pages of the longest row at its end."""
        return self.longest + -(-self.job.longest_new // 64)

    def device_ring(self) -> int:
        """The smallest ring: one tile is computed with while the next one comes."""
        return 2 * (self.device.largest_tile + PER_TILE)

    def token_budgets_up_to(self, room: int) -> list[int]:
        """Sweep sizes from the smallest to the one that the device's room decides."""
        best = self.token_budgets(room, None, TOKEN_STEPS[-1])[-1]
        if self.wish.token_budget is not None:
            return [best]
        return [step for step in TOKEN_STEPS if step < best] + [best]

    # -- of the host --

    def host_ring(self) -> int:
        return self.wish.ring_bytes or 2 * self.model.largest_load

    def staging(self, tokens: int, sequences: int) -> int:
        """Embeddings of a sweep on their way in, logits on their way out: of these a row in each of two halves, which
        device_transfers.py rounds down to 64 bytes, even where one sequence runs."""
        shape = self.model.activations
        logits = max(min(sequences, LOGITS_AT_ONCE) * shape.vocab, 2 * padded(shape.vocab))
        return FLOAT * max(padded(tokens) * shape.hidden, logits)

    def host(self, tokens: int, sequences: int) -> int:
        """Beside the process, ring, embedding and residents."""
        own = self.staging(tokens, sequences) + self.transient(tokens) + sequences * SEQUENCE_BYTES
        kv = self.pages * self.model.page if self.window_pages else 0
        return own + MARGIN + kv + (self.wish.resident_bytes or 0)
