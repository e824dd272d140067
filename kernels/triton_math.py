"""Small device functions that several kernels share. Importing this module imports triton."""

from __future__ import annotations

import triton
import triton.language as tl

from batchgen_lite.kernels.availability import interpreted

# The interpreter keeps bf16 as 16-bit integers: arithmetic on it, and tl.dot of it, are silently wrong. So every value
# is widened to fp32 before arithmetic everywhere, and the operands of tl.dot further when this is set.
INTERPRET: tl.constexpr = tl.constexpr(interpreted())

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Added or used where a score is out of sight. exp2 of it is exactly 0, and unlike -inf it cannot make a NaN.
MASKED: tl.constexpr = tl.constexpr(-1.0e30)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with fp32 accumulation; fp32 operands stay fp32 (no TF32)."""
    if INTERPRET:
        # numpy's fp32 product gives a row other bits at another place in the tile. In fp64 that is rounded away, so
        # that tests of batch invariance see the kernels' own order of operations.
        return acc + tl.dot(a.to(tl.float32).to(tl.float64), b.to(tl.float32).to(tl.float64)).to(tl.float32)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot3(a, b, acc):
    """``dot`` for tiles whose fp32 operands would not fit into registers without tensor cores: fp32 as three TF32
    products, good to about 2^-21."""
    if INTERPRET:
        return dot(a, b, acc)
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


@triton.jit
def round_half_even(x):
    """Nearest integer of fp32 |x| < 2^22, ties to even: the sum's rounding does it."""
    return (x + 12582912.0) - 12582912.0  # 1.5 * 2^23


@triton.jit
def tanh(x):
    """tanh by the logistic function, exact at both ends."""
    return 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0


@triton.jit
def gated(gate, up, ACTIVATION: tl.constexpr, alpha, limit):
    """activation(gate) * up in fp32; the activations are those of models/spec.py FFNSpec."""
    if ACTIVATION == "silu":
        return gate / (1.0 + tl.exp(-gate)) * up
    elif ACTIVATION == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACTIVATION == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return 0.5 * gate * (1.0 + tanh(inner)) * up
    else:  # swigluoai
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)
