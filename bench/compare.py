"""The same jobs by BatchGen-Lite and by rivals, under the same limits, one after the other: who finishes first.

    python bench/compare.py --work DIR              # all workloads and regimes, each engine at its best; hours
    python bench/compare.py --work DIR --quick      # one small workload, two regimes; under ten minutes

Makes the checkpoint (3.4 GB, random weights) and its GGUF copy in DIR once. Every run is a process of its own, with a
cold page cache, under a ceiling of memory and of the disk's rate by control groups where this machine allows that;
where it does not, the table says so. A rival's settings are first varied one at a time over short runs. A rival that
takes longer than ``--rival-seconds`` runs some steps of each kind and is extrapolated by step count; its figures are
marked with "~". Writes DIR/compare.json after every run and DIR/compare.md at the end. With ``--resume`` a comparison
that was ended goes on behind the last run that was written.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from compare_table import OURS, Result, markdown
from engines import ENGINES, Engine, Job, Settings, json_lines
from floors import floors_table
from limits import LimitedGroup, LimitsUnavailable, end_on_sigterm, limited
from make_checkpoint import Shape, write_checkpoint
from page_cache import drop_from_cache
from rivals.job_steps import read_prompts
from sizes import parse_size
from to_gguf import convert
from watch_rss import watch
from workloads import WORKLOADS, write_prompts

HERE = Path(__file__).resolve().parent
TUNING_SECONDS = 25.0  # of steps, for each setting that is tried
BARE_ROWS, BARE_CONTEXT = 128, 32  # of the bare loop: rows that decode, tokens before each
MANY_LIVE = 10_000
ROOMY = 4  # times the weights: as much memory as a model and its weights in fp32 can use
OUT_OF_MEMORY = "killed: out of memory"
GRACE = 4.0
"""A rival's process may take so many times its allowed seconds before it is killed, and PATIENCE more."""
PATIENCE = 1500.0
"""Seconds to load and for the few steps of each kind that an extrapolation needs at least."""
TUNING_PATIENCE = 300.0
"""The same for runs that look for the best setting: what is slower is not it."""


@dataclass(frozen=True, slots=True)
class Regime:
    """What the machine is allowed: ``memory`` as a share of the model, ``read_rate`` in bytes/s; None = no limit."""

    name: str
    memory: float | None
    read_rate: int | None


REGIMES = {
    regime.name: regime
    for regime in (
        Regime("resident", None, None),
        Regime("ram", 0.45, None),
        Regime("ram+disk", 0.45, 200_000_000),
    )
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One workload in one regime, with the job's files."""

    workload: str
    regime: Regime
    job: Job


def prepare(work: Path, shape: Shape) -> tuple[Path, Path, int]:
    """The checkpoint and its GGUF copy, made once; returns both and the bytes of the weights."""
    checkpoint, gguf = work / "checkpoint", work / "model-f16.gguf"
    if not (checkpoint / "config.json").exists():
        print("making the checkpoint", file=sys.stderr)
        write_checkpoint(checkpoint, shape)
    if not gguf.exists():
        print("converting it to GGUF", file=sys.stderr)
        convert(checkpoint, gguf.with_suffix(".part"))
        gguf.with_suffix(".part").rename(gguf)
    return checkpoint, gguf, sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))


def settings_of(args: argparse.Namespace, work: Path, shape: Shape) -> Iterator[Setting]:
    """All pairs of workload and regime that were asked for."""
    checkpoint, gguf, size = prepare(work, shape)
    for workload in args.workloads:
        prompts = work / f"{workload}-{args.limit or 'all'}.jsonl"
        write_prompts(prompts, WORKLOADS[workload], shape.vocab, args.limit)
        for name in args.regimes:
            regime = REGIMES[name]
            memory = None if regime.memory is None else int(regime.memory * size)
            scratch = work / "scratch"
            scratch.mkdir(exist_ok=True)
            job = Job(checkpoint, gguf, prompts, scratch, memory, args.rival_seconds, args.threads)
            yield Setting(workload, regime, job)


def enter_limits(stack: ExitStack, setting: Setting) -> tuple[LimitedGroup, str | None]:
    """The regime's limits, and what could not be limited here."""
    job, rate = setting.job, setting.regime.read_rate
    try:
        return stack.enter_context(limited(job.memory, rate, job.checkpoint)), None
    except LimitsUnavailable as error:
        return LimitedGroup(), str(error)


def run_once(engine: Engine, setting: Setting, settings: Settings, patience: float = PATIENCE) -> Result:
    """One run, from a cold cache, under the limits. A failed one has ``failed`` set."""
    job = setting.job
    log = job.scratch / f"{engine.name}.stderr"
    drop_from_cache([job.checkpoint, job.gguf])
    timeout = GRACE * job.rival_seconds + patience if engine.name != "batchgen-lite" else None
    with ExitStack() as stack:
        group, unlimited = enter_limits(stack, setting)
        with log.open("wb") as stderr:
            seen = watch(group.command(engine.command(job, settings)), timeout=timeout, stdout=stderr, stderr=stderr)
        killed = group.killed_for_memory()
    result = Result(
        engine=engine.name,
        workload=setting.workload,
        regime=setting.regime.name,
        settings=dict(settings),
        bct_seconds=seen.wall_seconds,
        peak_rss=seen.peak_rss,
        read_bytes=seen.read_bytes,
        read_rate=setting.regime.read_rate,
        memory=job.memory,
        unlimited=unlimited,
    )
    text = log.read_text(errors="replace")
    if seen.code != 0:
        last = next((line for line in reversed(text.splitlines()) if line.strip()), "")
        reason = OUT_OF_MEMORY if killed else f"exit code {seen.code}: {last[:160]}"
        return replace(result, failed=reason)
    try:
        reported = engine.reported(job, text)
    except (OSError, ValueError, KeyError) as error:
        return replace(result, failed=f"no usable result: {error}")
    return replace(
        result,
        bound_seconds=bound_seconds(setting, log) if engine.name == OURS else None,
        bct_seconds=reported.seconds or seen.wall_seconds,
        extrapolated=reported.extrapolated,
        prompt_tokens=reported.prompt_tokens,
        new_tokens=reported.new_tokens,
        steps=reported.steps,
        extra=reported.extra,
    )


def bound_seconds(setting: Setting, log: Path) -> float:
    """What our run could not have been faster than (job_bound.py), in a process of its own: it loads torch."""
    command = [sys.executable, str(HERE / "job_bound.py"), str(setting.job.checkpoint), str(log)]
    command += ["--threads", str(setting.job.threads)]
    if setting.regime.read_rate is not None:
        command += ["--read-rate", str(setting.regime.read_rate)]
    bound = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return float(max(bound["reading_seconds"], bound["computing_seconds"]))


def bare_loop_share(setting: Setting) -> float | None:
    """The share of a bare loop's rate that the engine's sweeps reach under the regime's limits (roofline.py), while as
    many rows decode as BARE_ROWS. None where that could not be run; why is said on stderr."""
    job = setting.job
    ram = job.memory or ROOMY * sum(path.stat().st_size for path in job.checkpoint.glob("*.safetensors"))
    command = [sys.executable, str(HERE / "roofline.py"), str(job.checkpoint), "--streaming", "--json"]
    command += ["--ram", str(ram), "--threads", str(job.threads)]
    command += ["--rows", str(BARE_ROWS), "--context", str(BARE_CONTEXT), "--sweeps", "3"]
    log = job.scratch / "roofline.log"
    with ExitStack() as stack:
        group, _ = enter_limits(stack, setting)
        with log.open("wb") as output:
            seen = watch(group.command(command), stdout=output, stderr=output)
    found = [event for event in json_lines(log.read_text(errors="replace")) if "engine / bare loop" in event]
    if seen.code != 0 or not found:
        print(f"  no bare loop: exit code {seen.code}, see {log}", file=sys.stderr)
        return None
    return 1 / float(str(found[0]["engine / bare loop"]))


def scheduling_seconds() -> float:
    """Per sequence and sweep with MANY_LIVE sequences, over a runner that computes nothing (bench_scheduler.py)."""
    from bench_scheduler import engine_seconds  # here: it loads the package, and the comparing process stays small

    return engine_seconds(MANY_LIVE, 8)


def best_settings(engine: Engine, setting: Setting) -> Settings:
    """Vary one setting at a time from the engine's first ones, over short runs, keeping what is faster.

    Settings that fail, mostly for want of memory, lose against any that work."""
    short = replace(setting, job=replace(setting.job, rival_seconds=TUNING_SECONDS))
    best = dict(engine.first(setting.job))
    fastest = score(run_once(engine, short, best, TUNING_PATIENCE))
    for name, values in engine.dimensions(setting.job).items():
        for value in values:
            tried = {**best, name: value}
            seconds = score(run_once(engine, short, tried, TUNING_PATIENCE))
            print(f"    {engine.name} {tried}: {seconds:.0f} s", file=sys.stderr)
            if seconds < fastest:
                best, fastest = tried, seconds
    return best


def run_within_memory(engine: Engine, setting: Setting, settings: Settings) -> Result:
    """One run; where it is killed for want of memory, one with another value of one setting, until one is not."""
    result = run_once(engine, setting, settings)
    for name, values in engine.dimensions(setting.job).items():
        for value in values:
            if result.failed != OUT_OF_MEMORY:
                return result
            print(f"    {engine.name} {result.settings}: {result.failed}", file=sys.stderr)
            result = run_once(engine, setting, {**settings, name: value})
    return result


def score(result: Result) -> float:
    return float("inf") if result.failed else result.bct_seconds


def results_in(path: Path) -> list[Result]:
    """What an earlier comparison wrote, none where there was none. Those that failed are left out, to be run again."""
    if not path.exists():
        return []
    return [result for result in (Result(**entry) for entry in json.loads(path.read_text())) if not result.failed]


def compare(args: argparse.Namespace, shape: Shape) -> list[Result]:
    """All runs, with a model of this shape; results so far are on disk after each."""
    results = results_in(args.work / "compare.json") if args.resume else []
    for setting in settings_of(args, args.work, shape):
        tokens = sum(len(prompt.ids) for prompt in read_prompts(setting.job.prompts))
        # With another --limit it is another job; its results go.
        results = [
            result for result in results if result.workload != setting.workload or result.prompt_tokens == tokens
        ]
        for name in args.engines:
            key = (setting.workload, setting.regime.name, name)
            kept = [result for result in results if (result.workload, result.regime, result.engine) == key]
            if kept:
                if args.checks:
                    results[results.index(kept[0])] = checked(kept[0], setting)
                    save(args.work, results)
                continue
            engine = ENGINES[name]
            missing = engine.missing()
            if missing is not None:
                print(f"{name} is left out: {missing}", file=sys.stderr)
                continue
            print(f"{setting.workload}, {setting.regime.name}: {name}", file=sys.stderr)
            fixed = args.untuned or not engine.dimensions(setting.job)
            settings = engine.first(setting.job) if fixed else best_settings(engine, setting)
            result = run_within_memory(engine, setting, settings)
            results.append(checked(result, setting) if args.checks else result)
            print(f"  {result.failed or f'{result.bct_seconds:.1f} s'}", file=sys.stderr)
            save(args.work, results)
    return results


def checked(result: Result, setting: Setting) -> Result:
    """``result`` with the bare loop beside it, where it is ours and has none yet."""
    if result.engine != OURS or result.failed or "bare_loop_share" in result.extra:
        return result
    return replace(result, extra={**result.extra, "bare_loop_share": bare_loop_share(setting)})


def save(work: Path, results: Sequence[Result]) -> None:
    """For ``results_in``."""
    (work / "compare.json").write_text(json.dumps([asdict(result) for result in results], indent=1) + "\n")


def main() -> None:
    end_on_sigterm()
    parser = argparse.ArgumentParser(description="Run the same jobs by BatchGen-Lite and by rivals.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint, jobs and results (10 GB)")
    parser.add_argument("--quick", action="store_true", help="a small chat job, two regimes, rivals untuned")
    parser.add_argument("--untuned", action="store_true", help="rivals at the settings they would be tuned from")
    parser.add_argument(
        "--checks",
        action=argparse.BooleanOptionalAction,
        help="also a bare loop under each regime's limits and the scheduler's cost (default: unless --quick)",
    )
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=["chat", "prefill", "stragglers"])
    parser.add_argument("--regimes", nargs="+", choices=sorted(REGIMES), default=list(REGIMES))
    parser.add_argument("--engines", nargs="+", choices=sorted(ENGINES), default=list(ENGINES))
    parser.add_argument("--limit", type=int, help="keep about this many rows of each workload")
    parser.add_argument("--resume", action="store_true", help="keep what DIR/compare.json holds; run what is missing")
    parser.add_argument("--rival-seconds", type=float, default=900.0, help="then extrapolate (default 900)")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--read-rate", type=parse_size, help="another rate for the throttled regime, such as 400MB")
    args = parser.parse_args()
    if args.quick:
        args.workloads, args.regimes, args.untuned = ["chat"], ["ram", "ram+disk"], True
        args.limit, args.rival_seconds = args.limit or 96, min(args.rival_seconds, 40.0)
    args.checks = not args.quick if args.checks is None else args.checks
    if args.read_rate is not None:
        REGIMES["ram+disk"] = replace(REGIMES["ram+disk"], read_rate=args.read_rate)
    args.work.mkdir(parents=True, exist_ok=True)
    results = compare(args, Shape())
    scheduling = scheduling_seconds() if args.checks else None
    table = "\n".join(filter(None, (markdown(results), floors_table(results, scheduling))))
    (args.work / "compare.md").write_text(table)
    print(table)


if __name__ == "__main__":
    main()
