"""``plan``: a planned job in words, and as JSON."""

from __future__ import annotations

from typing import Any

from batchgen_lite.cli.snapshot import duration, rate, size
from batchgen_lite.offload.pages import PAGE_TOKENS, pages_for
from batchgen_lite.runtime.job_plan import JobPlan, Situation

_BOUND = {"disk": "the disk", "link": "the link to the GPU", "compute": "computing"}
_BATCH = {
    "KV": "KV memory keeps more rows from running at once",
    "rows": "all rows run at once",
    "tokens": "as many as start before others end, with the tokens of a sweep",
}


def plan_fields(situation: Situation, plan: JobPlan, *, bad_rows: int) -> dict[str, Any]:
    """For machines: bytes, seconds, tokens/s."""
    outlook, memory, job, rates = plan.forecast, plan.memory, situation.job, situation.rates
    return {
        "fits": True,
        "ram_bytes": situation.ram,
        "memory": dict(memory.accounts),
        "vram_bytes": situation.vram,
        "device_memory": dict(memory.device_accounts),
        "rows": {
            "to_answer": job.rows,
            "bad": bad_rows,
            "beyond_kv": _beyond_kv(situation, plan),
            "at_once": outlook.most_sequences,
        },
        "tokens": {"prompt": job.prompt_tokens, "new": job.new_tokens},
        "rates": {
            "read_bytes_per_second": rates.read_rate,
            "flops": rates.flops,
            "threads": rates.threads,
            "link_bytes_per_second": rates.link_rate,
            "source": rates.source,
            "kernels": "expected" if rates.times is None else "measured",
        },
        "sweep": {
            "count": outlook.sweeps,
            "tokens": round(outlook.tokens_per_sweep, 1),
            "token_budget": memory.token_budget,
            "bytes": round(outlook.bytes_per_sweep),
        },
        "all_resident": memory.all_resident,
        "bound_by": outlook.bound,
        "batch_bound_by": outlook.batch_bound,
        "seconds": round(outlook.seconds, 3),
        "tail_seconds": round(outlook.tail_seconds, 3),
        "decode_tokens_per_second": round(outlook.decode_rate, 3),
        "steady_tokens_per_second": round(outlook.steady_rate, 3),
        "steady_tokens": outlook.steady_decoded,
        "bytes_read": round(outlook.bytes_read),
        "evictions": outlook.evictions,
        "spill": _spill_fields(situation, plan),
        "link": _link_fields(plan),
        "changes": [{"change": change.text, "gain": round(change.gain, 2)} for change in plan.changes],
    }


def _spill_fields(situation: Situation, plan: JobPlan) -> dict[str, Any] | None:
    room = situation.spill
    if room is None:
        return None
    held = {"directory": room.directory, "bytes": room.nbytes, "pages": room.tier.free_pages}
    return held | {"seconds_per_page": room.tier.seconds_per_page, "holds": plan.forecast.holds}


def _link_fields(plan: JobPlan) -> dict[str, float] | None:
    cost = plan.cost
    if not cost.link_bytes_per_second:
        return None
    seconds = cost.linked_bytes / cost.link_bytes_per_second
    return {"bytes_per_sweep": cost.linked_bytes, "seconds_per_sweep": round(seconds, 4)}


def _beyond_kv(situation: Situation, plan: JobPlan) -> int:
    """Rows whose prompts do not fit into the KV cache even alone."""
    return sum(pages_for(size.prompt_tokens) > plan.memory.kv_pages for size in situation.sizes)


def plan_text(situation: Situation, plan: JobPlan, *, source: str, bad_rows: int) -> str:
    """For people: aligned label and text."""
    lines = _lines(situation, plan, source, bad_rows)
    width = max(len(label) for label, _ in lines)
    return "\n".join(f"{label:<{width}}  {text}" for label, text in lines)


def _lines(situation: Situation, plan: JobPlan, source: str, bad_rows: int) -> list[tuple[str, str]]:
    outlook, memory, job = plan.forecast, plan.memory, situation.job
    bad = f" ({bad_rows:,} more cannot be answered)" if bad_rows else ""
    most = "" if situation.expected is not None else "at most "
    beyond = _beyond_kv(situation, plan)
    lines = [
        ("input", f"{source}: {job.rows:,} rows to answer{bad}"),
        ("tokens", f"{job.prompt_tokens:,} in prompts, {most}{job.new_tokens:,} to generate"),
        ("rates", _rates(situation)),
        ("memory", f"{size(situation.ram)}: " + _accounts(memory.accounts)),
        *_device_line(situation, plan),
        *_spill_line(situation, plan),
        ("weights", _weights(situation, plan)),
        (
            "sweeps",
            f"{outlook.sweeps:,}, each {outlook.tokens_per_sweep:,.0f} tokens of at most {memory.token_budget:,} and "
            f"{size(outlook.bytes_per_sweep)} read",
        ),
        *_link_line(situation, plan),
        ("batch", f"{outlook.most_sequences:,} rows at once: {_BATCH[outlook.batch_bound]}"),
        ("bound by", _BOUND[outlook.bound]),
        ("speed", f"{rate(outlook.decode_rate)} tok/s generated, {rate(outlook.steady_rate)} before the tail"),
        ("time", f"{duration(outlook.seconds)}, of which {duration(outlook.tail_seconds)} for the last rows"),
    ]
    if beyond:
        capacity = f"{memory.kv_pages * PAGE_TOKENS:,} tokens"
        lines.append(("too long", f"{beyond:,} prompts exceed the KV cache of {capacity} and would end with an error"))
    if outlook.evictions:
        lines.append(("evictions", f"{outlook.evictions:,}: KV memory is short, prompts are computed again"))
    lines += [("faster" if not i else "", _change(change.text, change.gain)) for i, change in enumerate(plan.changes)]
    return lines


def _device_line(situation: Situation, plan: JobPlan) -> list[tuple[str, str]]:
    if situation.vram is None:
        return []
    return [("device", f"{size(situation.vram)}: " + _accounts(plan.memory.device_accounts))]


def _link_line(situation: Situation, plan: JobPlan) -> list[tuple[str, str]]:
    link = _link_fields(plan)
    if link is None:
        return []
    known = " assumed" if situation.vram is not None else ""  # a device's link shows its rate in a run only
    speed = f"at {size(plan.cost.link_bytes_per_second)}/s{known}"
    text = f"{size(link['bytes_per_sweep'])} to the device in each sweep, {link['seconds_per_sweep']:,.3g} s {speed}"
    return [("link", text)]


def _spill_line(situation: Situation, plan: JobPlan) -> list[tuple[str, str]]:
    room = situation.spill
    if room is None:
        return []
    where = f"up to {size(room.nbytes)} in {room.directory}, {room.tier.free_pages * PAGE_TOKENS:,} tokens"
    return [("KV spill", f"{where}; {plan.forecast.holds:,} pauses of rows keep their KV there")]


def _change(text: str, gain: float) -> str:
    return f"{text}: {gain:.1f}x" if gain < 10 else f"{text}: {gain:.0f}x"


def _rates(situation: Situation) -> str:
    rates = situation.rates
    link = f", link {size(rates.link_rate)}/s" if rates.link_rate else f" with {rates.threads} threads"
    kernels = "" if rates.times is None else ", the model's kernels timed"
    return f"disk {size(rates.read_rate)}/s, {rates.flops / 1e9:,.0f} GFLOP/s{link} ({rates.source}){kernels}"


def _accounts(accounts: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(f"{name} {size(nbytes)}" for name, nbytes in accounts if nbytes >= 1 << 20)


def _weights(situation: Situation, plan: JobPlan) -> str:
    total, memory = situation.model.tiles, plan.memory
    if memory.device_accounts:
        rest = "no more is read after the first sweep" if memory.all_resident else "the rest is streamed from the disk"
        kept = f"{size(memory.device_resident_bytes)} stay on the device, {size(memory.resident_bytes)} in memory"
        return f"{size(total)}, of which {kept}, {rest}"
    if memory.all_resident:
        return f"{size(total)}, all in memory after the first sweep"
    return f"{size(total)}, of which {size(memory.resident_bytes)} stay in memory and the rest is streamed"
