"""From a spec and a checkpoint to ModelWeights: every role gets its matrix, every tensor its role."""

from __future__ import annotations

from batchgen_lite.models.assemble_attention import attention_weights
from batchgen_lite.models.assemble_ffn import dense_weights, expert_weights, shared_weights
from batchgen_lite.models.spec import LayerSpec, ModelSpec
from batchgen_lite.models.tensor_names import GGUF, HUGGING_FACE, RECOMPUTED_SUFFIXES, TensorNames
from batchgen_lite.models.tensor_source import TensorSource
from batchgen_lite.models.weights import LayerWeights, ModelWeights
from batchgen_lite.offload.checkpoint.matrix import Matrix
from batchgen_lite.offload.checkpoint.tensors import Checkpoint


def weights_for(spec: ModelSpec, checkpoint: Checkpoint) -> ModelWeights:
    """The model's matrices; reads no weight.

    Raises CheckpointError for a missing tensor, a wrong shape or a tensor without a role, UnsupportedError for a
    storage scheme that is not implemented; each names the tensor.
    """
    names = GGUF if checkpoint.format == "gguf" else HUGGING_FACE
    source = TensorSource(checkpoint)
    embedding, head = _ends(spec, names, source)
    layers = tuple(_layer(spec, layer, names, source, index) for index, layer in enumerate(spec.layers))
    final_norm = source.vector([f"{name}.weight" for name in names.final_norm], spec.hidden_size)
    source.ignore(passed_over(spec, checkpoint))
    source.finish()
    return ModelWeights(embedding=embedding, layers=layers, final_norm=final_norm, head=head)


def _ends(spec: ModelSpec, names: TensorNames, source: TensorSource) -> tuple[Matrix, Matrix]:
    """Embedding and head. A tied model may store either or both; a stored one is never replaced by the other."""
    shape = spec.vocab_size, spec.hidden_size
    has_head = source.has_linear(names.head)
    if spec.tie_embeddings and has_head and not source.has_linear(names.embedding):
        head = source.linear(names.head, *shape)
        return head, head
    embedding = source.linear(names.embedding, *shape)
    if spec.tie_embeddings and not has_head:
        return embedding, embedding
    return embedding, source.linear(names.head, *shape)


def _layer(spec: ModelSpec, layer: LayerSpec, names: TensorNames, source: TensorSource, index: int) -> LayerWeights:
    hidden = spec.hidden_size

    def norm(role: tuple[str, ...]) -> Matrix:
        return source.vector([name.format(i=index) + ".weight" for name in role], hidden)

    attention_norm, ffn_norm = norm(names.attention_norm), norm(names.ffn_norm)
    attention = attention_weights(layer.attention, names, source, index, hidden, llama_gguf=_permuted(spec, source))
    if layer.dense is not None:
        dense = dense_weights(layer.dense, names, source, index, hidden)
        return LayerWeights(attention_norm=attention_norm, attention=attention, ffn_norm=ffn_norm, dense=dense)
    routed = expert_weights(layer, names, source, index, hidden)
    shared, shared_gate = shared_weights(layer, names, source, index, hidden)
    return LayerWeights(
        attention_norm=attention_norm,
        attention=attention,
        ffn_norm=ffn_norm,
        router=routed.router,
        router_bias=routed.router_bias,
        correction_bias=routed.correction_bias,
        experts=routed.experts,
        shared=shared,
        shared_gate=shared_gate,
    )


def _permuted(spec: ModelSpec, source: TensorSource) -> bool:
    """Whether q and k rows lie in the order of llama.cpp's "llama" architecture (rotary pairs adjacent)."""
    return source.checkpoint.format == "gguf" and spec.architecture == "llama"


def passed_over(spec: ModelSpec, checkpoint: Checkpoint) -> list[str]:
    """Stored tensors that need no role: rotary buffers, and multi-token-prediction layers behind the last one.

    Those layers (DeepSeek-V3, GLM-4.x) only draft tokens; they are known by their ``eh_proj``.
    """
    names = [name for name in checkpoint.tensors if name.endswith(RECOMPUTED_SUFFIXES)]
    if checkpoint.format == "gguf":
        names += [name for name in checkpoint.tensors if name == "rope_freqs.weight"]  # read into the RopeSpec
    for prefix, mark in (("model.layers.", "eh_proj.weight"), ("blk.", "nextn.eh_proj.weight")):
        layer = spec.num_layers
        while f"{prefix}{layer}.{mark}" in checkpoint.tensors:
            names += [name for name in checkpoint.tensors if name.startswith(f"{prefix}{layer}.")]
            layer += 1
    return names
