"""Embedding rows by token, from memory and from the disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from batchgen_lite.errors import StorageError
from batchgen_lite.offload.checkpoint.matrices import TensorMatrix
from batchgen_lite.offload.checkpoint.open import open_checkpoint
from batchgen_lite.offload.embedding import EmbeddingTable
from batchgen_lite.offload.readers.direct import DirectReader


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_come_in_the_order_asked_for(resident: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = torch.randn(700, 36).to(dtype)
    save_file({"before": torch.zeros(3), "embedding": weights}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    reader = DirectReader([file.path for file in checkpoint.files])
    table = EmbeddingTable(TensorMatrix(checkpoint.tensors["embedding"]), reader, resident=resident)
    ids = [699, 0, 5, 5, 5, 300, *range(650, 0, -2)]
    out = torch.full((len(ids), 36), float("nan"))
    table.rows(ids, out)
    assert torch.equal(out, weights.float()[ids])
    table.rows([], out[:0])
    table.close()
    reader.close()


def test_a_read_that_fails_is_a_storage_error(tmp_path: Path) -> None:
    save_file({"embedding": torch.randn(700, 36)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    checkpoint = open_checkpoint(tmp_path)
    reader = DirectReader([file.path for file in checkpoint.files])
    table = EmbeddingTable(TensorMatrix(checkpoint.tensors["embedding"]), reader, resident=False)
    reader.close()
    with pytest.raises(StorageError):
        table.rows([1, 2], torch.empty(2, 36))
