"""From a model's path to an engine: load the description, open the files, plan each job's memory, run it."""

from __future__ import annotations

from pathlib import Path

import psutil

from batchgen_lite.kernels.experts.reference import stage_elements, stage_rows
from batchgen_lite.models.layers import load_skeleton
from batchgen_lite.models.load import LoadedModel, load_model
from batchgen_lite.models.modules import modules_of
from batchgen_lite.models.spec import AttentionSpec, ModelSpec
from batchgen_lite.offload.budget import available_memory, default_ram_budget, format_size
from batchgen_lite.offload.budget_process import peak_resident_bytes, resident_bytes
from batchgen_lite.offload.kv import KV_DTYPES
from batchgen_lite.offload.kv_shapes import kv_shapes
from batchgen_lite.offload.malloc_tuning import tune_malloc
from batchgen_lite.offload.pages import pages_for
from batchgen_lite.offload.readers.direct import DirectReader
from batchgen_lite.offload.residents import tile_footprint
from batchgen_lite.offload.tiles import Module
from batchgen_lite.runtime.activations import ActivationShape
from batchgen_lite.runtime.clock import MonotonicClock
from batchgen_lite.runtime.engine import Run
from batchgen_lite.runtime.interface import Progress, RequestSource, RunSummary
from batchgen_lite.runtime.options import EngineOptions
from batchgen_lite.runtime.planner import JobSize, MemoryPlan, ModelSize, plan_memory
from batchgen_lite.runtime.runner import CpuRunner, ModelParts
from batchgen_lite.runtime.summary import progress_of, summary_of


def build_engine(model: str | Path, options: EngineOptions) -> LocalEngine:
    """Describe ``model`` and open its files. Raises ModelError kinds; whether it fits is known at the first run."""
    tune_malloc()
    return LocalEngine(load_model(Path(model)), options)


class LocalEngine:
    """Generates on this machine's CPU with weights streamed from the checkpoint. Implements Engine."""

    def __init__(self, model: LoadedModel, options: EngineOptions) -> None:
        self._options = options
        self._threads = options.threads or compute_threads()
        self._modules = modules_of(model.spec, model.weights)
        files = model.checkpoint.files
        reader = DirectReader([file.path for file in files], expected=files)
        self._parts = ModelParts(model.spec, model.weights, load_skeleton(model), reader)
        self.ram = options.ram or default_ram_budget(available_memory(), resident_bytes())
        self._process = resident_bytes()
        self._clock = MonotonicClock()
        self._runner: CpuRunner | None = None
        self._run: Run | None = None
        self._stop_requested = False

    async def run(self, source: RequestSource) -> RunSummary:
        """See Engine.run."""
        if self._stop_requested:
            return RunSummary(stopped_early=True)
        runner = self._prepare(self.plan(source))
        self._run = run = Run(source, runner, self._clock)
        if self._stop_requested:
            run.stop()
        await run.drive()
        return summary_of(run.statistics, runner, self.ram, peak_resident_bytes())

    def plan(self, source: RequestSource) -> MemoryPlan:
        """How memory would be divided for this job. Raises BudgetError if it does not fit."""
        return plan_memory(
            model_size(self._parts, self._modules),
            job_size(source),
            self.ram,
            self._process,
            self._options.overrides,
        )

    def _prepare(self, plan: MemoryPlan) -> CpuRunner:
        """A runner for ``plan``; the last job's serves again if it was planned alike, with its resident weights."""
        if self._runner is not None and self._runner.plan == plan:
            self._runner.rearm()
            return self._runner
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._runner = CpuRunner(self._parts, plan, self._threads)
        return self._runner

    def request_stop(self) -> None:
        """See Engine.request_stop."""
        self._stop_requested = True
        if self._run is not None:
            self._run.stop()

    def progress(self) -> Progress:
        """See Engine.progress."""
        if self._run is None or self._runner is None:
            return Progress()
        return progress_of(self._run, self._runner)

    def describe(self) -> dict[str, str]:
        """See Engine.describe."""
        spec = self._parts.spec
        weights = sum(module.nbytes for module in self._modules)
        lines = {
            "model": f"{spec.family}, {spec.num_layers} layers, {format_size(weights)} of weights",
            "memory": f"{format_size(self.ram)} budget, {self._threads} compute threads",
        }
        if self._runner is not None:
            lines |= self._runner.describe()
        return lines

    def close(self) -> None:
        """See Engine.close."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None
        self._parts.reader.close()


def compute_threads() -> int:
    """One a physical core that this process may run on; hyper-threads do not help dense arithmetic."""
    allowed = len(psutil.Process().cpu_affinity() or [0])
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def job_size(source: RequestSource) -> JobSize:
    """Totals over all rows of a job."""
    sizes = [source.size(index) for index in range(len(source))]
    return JobSize(
        rows=len(sizes),
        prompt_tokens=sum(size.prompt_tokens for size in sizes),
        longest_prompt=max((size.prompt_tokens for size in sizes), default=1),
        pages=max(1, sum(pages_for(size.prompt_tokens + size.max_tokens) for size in sizes)),
    )


def model_size(parts: ModelParts, modules: tuple[Module, ...]) -> ModelSize:
    """Bytes of a model as it will lie in memory."""
    alignment = parts.reader.alignment
    footprints = [tile_footprint(tile, alignment) for module in modules for tile in module.tiles]
    embedding = parts.weights.embedding
    itemsize = KV_DTYPES[parts.spec.dtype].itemsize
    return ModelSize(
        tiles=sum(footprints),
        largest_load=max(footprints),
        embedding=sum(extent.nbytes for extent in embedding.extents(0, embedding.rows)),
        page=sum(shape.page_bytes(itemsize) for shape in kv_shapes(parts.spec)),
        activations=activation_shape(parts.spec, modules, itemsize),
    )


def activation_shape(spec: ModelSpec, modules: tuple[Module, ...], kv_itemsize: int) -> ActivationShape:
    """Widths of all activations, the widest layer counting."""
    tiles = [tile for module in modules for tile in module.tiles]
    attentions = [layer.attention for layer in spec.layers]
    ffns = [ffn for layer in spec.layers for ffn in (layer.dense, layer.expert, layer.shared) if ffn is not None]
    return ActivationShape(
        hidden=spec.hidden_size,
        projections=max(_projections(attention) for attention in attentions),
        attended=max(attention.num_heads * attention.v_head_dim for attention in attentions),
        intermediate=max(ffn.intermediate for ffn in ffns),
        experts=max((layer.router.num_experts for layer in spec.layers if layer.router), default=0),
        vocab=spec.vocab_size,
        ffn_stage=max(2 * min(tile.matrix.rows, stage_rows(tile.matrix)) for tile in tiles if tile.role == "gate_up"),
        head_stage=min(spec.vocab_size, stage_rows(modules[-1].tiles[0].matrix)),
        scratch=max(stage_elements(tile.matrix) for tile in tiles),
        kv_heads=max(shape.heads for shape in kv_shapes(spec)),
        head_dim=max(max(shape.key_dim, shape.value_dim) for shape in kv_shapes(spec)),
        kv_itemsize=kv_itemsize,
    )


def _projections(attention: AttentionSpec) -> int:
    if attention.is_mla:
        assert attention.kv_lora_rank is not None
        assert attention.rope_head_dim is not None
        latents = (attention.q_lora_rank or 0) + attention.kv_lora_rank + attention.rope_head_dim
        absorbed = attention.num_heads * (attention.kv_lora_rank + attention.v_head_dim)
        return attention.num_heads * attention.head_dim + latents + absorbed
    return attention.num_heads * attention.head_dim + attention.num_kv_heads * (
        attention.head_dim + attention.v_head_dim
    )
