"""How each engine is started for a job, with which settings it may be tried, and how its result is read.

An engine turns a job into a command; the command runs in a process of its own under the job's limits. Nothing here
imports an engine: the comparing process stays small, and a rival that is not installed is only a line in the table.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

RIVALS = Path(__file__).resolve().parent / "rivals"
Settings = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Job:
    """What is to be run: files, and what the machine is allowed. ``memory`` in bytes, None = no limit."""

    checkpoint: Path
    gguf: Path
    prompts: Path
    scratch: Path
    memory: int | None
    rival_seconds: float
    threads: int


@dataclass(frozen=True, slots=True)
class Reported:
    """What the engine itself says of a run. ``seconds`` is None where the time seen from outside counts."""

    prompt_tokens: int
    new_tokens: int
    steps: int
    seconds: float | None = None
    extrapolated: bool = False
    extra: dict[str, object] = field(default_factory=dict)


class Engine(Protocol):
    """One contender."""

    name: str

    def missing(self) -> str | None:
        """Why it cannot run here, or None."""
        ...

    def first(self, job: Job) -> Settings:
        """The settings to start from."""
        ...

    def dimensions(self, job: Job) -> dict[str, list[object]]:
        """What may be varied, one setting at a time, to find the best."""
        ...

    def command(self, job: Job, settings: Settings) -> list[str]: ...

    def reported(self, job: Job, stderr: str) -> Reported:
        """Read the result of a run that ended well."""
        ...


class Ours:
    """BatchGen-Lite through its own command."""

    name = "batchgen-lite"

    def missing(self) -> str | None:
        return None if self._binary().exists() else f"{self._binary()} is not there; install the package first"

    def first(self, job: Job) -> Settings:
        return {}

    def dimensions(self, job: Job) -> dict[str, list[object]]:
        return {}

    def command(self, job: Job, settings: Settings) -> list[str]:
        # What was measured of the disk under another regime's limits is not true under this one's.
        cache = tempfile.mkdtemp(prefix="cache-", dir=job.scratch)
        command = ["env", f"XDG_CACHE_HOME={cache}", str(self._binary()), "generate"]
        command += ["--model", str(job.checkpoint), "--input", str(job.prompts)]
        command += ["--output", str(job.scratch / "answers.jsonl"), "--overwrite", "--temperature", "0"]
        command += ["--threads", str(job.threads), "--progress", "json"]
        return command if job.memory is None else [*command, "--ram", str(job.memory)]

    def reported(self, job: Job, stderr: str) -> Reported:
        events = list(json_lines(stderr))
        summary = next((event for event in reversed(events) if event.get("event") == "summary"), None)
        if summary is None:
            raise ValueError("no summary among its events")
        if summary["ok"] != summary["total"]:
            raise ValueError(f"{summary['failed']} rows failed and {summary['left']} are left of {summary['total']}")
        return Reported(
            prompt_tokens=int(str(summary["tokens_prefilled"])),
            new_tokens=int(str(summary["tokens_decoded"])),
            steps=int(str(summary["sweeps"])),
            extra=summary,
        )

    @staticmethod
    def _binary() -> Path:
        return Path(sys.executable).parent / "batchgen-lite"


class Driven:
    """A rival behind a driver script that writes an outcome (rivals/job_steps.py)."""

    name: str
    module: str
    script: Path

    def missing(self) -> str | None:
        found = importlib.util.find_spec(self.module)
        return None if found is not None else f"the module {self.module} is not installed here"

    def command(self, job: Job, settings: Settings) -> list[str]:
        command = [sys.executable, str(self.script), "--prompts", str(job.prompts), "--result", str(self._result(job))]
        command += ["--model", str(self.model(job)), "--threads", str(job.threads)]
        command += ["--seconds", str(job.rival_seconds), "--choice", str(expert_share(job.checkpoint))]
        for flag, value in settings.items():
            if value is not None:
                command += [f"--{flag}", str(value)]
        return command

    def model(self, job: Job) -> Path:
        raise NotImplementedError

    def reported(self, job: Job, stderr: str) -> Reported:
        outcome = json.loads(self._result(job).read_text())
        return Reported(
            prompt_tokens=outcome["prompt_tokens"],
            new_tokens=outcome["new_tokens"],
            steps=outcome["steps_total"],
            seconds=outcome["bct_seconds"] if outcome["extrapolated"] else None,
            extrapolated=outcome["extrapolated"],
            extra=outcome,
        )

    def _result(self, job: Job) -> Path:
        return job.scratch / f"{self.name}.json"


class Accelerate(Driven):
    """transformers with accelerate's disk offload, static batches."""

    name, module, script = "accelerate", "accelerate", RIVALS / "accelerate_driver.py"

    def command(self, job: Job, settings: Settings) -> list[str]:
        command = super().command(job, settings)
        if job.memory is None:
            return command
        # By itself glibc keeps what was freed for the next tensor of another size: 1.6 instead of 1.2 GB with 64 rows.
        return ["env", f"MALLOC_MMAP_THRESHOLD_={128 << 10}", *command]

    def model(self, job: Job) -> Path:
        return job.checkpoint

    def first(self, job: Job) -> Settings:
        if job.memory is None:
            return {"batch": 64, "dtype": "bfloat16"}
        # What tuning found on this project's checkpoint, with and without a limit of the disk. More rows are killed; of
        # the weights it may keep little, for the page cache through which it reads the others then lacks that.
        return {"batch": 96, "dtype": "bfloat16", "memory": job.memory // 4, "experts": "eager"}

    def dimensions(self, job: Job) -> dict[str, list[object]]:
        if job.memory is None:
            return {"dtype": ["float32"], "batch": [128, 256]}
        return {"batch": [128, 64, 32], "memory": [0], "experts": ["grouped_mm"]}


class LlamaCpp(Driven):
    """llama.cpp with continuous batching."""

    name, module, script = "llama.cpp", "llama_cpp", RIVALS / "llama_cpp_driver.py"

    def model(self, job: Job) -> Path:
        return job.gguf

    def first(self, job: Job) -> Settings:
        kv = "unified" if job.memory else "per-sequence"  # per-sequence KV alone would exceed such a limit
        return {"sequences": self._sequences(job), "ubatch": 2048, "kv": kv, "load": "mmap"}

    def dimensions(self, job: Job) -> dict[str, list[object]]:
        other = "per-sequence" if job.memory else "unified"
        counts: list[object] = [count for count in (256, 128, 64, 32) if count != self._sequences(job)]
        return {"sequences": counts, "kv": [other], "ubatch": [512], "load": ["direct"]}

    @staticmethod
    def _sequences(job: Job) -> int:
        """What tuning found on this project's checkpoint."""
        return 128 if job.memory else 256


ENGINES: dict[str, Engine] = {engine.name: engine for engine in (Ours(), Accelerate(), LlamaCpp())}


def expert_share(checkpoint: Path) -> float:
    """The share of a layer's experts that a token chooses, by the checkpoint's config.json; 1 where it has none."""
    config = json.loads((checkpoint / "config.json").read_text())
    return float(config["num_experts_per_tok"] / config["num_experts"]) if "num_experts" in config else 1.0


def json_lines(text: str) -> Iterator[dict[str, object]]:
    """The JSON objects among the lines; other output may lie between them."""
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(value, dict):
            yield value
