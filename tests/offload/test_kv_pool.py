"""The KV pool: what is written is read back, copies, and no left-overs in pages that change hands."""

from __future__ import annotations

import pytest
import torch

from batchgen_lite.offload.budget_process import resident_bytes
from batchgen_lite.offload.devices.host import HostDevice
from batchgen_lite.offload.kv import KVPool, KVShape, pool_bytes

SHAPES = [KVShape(2, 8, 8), KVShape(1, 12, 0), KVShape(3, 4, 6)]


@pytest.fixture
def pool() -> KVPool:
    return KVPool(SHAPES, pages=5, dtype=torch.bfloat16)


def test_layers_have_their_own_shapes_and_do_not_overlap(pool: KVPool) -> None:
    for number, tensor in enumerate([*pool.keys, *pool.values]):
        tensor.fill_(number)
    for number, tensor in enumerate([*pool.keys, *pool.values]):
        assert bool((tensor == number).all())
    assert pool.keys[2].shape == (5, 3, 64, 4)
    assert pool.values[1].shape == (5, 1, 64, 0)


def test_positions_are_written_to_their_page_and_slot(pool: KVPool) -> None:
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    pool.write(0, torch.tensor([4, 4, 1]), torch.tensor([0, 63, 7]), key, value)
    assert torch.equal(pool.keys[0][4, :, 63], key[1].bfloat16())
    assert torch.equal(pool.values[0][1, :, 7], value[2].bfloat16())


def test_scrubbing_removes_what_could_poison_a_sum(pool: KVPool) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(float("nan"))
    pool.scrub([2, 3])
    assert not pool.values[0][2:4].isnan().any()
    assert pool.values[0][[0, 1, 4]].isnan().all()
    assert not pool.keys[1][2:4].isnan().any()  # a latent layer's values are a part of its keys
    pool.scrub([])


def test_int8_positions_are_written_with_their_scales_and_scrubbed_by_them() -> None:
    pool = KVPool(SHAPES, pages=5, dtype=torch.int8)
    key, value = torch.randn(2, 2, 8), torch.randn(2, 2, 8)
    pool.write(0, torch.tensor([4, 1]), torch.tensor([0, 63]), key, value)
    scales = pool.scales(0)
    assert scales is not None
    for q, scale, exact in zip((pool.keys[0], pool.values[0]), scales, (key, value), strict=True):
        read = q[4, :, 0].float() * scale[4, :, 0, None]
        assert float((read - exact[0]).abs().max()) <= 0.51 * float(scale[4, :, 0].max())
    latent = pool.scales(1)
    assert latent is not None
    assert latent[0] is latent[1]
    for tensor in pool.value_scales:
        tensor.fill_(float("nan"))
    pool.scrub([1])
    assert all(float(tensor[1].abs().max()) == 0 for tensor in pool.value_scales)
    pool.copy([(4, 2)])
    assert torch.equal(pool.keys[0][2], pool.keys[0][4])
    assert torch.equal(pool.key_scales[0][2], pool.key_scales[0][4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_pool_lies_in_the_memory_it_is_given(dtype: torch.dtype) -> None:
    needed = pool_bytes(SHAPES, 5, dtype)
    assert needed == 5 * sum(shape.page_bytes(dtype) for shape in SHAPES)
    memory = torch.zeros(needed, dtype=torch.uint8)
    pool = KVPool(SHAPES, 5, dtype, memory)
    inside = range(memory.data_ptr(), memory.data_ptr() + needed)
    assert all(tensor.data_ptr() in inside for tensor in pool.tensors())
    assert sum(tensor.numel() * tensor.element_size() for tensor in pool.tensors()) == needed
    pool.close()
    with pytest.raises(ValueError, match="take"):
        KVPool(SHAPES, 5, dtype, memory[:-1])


def test_whole_pages_are_copied_in_every_layer(pool: KVPool) -> None:
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in (*pool.keys, *pool.values)]
    pool.copy([(0, 3), (1, 4)])
    for tensor, old in zip((*pool.keys, *pool.values), before, strict=True):
        assert torch.equal(tensor[3], old[0])
        assert torch.equal(tensor[4], old[1])
        assert torch.equal(tensor[:3], old[:3])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_moved_pages_arrive_whole_and_what_lies_behind_can_be_given_back(dtype: torch.dtype) -> None:
    pages, keep = 400, 3  # so many that whole pages of the operating system lie behind
    memory = HostDevice().allocate(pool_bytes(SHAPES, pages, dtype))
    pool = KVPool(SHAPES, pages, dtype, memory.tensor)
    for number, tensor in enumerate(pool.tensors(), start=1):
        tensor.copy_(torch.arange(pages).view(-1, *[1] * (tensor.dim() - 1)) % 5 + number)
    before = [tensor[:keep].clone() for tensor in pool.tensors()]
    moved = [tensor[399].clone() for tensor in pool.tensors()]
    pool.move({399: 1})
    spans = pool.ranges(keep)
    promised = sum(memory.releasable(*span) for span in spans)
    full = resident_bytes()
    for span in spans:
        memory.release(*span)
    assert sum(stop - start for start, stop in spans) == (pages - keep) * pool.page_bytes
    assert promised >= (pages - keep) * pool.page_bytes - 2 * 4096 * len(spans)
    assert full - resident_bytes() >= promised - 64 * 1024
    for tensor, kept, came in zip(pool.tensors(), before, moved, strict=True):
        assert torch.equal(tensor[0], kept[0])
        assert torch.equal(tensor[1], came)
        assert torch.equal(tensor[2], kept[2])
    pool.close()
    memory.close()
