"""Gated activations of feed-forward networks, composed so that an element's bits depend on that element alone.

torch's fused silu, sigmoid and gelu take a scalar path for the elements left over behind whole vector registers,
which differs in the last bit, so their results depend on where an element lies. exp, tanh, erf and the four
arithmetic operations do not have that fault (tests/kernels/test_cpu_exactness.py watches them), so we build from those,
except where no element can be left over: there torch's sigmoid does the work of four operations in a third of the time.
"""

from __future__ import annotations

import torch

from batchgen_lite.models.spec import FFNSpec

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swigluoai")


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """1 / (1 + exp(-x)), position-independent; a new tensor."""
    return torch.neg(x).exp_().add_(1.0).reciprocal_()


_TAIL_FREE = (4, 8)
"""Multiples of so many rows and columns fill all the vector registers that torch goes through at a time, which are two
of 16 floats at most. Rows are a model's and columns padded, so a model's elements always go the same way."""
_UNSPLIT = 32768
"""Elements that torch does on one thread, in one go."""


def _times_sigmoid(x: torch.Tensor, scale: float, factor: torch.Tensor) -> torch.Tensor:
    """x * sigmoid(scale * x), position-independent; ``x``, contiguous, is overwritten and returned, ``factor`` too."""
    if x.shape[0] % _TAIL_FREE[0] or x.shape[-1] % _TAIL_FREE[1]:
        torch.mul(x, -scale, out=factor).exp_().add_(1.0)
        return x.div_(factor)
    source = x if scale == 1.0 else torch.mul(x, scale, out=factor)
    if x.numel() <= _UNSPLIT:
        return x.mul_(torch.sigmoid(source, out=factor))
    for part, into in zip(source.view(-1).split(_UNSPLIT), factor.view(-1).split(_UNSPLIT), strict=True):
        torch.sigmoid(part, out=into)
    return x.mul_(factor)


def gated(gate: torch.Tensor, up: torch.Tensor, spec: FFNSpec, factor: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """act(gate) * up, written into ``out`` and returned. All fp32, of any one shape, ``gate`` and ``factor``
    contiguous; ``gate``, ``up`` and the scratch ``factor`` are overwritten.

    silu: x * sigmoid(x). gelu: x * (1 + erf(x / sqrt 2)) / 2. gelu_tanh: Hendrycks & Gimpel's tanh form. swigluoai: as
    gpt-oss: g = min(gate, limit); g * sigmoid(alpha * g) * (clamp(up, -limit, limit) + 1).
    """
    if spec.activation == "silu":
        return torch.mul(_times_sigmoid(gate, 1.0, factor), up, out=out)
    if spec.activation == "gelu":
        torch.mul(gate, 0.7071067811865476, out=factor).erf_().add_(1.0).mul_(0.5)
        return torch.mul(gate.mul_(factor), up, out=out)
    if spec.activation == "gelu_tanh":
        torch.mul(gate, gate, out=factor).mul_(gate).mul_(0.044715).add_(gate).mul_(0.7978845608028654)
        return torch.mul(gate.mul_(factor.tanh_().add_(1.0).mul_(0.5)), up, out=out)
    if spec.activation == "swigluoai":
        gated = _times_sigmoid(gate.clamp_(max=spec.limit), spec.alpha, factor)
        return torch.mul(gated, up.clamp_(-spec.limit, spec.limit).add_(1.0), out=out)
    raise ValueError(f"activation {spec.activation!r} is not one of {', '.join(ACTIVATIONS)}")
