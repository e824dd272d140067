"""Modules on a card: a module's tiles as they arrive, through the Triton kernels, packed as they are.

A product's rows depend on no other row (the kernels' block sizes are keyed on the matrix), so it does not matter how
many tokens there are, in how many launches the experts run, or in which order their weights come. The results of a
token's experts land in rows of their own and are added in top-k order.

Per routed layer the host waits once, for the tokens per expert: they decide what is read next.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from batchgen_lite.kernels.attention.absorb import ITEMSIZE, absorb
from batchgen_lite.kernels.experts.project import linear
from batchgen_lite.kernels.experts.weights import weight_table
from batchgen_lite.kernels.launch import upload
from batchgen_lite.kernels.router.assign import Assignments, sort_assignments
from batchgen_lite.kernels.router.topk import topk
from batchgen_lite.models.layers import Bias, Layer, Skeleton
from batchgen_lite.models.spec import ModelSpec
from batchgen_lite.offload.checkpoint.head_rows import HeadRows
from batchgen_lite.offload.checkpoint.stored import TensorMatrix
from batchgen_lite.offload.stream import WeightStream
from batchgen_lite.offload.tiles import SHARED_EXPERT, Module, Tile
from batchgen_lite.offload.workspace import Workspace
from batchgen_lite.runtime.device_transfers import Transfers
from batchgen_lite.runtime.triton_ffn import CommonFFN, RoutedFFN
from batchgen_lite.runtime.triton_weights import STORED, Parts, TileTables, offset_of, whole_storage


class TritonModules:
    """The weight-bearing half of TritonOperations."""

    def __init__(
        self,
        spec: ModelSpec,
        skeleton: Skeleton,
        stream: WeightStream,
        workspace: Workspace,
        transfers: Transfers,
        dtype: torch.dtype,
    ) -> None:
        self._spec, self._skeleton, self._dtype = spec, skeleton, dtype
        self._stream, self._workspace, self._transfers = stream, workspace, transfers
        self._modules = {(module.kind, module.layer): module for module in stream.modules}
        tiles = [tile for module in stream.modules for tile in module.tiles]
        self.tables = TileTables(tiles, workspace, transfers.device.torch_device, dtype)
        self._expert_biases = {
            layer.index: (_stacked(layer, "gate_up"), _stacked(layer, "down")) for layer in skeleton.layers
        }

    def begin(self) -> None:
        """Take scratch from the workspace, which has just been rewound."""
        self.tables.begin()

    def run(self, kind: str, layer: int, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """See Operations.module; of the result the first ``tokens`` rows are written. Biases of projections are added
        here, in fp32, before anything is rounded."""
        own = self._skeleton.layers[layer]
        module = self._modules[kind, layer]
        if kind == "experts":
            return self._experts(module, own, x, tokens)
        if kind == "dense":
            assert own.spec.dense is not None
            ffn = CommonFFN(self.tables, self._workspace, own, own.spec.dense, x[:tokens])
            for tile, parts in self._stream.tiles(module):
                ffn.feed(tile, parts)
            return ffn.out
        if kind in ("absorb_k", "absorb_v"):
            return self._absorb(module, own, x, tokens)
        bias = own.out_bias if kind == "out" else own.projection_bias.get(kind)
        # What goes to the residual stream, which is fp32, is not rounded on the way.
        return self._linear(module, x, tokens, torch.float32 if kind == "out" else self._dtype, bias)

    def _linear(self, module: Module, x: torch.Tensor, tokens: int, dtype: torch.dtype, bias: Bias) -> torch.Tensor:
        """x W^T (+ bias): [T, rows of the matrix]."""
        width = module.tiles[-1].stop
        out = self._workspace.take(x.shape[0], width, dtype=dtype)
        line = None if bias is None else bias.view(1, width)
        for tile, parts in self._stream.tiles(module):
            for tables in self.tables.single(tile, parts):
                linear(x[:tokens], tables.halves[0], out[:tokens], bias=line, column0=tables.first).run()
        return out

    # -- experts --------------------------------------------------------------------------------------------------

    def _experts(self, module: Module, layer: Layer, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Route all tokens at once, then run the chosen experts as their weights arrive: fp32 [T, H]."""
        out = self._workspace.take(x.shape[0], self._spec.hidden_size, dtype=torch.float32)
        assigned, counts = self._route(layer, x, tokens)
        x = x[:tokens]
        shared = None
        if layer.spec.shared is not None:
            gate = self._shared_gate(layer, x)
            shared = CommonFFN(self.tables, self._workspace, layer, layer.spec.shared, x, gate)
        biases = self._expert_biases[layer.index]
        routed = RoutedFFN(self.tables, self._workspace, layer, x, assigned, counts.tolist(), biases)
        for batch in self._stream.batches(module, counts):
            for tile, parts in batch.tiles:
                if tile.expert == SHARED_EXPERT:
                    assert shared is not None
                    shared.feed(tile, parts)
            for role in ("gate_up", "down"):  # an expert's down tiles never come before its gate_up tiles
                routed.feed([(t, p) for t, p in batch.tiles if t.role == role and t.expert != SHARED_EXPERT])
        routed.add_up(out[:tokens], None if shared is None else shared.out)
        return out

    def _route(self, layer: Layer, x: torch.Tensor, tokens: int) -> tuple[Assignments, torch.Tensor]:
        """Every token's experts, sorted, and on the host how many tokens each has: int64 [E]."""
        spec = layer.spec.router
        assert spec is not None
        logits = self._linear(self._modules["router", layer.index], x, tokens, torch.float32, layer.router_bias)
        ids = self._workspace.take(tokens, spec.top_k, dtype=torch.int32)
        weights = self._workspace.take(tokens, spec.top_k, dtype=torch.float32)
        topk(logits[:tokens], spec, ids, weights, correction_bias=layer.correction_bias).run()
        assigned = sort_assignments(ids, weights, spec.num_experts)
        return assigned, self._transfers.to_host(assigned.offsets).long().diff()

    def _shared_gate(self, layer: Layer, x: torch.Tensor) -> torch.Tensor | None:
        """sigmoid(gate . x) per token fp32 [T], or None where the shared expert is not gated. As a product of the
        kernels: torch's own sum over a row depends on how many rows there are."""
        if not layer.spec.shared_gated:
            return None
        vector = layer.shared_gate
        assert vector is not None
        table = weight_table(whole_storage(vector), STORED[vector.dtype], 1, vector.numel(), [offset_of(vector)])
        out = self._workspace.take(x.shape[0], 1, dtype=torch.float32)
        linear(x, table, out).run()
        return out[:, 0].neg_().exp_().add_(1.0).reciprocal_()

    # -- latent attention -----------------------------------------------------------------------------------------

    def _absorb(self, module: Module, layer: Layer, x: torch.Tensor, tokens: int) -> torch.Tensor:
        """Each head's own matrix. "absorb_k" takes whole queries [T, Hq * (nope + rope)] and gives the queries of
        attention [T, Hq * (rank + rope)], of which the rotary part is left to be written; "absorb_v" maps
        [T, Hq * rank] to [T, Hq * Dv]."""
        attention = layer.spec.attention
        rank, rope, heads = attention.kv_lora_rank, attention.rope_head_dim, attention.num_heads
        assert rank is not None
        assert rope is not None
        transposed = module.kind == "absorb_k"
        width = rank + rope if transposed else attention.v_head_dim
        out = self._workspace.take(x.shape[0], heads, width, dtype=self._dtype)
        source = x[:tokens].view(tokens, heads, -1)[:, :, : attention.head_dim - rope if transposed else rank]
        target = out[:tokens, :, : rank if transposed else width]
        for tile, parts in self._stream.tiles(module):
            for first, stop, arena, encoding, offsets in self._heads(tile, parts):
                table = upload(torch.tensor(offsets, dtype=torch.int64), x.device)
                absorb(
                    source[:, first:stop], arena, table, encoding, target[:, first:stop], transposed=transposed
                ).run()
        return out.view(x.shape[0], heads * width)

    def _heads(self, tile: Tile, parts: Parts) -> Iterator[tuple[int, int, torch.Tensor, str, list[int]]]:
        """(first head, end head, arena, encoding, byte of each head's matrix), read in place where it is stored in
        plain floats."""
        matrix = tile.matrix
        assert isinstance(matrix, HeadRows)
        count = matrix.row_step
        offsets = [offset_of(part) for part in parts]
        plain = isinstance(matrix.base, TensorMatrix) and matrix.encoding in ITEMSIZE
        if plain and not any(offset % ITEMSIZE[matrix.encoding] for offset in offsets):
            yield tile.start // count, tile.stop // count, whole_storage(parts[0]), matrix.encoding, offsets
            return
        for start, stop, wide in self.tables.stages(tile, parts):
            begin, step = offset_of(wide), count * matrix.cols * wide.itemsize
            places = [begin + step * head for head in range((stop - start) // count)]
            yield start // count, stop // count, whole_storage(wide), STORED[wide.dtype], places

    # -- head -----------------------------------------------------------------------------------------------------

    def head(self, x: torch.Tensor) -> torch.Tensor:
        """Logits fp32 [rows, vocab] of ``x`` [rows, H], on the device, with bias and scale."""
        module = self._modules["head", -1]
        if not x.shape[0]:
            for _ in self._stream.tiles(module):  # keep the stream in step; nothing to compute
                pass
            return x.new_empty((0, self._spec.vocab_size), dtype=torch.float32)
        logits = self._linear(module, x, x.shape[0], torch.float32, self._skeleton.head_bias)
        return logits if self._spec.logit_scale == 1.0 else logits.mul_(self._spec.logit_scale)


def _stacked(layer: Layer, which: str) -> torch.Tensor | None:
    """The biases of all experts of a layer, [E, width], or None without any."""
    if layer.spec.router is None:
        return None
    biases = [getattr(layer.ffns[expert], which) for expert in range(layer.spec.router.num_experts)]
    return None if biases[0] is None else torch.stack(biases)
