"""The decoder, as a coroutine over its layers: one slice of a sweep, from embedding to the rows that want logits.

A slice never touches a weight matrix. At every module that has one it yields its hidden states and is resumed with its
rows of the result, computed for all slices at once; what lies between (norms, rotary embedding, attention over its own
sequences' pages) it does itself, through its device's SliceOperations. So this file is the model, read top to bottom,
and knows nothing of streaming or devices.
"""

from __future__ import annotations

import torch

from batchgen_lite.models.layers import Layer, Skeleton
from batchgen_lite.runtime.latent_attention import latent_attention
from batchgen_lite.runtime.operations import SliceOperations
from batchgen_lite.runtime.primitives import ModuleCall, yield_
from batchgen_lite.runtime.slice_state import Steps


def run_slice(skeleton: Skeleton, slice_: SliceOperations, *, narrow: bool) -> Steps:
    """One slice through all layers. Yields a ModuleCall per weight-bearing module and is sent its rows of the result;
    the last call is "head", with the final hidden rows that want logits (possibly none). Returns its last result.

    ``narrow``: behind the last attention, which other tokens are only there for, go on with the rows that want logits
    alone, and end there without any. (Of a prompt that is one row, and the rest of the layer most of its work.)"""
    for layer in skeleton.layers:
        x = slice_.normed(layer.attention_norm)
        attention = latent_attention if layer.spec.attention.is_mla else _attention
        attended = yield from attention(layer, slice_, x)
        if narrow and layer is skeleton.layers[-1]:
            attended = slice_.narrow(attended)
            if not len(attended):
                return attended
        delta = yield from yield_(ModuleCall("out", layer.index, attended))
        slice_.add(delta, layer.attention_norm, layer.out_bias)
        x = slice_.normed(layer.ffn_norm)
        kind = "dense" if layer.spec.dense is not None else "experts"
        delta = yield from yield_(ModuleCall(kind, layer.index, x))
        slice_.add(delta, layer.ffn_norm)
    return (yield from yield_(ModuleCall("head", -1, slice_.final())))


def _attention(layer: Layer, slice_: SliceOperations, x: torch.Tensor) -> Steps:
    """One layer's attention on ``x`` [n, hidden]: the input of "out"."""
    qkv = yield from yield_(ModuleCall("qkv", layer.index, x))  # [n, (Hq + Hkv) * D + Hkv * Dv]
    return slice_.attention(layer, qkv)
