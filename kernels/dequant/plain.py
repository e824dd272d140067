"""Plain element types: widening is a cast."""

from __future__ import annotations

import torch

PLAIN_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def decode_plain(encoding: str, rows: torch.Tensor, out: torch.Tensor) -> None:
    """Cast ``rows`` uint8 [n, row_bytes], aligned to the element, to ``out`` fp32 [n, cols]."""
    out.copy_(rows.view(PLAIN_DTYPES[encoding]))
