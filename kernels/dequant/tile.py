"""Device functions that widen one tile of packed weights to fp32 in registers. Importing this module imports triton.

A matrix is [rows, K], row-major, at a byte offset of an arena; a tile is BLOCK_N rows by BLOCK_K columns. Formats that
put two or four values of *different* columns into one byte are not re-interleaved: the tile comes in PARTS slices,
each a [BLOCK_N, BLOCK_K / PARTS] block over its own set of columns, and the caller multiplies every slice with the
activations of those columns (``part_columns``). That needs no shuffles and no ``tl.dot_scaled``, which is fragile on
consumer cards.

Values are made by integer arithmetic and exact power-of-two scaling, so they are bit for bit those of the format's
definition, fp8 and fp4 included, on every card (no native fp8 needed). Block layouts are those of ggml-common.h (Q8_0,
Q4_0, MXFP4, Q4_K, Q6_K) and of gpt-oss' checkpoints (MXFP4_BLOCKS: nibble pairs [rows, K / 2] beside e8m0 scales
[rows, K / 32]).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part_columns(ENCODING: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, BLOCK_K: tl.constexpr):
    """Columns, relative to the tile's first, of slice PART: int32 [BLOCK_K / PARTS]."""
    i = tl.arange(0, BLOCK_K // PARTS)
    if ENCODING == "INT4" or ENCODING == "MXFP4_BLOCKS":
        return i * 2 + PART  # byte j: columns 2j (low nibble), 2j + 1
    elif ENCODING == "Q4_0" or ENCODING == "MXFP4":
        return i // 16 * 32 + i % 16 + 16 * PART  # low nibbles: first half of the block of 32
    elif ENCODING == "Q4_K":
        return i // 32 * 64 + i % 32 + 32 * PART
    elif ENCODING == "Q6_K":
        return i // 32 * 128 + i % 32 + 32 * PART
    else:
        return i


@triton.jit
def load_tile(
    arena,
    data,
    scales,
    zeros,
    rows,
    row_ok,
    k0,
    K,
    row_stride,
    scale_stride,
    ENCODING: tl.constexpr,
    PART: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Slice PART of the tile that starts at column ``k0``: [BLOCK_N, BLOCK_K / PARTS], fp32 (plain types: their own).

    ``data``, ``scales``, ``zeros``: byte offsets of the matrix and of its companions; ``rows`` int64 [BLOCK_N],
    ``row_ok`` its mask; strides in bytes. Values outside rows and K are finite garbage or 0: their products are
    discarded or met by zero activations.
    """
    if ENCODING == "F32" or ENCODING == "F16" or ENCODING == "BF16":
        return _plain(arena, data, rows, row_ok, k0, K, row_stride, ENCODING, BLOCK_K)
    elif ENCODING == "Q8_0":
        return _q8_0(arena, data, rows, row_ok, k0, K, row_stride, BLOCK_N, BLOCK_K)
    elif ENCODING == "Q4_0" or ENCODING == "MXFP4":
        return _nibbles32(arena, data, rows, row_ok, k0, K, row_stride, ENCODING, PART, BLOCK_N, BLOCK_K)
    elif ENCODING == "Q4_K":
        return _q4_k(arena, data, rows, row_ok, k0, K, row_stride, PART, BLOCK_N, BLOCK_K)
    elif ENCODING == "Q6_K":
        return _q6_k(arena, data, rows, row_ok, k0, K, row_stride, PART, BLOCK_N, BLOCK_K)
    else:
        return _grouped(
            arena, data, scales, zeros, rows, row_ok, k0, K, row_stride, scale_stride,
            ENCODING, PART, GROUP, SCALE_ROWS, SCALE_KIND, HAS_ZEROS, BLOCK_N, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _half(pointer, mask):
    """fp16 at byte pointers (2-aligned), as fp32."""
    return tl.load(pointer.to(tl.pointer_type(tl.float16), bitcast=True), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def e8m0(byte):
    """2^(byte - 127) as fp32; 255 is NaN (OCP MX specification 1.0, 5.4.1)."""
    bits = tl.where(byte == 0, 0x00400000, byte.to(tl.int32) << 23)
    bits = tl.where(byte == 255, 0x7FC00000, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def e2m1(nibble):
    """fp4 value of a nibble (int32): its bits moved into fp16 and rescaled by the difference of the biases, 2^14."""
    bits = ((nibble & 8) << 12) | ((nibble & 7) << 9)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def e4m3(byte):
    """fp8 e4m3fn value of a byte (int32), as fp32: via fp16, rescaled by 2^8; 0x7f and 0xff are NaN."""
    bits = ((byte & 0x80) << 8) | ((byte & 0x7F) << 7)
    value = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    return tl.where((byte & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _plain(arena, data, rows, row_ok, k0, K, row_stride, ENCODING: tl.constexpr, BLOCK_K: tl.constexpr):
    k = k0 + tl.arange(0, BLOCK_K)
    mask = row_ok[:, None] & (k < K)[None, :]
    base = arena + data + rows * row_stride  # [BLOCK_N] byte pointers
    if ENCODING == "F32":
        return tl.load(base.to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + k[None, :], mask=mask, other=0.0)
    elif ENCODING == "F16":
        return tl.load(base.to(tl.pointer_type(tl.float16), bitcast=True)[:, None] + k[None, :], mask=mask, other=0.0)
    else:
        return tl.load(base.to(tl.pointer_type(tl.bfloat16), bitcast=True)[:, None] + k[None, :], mask=mask, other=0.0)


@triton.jit
def _group_scales(arena, offset, rows, row_ok, k, K, stride, GROUP: tl.constexpr, KIND: tl.constexpr):
    """One scale per row and per first column ``k`` of a run: fp32 [BLOCK_N, runs]. GROUP 0: one scale a row."""
    group = k // GROUP if GROUP > 0 else k * 0
    pointer = arena + offset + rows[:, None] * stride
    mask = row_ok[:, None] & (k < K)[None, :]
    if KIND == "fp32":
        pointer = (pointer + group[None, :] * 4).to(tl.pointer_type(tl.float32), bitcast=True)
        return tl.load(pointer, mask=mask, other=0.0)
    elif KIND == "fp16":
        return _half(pointer + group[None, :] * 2, mask)
    elif KIND == "bf16":
        pointer = (pointer + group[None, :] * 2).to(tl.pointer_type(tl.bfloat16), bitcast=True)
        return tl.load(pointer, mask=mask, other=0.0).to(tl.float32)
    elif KIND == "e8m0":
        return e8m0(tl.load(pointer + group[None, :], mask=mask, other=127))
    else:  # "u8": zero points
        return tl.load(pointer + group[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def _grouped(
    arena, data, scales, zeros, rows, row_ok, k0, K, row_stride, scale_stride,
    ENCODING: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALE_KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """INT8, INT4, F8_E4M3 and MXFP4_BLOCKS: values in one array, one scale per GROUP columns in another."""
    PACK: tl.constexpr = 2 if ENCODING == "INT4" or ENCODING == "MXFP4_BLOCKS" else 1
    RUN: tl.constexpr = BLOCK_K if GROUP == 0 or GROUP > BLOCK_K else GROUP  # columns that share a scale
    RUNS: tl.constexpr = BLOCK_K // RUN
    first = k0 + tl.arange(0, RUNS) * RUN
    scale_rows = rows // SCALE_ROWS
    scale = _group_scales(arena, scales, scale_rows, row_ok, first, K, scale_stride, GROUP, SCALE_KIND)
    # Whole bytes are counted, not columns: a quotient would hide from the compiler that they are neighbours.
    index = first[:, None] // PACK + tl.arange(0, RUN // PACK)[None, :]  # [RUNS, RUN / PACK]
    pointer = arena + data + rows[:, None, None] * row_stride + index[None, :, :]
    byte = tl.load(pointer, mask=row_ok[:, None, None] & (index * PACK < K)[None, :, :], other=0).to(tl.int32)
    if PACK == 2:
        byte = (byte >> (4 * PART)) & 15
    if ENCODING == "MXFP4_BLOCKS":
        value = e2m1(byte)
    elif ENCODING == "F8_E4M3":
        value = e4m3(byte)
    elif ENCODING == "INT8":
        value = ((byte << 24) >> 24).to(tl.float32)
    else:
        zero = 8.0
        if HAS_ZEROS:
            # Zero points: one byte a group; a row of them is as many bytes as a row of scales has scales.
            SIZE: tl.constexpr = 4 if SCALE_KIND == "fp32" else 2
            zero = _group_scales(arena, zeros, scale_rows, row_ok, first, K, scale_stride // SIZE, GROUP, "u8")
            zero = zero[:, :, None]
        value = byte.to(tl.float32) - zero
    return tl.reshape(value * scale[:, :, None], [BLOCK_N, BLOCK_K // PACK])


@triton.jit
def _q8_0(arena, data, rows, row_ok, k0, K, row_stride, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr):
    """34 bytes per 32 columns: fp16 d, int8 q[32]; d * q."""
    block = k0 // 32 + tl.arange(0, BLOCK_K // 32)
    mask = row_ok[:, None] & (block * 32 < K)[None, :]
    pointer = arena + data + rows[:, None] * row_stride + block[None, :] * 34
    d = _half(pointer, mask)
    q = tl.load(pointer[:, :, None] + 2 + tl.arange(0, 32)[None, None, :], mask=mask[:, :, None], other=0)
    value = ((q.to(tl.int32) << 24) >> 24).to(tl.float32)
    return tl.reshape(value * d[:, :, None], [BLOCK_N, BLOCK_K])


@triton.jit
def _nibbles32(
    arena, data, rows, row_ok, k0, K, row_stride,
    ENCODING: tl.constexpr, PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Q4_0: 18 bytes per 32 columns: fp16 d, q[16]; d * (q - 8). MXFP4: 17 bytes: e8m0, q[16] of fp4 values."""
    BYTES: tl.constexpr = 18 if ENCODING == "Q4_0" else 17
    HEADER: tl.constexpr = BYTES - 16
    block = k0 // 32 + tl.arange(0, BLOCK_K // 32)
    mask = row_ok[:, None] & (block * 32 < K)[None, :]
    pointer = arena + data + rows[:, None] * row_stride + block[None, :] * BYTES
    byte = tl.load(pointer[:, :, None] + HEADER + tl.arange(0, 16)[None, None, :], mask=mask[:, :, None], other=0)
    nibble = (byte.to(tl.int32) >> (4 * PART)) & 15
    if ENCODING == "Q4_0":
        value = (nibble - 8).to(tl.float32) * _half(pointer, mask)[:, :, None]
    else:
        value = e2m1(nibble) * e8m0(tl.load(pointer, mask=mask, other=127))[:, :, None]
    return tl.reshape(value, [BLOCK_N, BLOCK_K // 2])


@triton.jit
def _q4_k(
    arena, data, rows, row_ok, k0, K, row_stride,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """144 bytes per 256 columns: fp16 d and dmin, 8 pairs of 6-bit (scale, minimum) in 12 bytes, 128 bytes of nibbles.

    64 columns take 32 bytes, low nibbles first: columns of slice PART have sub-block 2 * (k / 64 % 4) + PART.
    """
    run = k0 // 64 + tl.arange(0, BLOCK_K // 64)  # runs of 64 columns
    mask = row_ok[:, None] & (run * 64 < K)[None, :]
    pointer = arena + data + rows[:, None] * row_stride + (run // 4)[None, :] * 144
    sub = (run % 4 * 2 + PART)[None, :]  # 0..7
    packed = pointer + 4 + sub % 4
    low = tl.load(packed, mask=mask, other=0).to(tl.int32)
    middle = tl.load(packed + 4, mask=mask, other=0).to(tl.int32)
    high = tl.load(packed + 8, mask=mask, other=0).to(tl.int32)
    scale = tl.where(sub < 4, low & 63, (high & 15) | ((low >> 6) << 4)).to(tl.float32)
    minimum = tl.where(sub < 4, middle & 63, (high >> 4) | ((middle >> 6) << 4)).to(tl.float32)
    scale = scale * _half(pointer, mask)
    minimum = minimum * _half(pointer + 2, mask)
    bytes_at = pointer[:, :, None] + 16 + (run % 4 * 32)[None, :, None] + tl.arange(0, 32)[None, None, :]
    nibble = (tl.load(bytes_at, mask=mask[:, :, None], other=0).to(tl.int32) >> (4 * PART)) & 15
    value = nibble.to(tl.float32) * scale[:, :, None] - minimum[:, :, None]
    return tl.reshape(value, [BLOCK_N, BLOCK_K // 2])


@triton.jit
def _q6_k(
    arena, data, rows, row_ok, k0, K, row_stride,
    PART: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """210 bytes per 256 columns: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, fp16 d.

    128 columns take 64 + 32 bytes; column 32 * PART + l of them: low bits at byte l + 32 * (PART % 2), nibble PART / 2;
    high bits at byte l, pair PART; scale l / 16 + 2 * PART; value d * scale * (q - 32).
    """
    RUNS: tl.constexpr = BLOCK_K // 128
    sixteen = tl.arange(0, RUNS * 2)  # sixteens of the slice's columns: each has one scale
    run = k0 // 128 + sixteen // 2
    half = (run % 2)[None, :]
    at = arena + data + rows[:, None] * row_stride + (run // 2)[None, :] * 210
    mask = row_ok[:, None] & (run * 128 < K)[None, :]
    raw = tl.load(at + 192 + half * 8 + sixteen[None, :] % 2 + 2 * PART, mask=mask, other=0).to(tl.int32)
    scale = ((raw << 24) >> 24).to(tl.float32) * _half(at + 208, mask)
    within = (sixteen[None, :] % 2 * 16)[:, :, None] + tl.arange(0, 16)[None, None, :]
    wide = mask[:, :, None]
    low = tl.load(at[:, :, None] + half[:, :, None] * 64 + 32 * (PART % 2) + within, mask=wide, other=0).to(tl.int32)
    high = tl.load(at[:, :, None] + 128 + half[:, :, None] * 32 + within, mask=wide, other=0).to(tl.int32)
    quant = ((low >> (4 * (PART // 2))) & 15) | (((high >> (2 * PART)) & 3) << 4)
    return tl.reshape((quant - 32).to(tl.float32) * scale[:, :, None], [BLOCK_N, BLOCK_K // 4])
