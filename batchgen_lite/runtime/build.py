"""From a model's path to an engine: load the description, open the files, plan each job's memory, run it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import LoadedModel, load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.budget import available_memory, default_ram_budget, format_size
from batchgen_lite.offload.budget_accounts import MemoryAccounts
from batchgen_lite.offload.budget_process import peak_resident_bytes, resident_bytes
from batchgen_lite.offload.devices.cuda import CudaDevice
from batchgen_lite.offload.devices.select import open_device
from batchgen_lite.offload.kv import kv_dtype_of
from batchgen_lite.offload.malloc_tuning import tune_malloc
from batchgen_lite.offload.readers.protocol import Reader
from batchgen_lite.offload.readers.recording import RecordingReader
from batchgen_lite.offload.readers.select import open_reader
from batchgen_lite.offload.spill import spill_staging
from batchgen_lite.runtime.calibration import CalibratingRunner, Calibration
from batchgen_lite.runtime.clock import MonotonicClock
from batchgen_lite.runtime.cost import SweepCost
from batchgen_lite.runtime.cuda_operations import size_on_card
from batchgen_lite.runtime.device_planner import plan_device_memory
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.expert_workers import workers_for
from batchgen_lite.runtime.interface import Progress, RequestSource, RunSummary
from batchgen_lite.runtime.kernel_times import time_kernels
from batchgen_lite.runtime.machine import Machine, look_at_machine
from batchgen_lite.runtime.measure import MeasuringRunner
from batchgen_lite.runtime.model_size import model_size
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.plan_search import SearchStopped, best_plan
from batchgen_lite.runtime.planner import JobSize, MemoryPlan
from batchgen_lite.runtime.rates import sweep_cost
from batchgen_lite.runtime.runner import LocalRunner, ModelParts
from batchgen_lite.runtime.sampler import Sampler
from batchgen_lite.runtime.spilling import spill_lines, spill_totals
from batchgen_lite.runtime.summary import Before, account_line, note_tail, progress_of, summary_of
from batchgen_lite.runtime.tail import keeping
from batchgen_lite.runtime.work import SweepRunner
from batchgen_lite.trace.recorder import SILENT, Recorder


def build_engine(
    model: str | Path, options: EngineOptions, sampler: Sampler | None = None, recorder: Recorder = SILENT
) -> LocalEngine:
    """Describe ``model`` and open its files. Raises ModelError kinds; whether it fits is known at the first run.
    ``sampler``: one that looks at the logits it is given."""
    tune_malloc()
    return LocalEngine(load_model(Path(model)), options, sampler, recorder)


class LocalEngine:
    """Generates on a device of this machine with weights streamed from the checkpoint. Implements Engine."""

    def __init__(
        self,
        model: LoadedModel,
        options: EngineOptions,
        sampler: Sampler | None = None,
        recorder: Recorder = SILENT,
    ) -> None:
        self._options = options
        self._recorder = recorder
        self._sampler = sampler
        self._modules = modules_of(model.spec, model.weights)
        files = model.checkpoint.files
        paths = [file.path for file in files]
        self._machine = look_at_machine(paths, options.threads)
        self._device = open_device(options.device, options.vram)
        setting = self._machine.reader
        reader: Reader = open_reader(
            setting.kind, paths, threads=setting.threads, block_bytes=setting.block_bytes, expected=files
        ).reader
        if recorder.active:
            reader = RecordingReader(reader, recorder)
        workers = 1 if self._device.separate else workers_for(self._modules, self._machine.threads)
        self._parts = ModelParts(
            model.spec,
            model.weights,
            load_skeleton(model),
            reader,
            options.kv_dtype,
            options.spill,
            self._machine.rates.read_rate,
            workers,
        )
        skeleton = self._parts.skeleton.nbytes
        self._size = model_size(
            model.spec, model.weights, self._modules, reader.alignment, skeleton, options.kv_dtype, workers
        )
        if isinstance(self._device, CudaDevice):
            self._size = size_on_card(self._device, self._size, model.spec, options.kv_dtype)
        kept = self._time_kernels(model.spec)
        self.ram = options.ram or default_ram_budget(available_memory(), resident_bytes())
        self._process = resident_bytes() - kept + recorder.memory_bytes
        if options.spill is not None:
            self._process += spill_staging(self._size.page)
        self._accounts = MemoryAccounts(self.ram)
        self._device_accounts = MemoryAccounts(self._device.memory().capacity, option="--vram")
        self._clock = MonotonicClock()
        self._runner: LocalRunner | None = None
        self._calibration: Calibration | None = None
        self._run: Run | None = None
        self._stop_requested = False

    async def run(self, source: RequestSource) -> RunSummary:
        """See Engine.run. A stop is used up by the run that it ends: the next one is not concerned."""
        try:
            if self._stop_requested:
                return RunSummary(stopped_early=True)
            # It takes seconds for a large job; meanwhile the loop serves stops, time limits and the display.
            plan = await asyncio.to_thread(self.plan, source)
            runner = self._prepare(plan)
            before, spilled = Before.of(runner), spill_totals(runner.tiers)
            measuring = self._measuring(runner)
            calibrating = self._calibrating(measuring, runner)
            lower = runner.lower_tiers(self._cost, self._group)
            tail = None
            if not self._options.overrides.fixed_division:
                tail = runner.tail_memory(self._accounts, self._weights_grew)
            self._run = run = Run(source, calibrating, self._clock, self._recorder, lower, tail)
            if self._stop_requested:
                run.stop()
            await run.drive()
            peak = peak_resident_bytes()
            summary = summary_of(run.statistics, runner, self._accounts, peak, measuring.shares, before)
            summary.extra |= spill_lines(runner.tiers, spilled)
            note_tail(summary, runner)
            return summary
        except SearchStopped:
            return RunSummary(stopped_early=True)
        finally:
            self._stop_requested = False

    def plan(self, source: RequestSource) -> MemoryPlan:
        """How memory would be divided for this job. Raises BudgetError if it does not fit, SearchStopped when a stop is
        requested meanwhile."""
        sizes = [source.size(index) for index in range(len(source))]
        if self._device.separate:
            vram = self._device.memory().capacity
            return plan_device_memory(
                self._size, JobSize.of(sizes), self.ram, self._process, vram, self._options.overrides
            )
        return best_plan(
            self._size,
            sizes,
            self.ram,
            self._process,
            self._options.overrides,
            self._machine.known,
            stopped=lambda: self._stop_requested,
        )

    def _time_kernels(self, spec: ModelSpec) -> int:
        """Time the model's kernels where that decides something. Returns the bytes that they keep."""
        if self._machine.known is None or self._device.separate:
            return 0
        dtype = kv_dtype_of(self._options.kv_dtype, spec.dtype)
        skeleton, activations = self._parts.skeleton, self._size.activations
        kernels = time_kernels(spec, skeleton, self._modules, activations, dtype, self._machine.threads)
        self._machine = replace(self._machine, rates=replace(self._machine.rates, times=kernels.times))
        return kernels.kept

    def _measuring(self, runner: LocalRunner) -> MeasuringRunner:
        """``runner`` with its use of the link and the cores measured."""
        return MeasuringRunner(
            runner,
            self._clock,
            runner.reader_statistics,
            lambda: runner.stream.statistics.wait_seconds,
            resident_bytes,
            self._recorder,
        )

    def _calibrating(self, sweeps: SweepRunner, runner: LocalRunner) -> CalibratingRunner:
        """``sweeps`` held against the cost model, from whose corrections the time left follows."""
        work, plan = self._size.work, runner.plan
        assert work is not None
        kept = plan.resident_bytes + plan.device_resident_bytes
        cost = sweep_cost(work, self._machine.rates, kept, all_resident=plan.all_resident)
        self._calibration = Calibration(cost)
        return CalibratingRunner(
            sweeps, self._calibration, self._clock, lambda: runner.stream.statistics.wait_seconds, work.group
        )

    def _prepare(self, plan: MemoryPlan) -> LocalRunner:
        """A runner for ``plan``; the last job's serves again if it was planned alike, with its resident weights."""
        if self._runner is not None and self._runner.plan == plan:
            self._runner.rearm(self._accounts)
            return self._runner
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._accounts = MemoryAccounts(self.ram)
        for name, nbytes in plan.accounts:  # before anything is allocated
            self._accounts.reserve(name, nbytes)
        self._device_accounts = MemoryAccounts(self._device.memory().capacity, option="--vram")
        for name, nbytes in plan.device_accounts:
            self._device_accounts.reserve(name, nbytes)
        self._recorder.accounts("--ram", self.ram, dict(plan.accounts))
        if self._device.separate:
            self._recorder.accounts("--vram", self._device_accounts.limit, dict(plan.device_accounts))
        self._runner = LocalRunner(
            self._parts, plan, self._machine.threads, self._sampler, self._recorder, self._device
        )
        return self._runner

    def _weights_grew(self, nbytes: int) -> None:
        """So many bytes of weights more stay in memory from now on."""
        assert self._calibration is not None
        self._calibration.base = keeping(self._calibration.base, nbytes)
        held = {account.name: account.held for account in self._accounts.accounts()}
        self._recorder.accounts("--ram", self.ram, held)

    def _cost(self) -> SweepCost:
        """Of sweeps, as calibrated by now."""
        assert self._calibration is not None
        assert self._runner is not None
        return self._calibration.cost(self._runner.reader_statistics().bytes_per_second)

    @property
    def _group(self) -> int:
        """Query heads that share a KV head."""
        assert self._size.work is not None
        return self._size.work.group

    def request_stop(self) -> None:
        """See Engine.request_stop."""
        self._stop_requested = True
        if self._run is not None:
            self._run.stop()

    def progress(self) -> Progress:
        """See Engine.progress."""
        if self._run is None or self._runner is None or self._calibration is None:
            return Progress()
        return progress_of(self._run, self._runner, self._cost(), self._group)

    def describe(self) -> dict[str, str]:
        """See Engine.describe."""
        spec = self._parts.spec
        weights = sum(module.nbytes for module in self._modules)
        lines = {
            "model": f"{spec.family}, {spec.num_layers} layers, {format_size(weights)} of weights",
            "memory": f"{format_size(self.ram)} budget, {self._machine.threads} compute threads",
            "device": self._device.describe(),
            "reading": _reading(self._machine),
        }
        if self._runner is not None:
            lines |= self._runner.describe()
            lines["accounts"] = account_line(self._accounts)
            if self._device.separate:
                lines["device accounts"] = account_line(self._device_accounts)
        return lines

    def close(self) -> None:
        """See Engine.close."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._device.close()
        self._parts.reader.close()


def _reading(machine: Machine) -> str:
    setting = machine.reader
    text = f"{setting.kind}, {setting.threads} threads x {format_size(setting.block_bytes)}"
    rates = machine.known
    if rates is None:
        return text
    return f"{text}, {format_size(round(rates.read_rate))}/s while computing ({rates.source})"
