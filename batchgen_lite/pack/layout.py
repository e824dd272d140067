"""What a packed model consists of: which tensor goes into which file, and where in it. Reads no weight."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen_lite.errors import UnsupportedError, UsageError
from batchgen_lite.kernels.dequant.sizes import block_size
from batchgen_lite.models.assemble import passed_over
from batchgen_lite.models.load import LoadedModel
from batchgen_lite.models.tensor_names import HUGGING_FACE, is_expert_tensor
from batchgen_lite.models.weights import FFNWeights
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.packed_directory import BLOB_ALIGNMENT, stored_bytes
from batchgen_lite.offload.checkpoint.tensors import Extent, TensorInfo


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor to be written. ``source``: the stored tensor to copy, or the matrix to widen and to round to
    ``target.encoding`` (fp32 for biases). ``target.extent.file`` counts the files of the packed model."""

    target: TensorInfo
    source: TensorInfo | Matrix


@dataclass(frozen=True, slots=True)
class FilePlan:
    """One file: its items in order of offset."""

    name: str
    items: tuple[Item, ...]
    nbytes: int


def plan_files(model: LoadedModel, encoding: str | None) -> list[FilePlan]:
    """Files in the order in which a sweep needs them: one for every layer, the last for what lies outside layers.

    ``encoding``: of routed experts; None keeps them as they are stored. UsageError for a model without experts,
    UnsupportedError where it cannot be packed.
    """
    checkpoint, layers = model.checkpoint, model.weights.layers
    if checkpoint.format == "gguf":
        raise UnsupportedError(
            f"{checkpoint.root} is a GGUF file; pack reads directories of safetensors files. GGUF is stored in blocks "
            "already: run it as it is"
        )
    if checkpoint.format == "packed":
        raise UsageError(f"{checkpoint.root} is packed already; give the model that it was packed from")
    if not any(layer.experts for layer in layers):
        raise UsageError(f"{checkpoint.root} has no routed experts, and pack leaves dense weights as they are")
    kept = _kept_by_layer(model, experts=encoding is None)
    files: list[FilePlan] = []
    for number in [*range(len(layers)), -1]:
        builder = _Builder(len(files))
        for info in kept.get(number, []):
            builder.align()
            builder.copy(info)
        if encoding is not None and number >= 0:
            for expert, weights in enumerate(layers[number].experts):
                prefix = HUGGING_FACE.packed_expert[0].format(i=number, e=expert)
                builder.expert(prefix, weights, encoding)
        name = f"layer-{number:05d}.bin" if number >= 0 else "outside-layers.bin"
        files.append(builder.finish(name))
    return files


def _kept_by_layer(model: LoadedModel, *, experts: bool) -> dict[int, list[TensorInfo]]:
    """Tensors to copy by layer, -1 for those outside; in their order in the source's files."""
    checkpoint = model.checkpoint
    dropped = set(passed_over(model.spec, checkpoint))
    kept: dict[int, list[TensorInfo]] = {}
    for info in sorted(checkpoint.tensors.values(), key=lambda info: (info.extent.file, info.extent.offset)):
        if info.name in dropped or (is_expert_tensor(info.name) and not experts):
            continue
        parts = info.name.split(".")
        layer = int(parts[2]) if info.name.startswith("model.layers.") and parts[2].isdigit() else -1
        kept.setdefault(layer, []).append(info)
    return kept


class _Builder:
    """Places items one behind the other. A blob is what belongs together: a copied tensor, or one expert."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._at = 0
        self._items: list[Item] = []

    def align(self) -> None:
        self._at = -(-self._at // BLOB_ALIGNMENT) * BLOB_ALIGNMENT

    def copy(self, info: TensorInfo) -> None:
        # What the index derives from encoding and shape must be what is copied.
        if stored_bytes(info.encoding, info.shape) != info.extent.nbytes:
            raise UnsupportedError(f"tensor {info.name!r} ({info.encoding} {list(info.shape)}) cannot be packed")
        self._add(info.name, info.encoding, info.shape, info)

    def expert(self, prefix: str, weights: FFNWeights, encoding: str) -> None:
        """One expert's blob: gate and up rows, down rows, biases."""
        self.align()
        for role, matrix in (("gate_up", weights.gate_up), ("down", weights.down)):
            if matrix.cols % block_size(encoding):
                raise UnsupportedError(
                    f"{prefix}{role} has rows of {matrix.cols} weights, no multiple of the group "
                    f"{block_size(encoding)}; try --group 32, or --experts keep"
                )
            self._add(prefix + role, encoding, (matrix.rows * matrix.outputs_per_row, matrix.cols), matrix)
        for role, bias in (("gate_up_bias", weights.gate_up_bias), ("down_bias", weights.down_bias)):
            if bias is not None:
                self._add(prefix + role, "F32", (bias.cols,), bias)

    def finish(self, name: str) -> FilePlan:
        self.align()
        return FilePlan(name, tuple(self._items), self._at)

    def _add(self, name: str, encoding: str, shape: tuple[int, ...], source: TensorInfo | Matrix) -> None:
        nbytes = stored_bytes(encoding, shape)
        self._items.append(Item(TensorInfo(name, encoding, shape, Extent(self._file, self._at, nbytes)), source))
        self._at += nbytes


def expert_bytes(files: list[FilePlan], model: LoadedModel) -> tuple[int, int]:
    """Bytes that routed experts take before and after; equal where they are kept."""
    before = sum(info.extent.nbytes for name, info in model.checkpoint.tensors.items() if is_expert_tensor(name))
    items = [item for file in files for item in file.items]
    after = sum(
        item.target.extent.nbytes
        for item in items
        if item.target.name.startswith("packed.") or is_expert_tensor(item.target.name)
    )
    return before, after
