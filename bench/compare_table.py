"""Results of a comparison, and the table that shows them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

OURS = "batchgen-lite"
COLUMNS = (
    "engine",
    "BCT",
    "output tok/s",
    "steps",
    "read",
    "peak RSS",
    "ours is",
    "of the disk's bound",
    "of its bound",
    "settings",
)


@dataclass(frozen=True, slots=True)
class Result:
    """One engine's run of one workload in one regime. Sizes in bytes, ``read_rate`` in bytes/s (None: no limit).

    ``bound_seconds``: below which the job could not fall (job_bound.py), of our runs only; ``unlimited``: why the
    regime's limits could not be set here; ``failed``: why there are no figures."""

    engine: str
    workload: str
    regime: str
    settings: dict[str, object]
    bct_seconds: float
    peak_rss: int
    read_bytes: int
    read_rate: int | None = None
    memory: int | None = None
    bound_seconds: float | None = None
    unlimited: str | None = None
    failed: str | None = None
    extrapolated: bool = False
    prompt_tokens: int = 0
    new_tokens: int = 0
    steps: int = 0
    extra: dict[str, object] = field(default_factory=dict)

    @property
    def output_rate(self) -> float:
        """Generated tokens a second, over the whole job."""
        return self.new_tokens / self.bct_seconds

    @property
    def disk_share(self) -> float | None:
        """The time that its reads alone need at the limited rate, as a share of its own time."""
        if self.read_rate is None or self.extrapolated:
            return None
        return self.read_bytes / self.read_rate / self.bct_seconds


def markdown(results: Sequence[Result]) -> str:
    """One table for each workload and regime, in the order of the results."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault((result.workload, result.regime), []).append(result)
    return "\n".join(section(workload, regime, group) for (workload, regime), group in groups.items())


def section(workload: str, regime: str, group: Sequence[Result]) -> str:
    ours = next((result for result in group if result.engine == OURS and not result.failed), None)
    lines = [f"### {workload}, {regime}", "", limits_line(group[0]), ""]
    lines.append("| " + " | ".join(COLUMNS) + " |")
    lines.append("|" + "---|" * len(COLUMNS))
    lines.extend("| " + " | ".join(row(result, ours)) + " |" for result in group)
    if any(result.extrapolated for result in group):
        lines += ["", "~ extrapolated by step count."]
    return "\n".join([*lines, ""])


def limits_line(result: Result) -> str:
    memory = "memory unlimited" if result.memory is None else f"memory {result.memory / 2**20:.0f} MiB"
    rate = "disk unlimited" if result.read_rate is None else f"disk {result.read_rate / 1e6:.0f} MB/s"
    line = f"{memory}, {rate}; {result.prompt_tokens} prompt tokens, {result.new_tokens} generated"
    return line if result.unlimited is None else f"{line}. NOT LIMITED on this machine: {result.unlimited}"


def row(result: Result, ours: Result | None) -> list[str]:
    settings = ", ".join(f"{name} {value}" for name, value in result.settings.items())
    if result.failed:
        return [result.engine, result.failed, *[""] * (len(COLUMNS) - 3), settings]
    mark = "~" if result.extrapolated else ""
    ratio = "" if ours is None or result is ours else f"{mark}{result.bct_seconds / ours.bct_seconds:.2f}x faster"
    share = result.disk_share
    return [
        result.engine,
        f"{mark}{result.bct_seconds:.1f} s",
        f"{mark}{result.output_rate:.1f}",
        f"{result.steps}",
        f"{result.read_bytes / 1e9:.2f} GB" + (" so far" if result.extrapolated else ""),
        f"{result.peak_rss / 2**20:.0f} MiB",
        ratio,
        "" if share is None else f"{share:.2f}",
        "" if result.bound_seconds is None else f"{result.bound_seconds / result.bct_seconds:.2f}",
        settings,
    ]
