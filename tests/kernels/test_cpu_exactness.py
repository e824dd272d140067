"""The facts about torch, oneDNN and MKL that bitwise equality rests on; if a version breaks one, this says which."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from batchgen_lite.kernels.experts.activation import ACTIVATIONS, gated, sigmoid
from batchgen_lite.kernels.norm.reference import rms_norm
from batchgen_lite.kernels.padding import HALF_BLOCK, ROW_PADDING, SPAN_ROWS, column_stride, padded, spans
from batchgen_lite.kernels.products import EXPERT_PADDING, USES_ONEDNN, product
from batchgen_lite.models.spec import FFNSpec


@pytest.fixture(autouse=True, params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


MATRICES = [
    (1024, 1024),
    (512, 1024),
    (1024, 1040),
    (1024, 512),
    (300, 100),
    (256, 4096),
    (33, 576),
    (77, 48),
    (1, 64),
    (5, 1024),
]


@pytest.mark.parametrize(("rows", "cols"), MATRICES)
def test_a_column_of_a_product_does_not_depend_on_the_others(rows: int, cols: int) -> None:
    weights, x = draw(rows, cols), draw(SPAN_ROWS, cols)
    lying = x.t().contiguous().t()  # as activations lie
    whole, turned = product(weights, x), product(weights, lying)
    assert rows == 1 or torch.equal(turned, whole)
    for count in range(EXPERT_PADDING, SPAN_ROWS + 1, EXPERT_PADDING):
        assert torch.equal(product(weights, x[:count]), whole[:, :count]), count
        assert torch.equal(product(weights, x[-count:]), whole[:, -count:]), count
        assert torch.equal(product(weights, x[:count].t().contiguous().t()), turned[:, :count]), count
        apart = torch.cat((x, x), 1)[:count, :cols]  # as nothing should lie; no other bits, all the same
        assert torch.equal(product(weights, apart), whole[:, :count]), count
    shifted = product(weights, x[:16].roll(5, 0)).roll(-5, 1)
    assert torch.equal(shifted, whole[:, :16])
    view = product(draw(2 * rows, cols)[:rows], x[:16])  # another address, the same numbers
    assert torch.equal(view, product(draw(2 * rows, cols)[:rows].clone(), x[:16]))


# MKL's bits depend on it for 5 to 7 and 9 to 11 rows of weights.
@pytest.mark.parametrize(("rows", "cols"), [shape for shape in MATRICES if USES_ONEDNN or shape[0] != 5])
def test_a_product_does_not_depend_on_the_number_of_threads(rows: int, cols: int, threads: int) -> None:
    weights, x = draw(rows, cols), draw(SPAN_ROWS, cols)
    mine = product(weights, x)
    torch.set_num_threads(3 - threads)
    assert torch.equal(product(weights, x), mine)


@pytest.mark.parametrize(("rows", "cols"), MATRICES)
def test_products_match_float64(rows: int, cols: int) -> None:
    weights, x = draw(rows, cols), draw(48, cols)
    truth = weights.double() @ x.double().t()
    # Each of the sums of ``cols`` products of about 1 is off by no more than its rounding, at worst once a product.
    assert (product(weights, x).double() - truth).abs().max() < cols * 2.0**-24 * truth.abs().max()


@pytest.mark.parametrize(("rows", "cols"), MATRICES)
def test_a_column_of_mkls_products_does_not_depend_on_the_others(rows: int, cols: int) -> None:
    """Where oneDNN is not to be had, and for the small matrices of each head."""
    weights, x = draw(rows, cols), draw(1024, cols)
    whole = torch.mm(weights, x.t())
    for count in (16, 32, 48, 112, 272, 512, 1008):
        assert torch.equal(torch.mm(weights, x[:count].t()), whole[:, :count]), count
        assert torch.equal(torch.mm(weights, x[-count:].t()), whole[:, -count:]), count
    shifted = torch.mm(weights, x[:16].roll(5, 0).t()).roll(-5, 1)
    assert torch.equal(shifted, whole[:, :16])
    for count in (16, 32, 48, 128, 512):  # rows further apart, as results lie that are read transposed
        apart = torch.empty(rows, column_stride(count) + ROW_PADDING)[:, :count]
        assert torch.equal(torch.mm(weights, x[:count].t(), out=apart), whole[:, :count]), count
    view = torch.mm(draw(2 * rows, cols)[:rows], x[:16].t())  # another address, the same numbers
    assert torch.equal(view, torch.mm(draw(2 * rows, cols)[:rows].clone(), x[:16].t()))


@pytest.mark.parametrize("depth", [16, 20, 64, 80, 128, 576])
def test_a_bmm_row_does_not_depend_on_block_size_or_batch(depth: int) -> None:
    query, key, value = draw(12, 64, depth), draw(12, 64, depth) + 1, draw(12, 64, depth) - 1
    scores = torch.bmm(query, key.transpose(1, 2))
    weighted = torch.bmm(scores, value)
    for size in (4, 8, 16, 32):
        for begin in range(0, 64, size):
            block = slice(begin, begin + size)
            for batch in (1, 12):
                part = torch.bmm(query[:batch, block].contiguous(), key[:batch].transpose(1, 2))
                assert torch.equal(part, scores[:batch, block])
                assert torch.equal(
                    torch.bmm(scores[:batch, block].contiguous(), value[:batch]), weighted[:batch, block]
                )


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "exp": torch.exp,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "reciprocal": torch.reciprocal,
    "rsqrt": lambda x: torch.rsqrt(x.abs()),
    "cos": torch.cos,
    "sigmoid of ours": sigmoid,
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_elements_bits_do_not_depend_on_where_it_lies(name: str) -> None:
    function = FUNCTIONS[name]
    x = draw(1 << 16) * 4
    whole = function(x)
    for start in range(0, 20, 3):
        for count in (1, 7, 8, 15, 33, 1000, 40000):
            assert torch.equal(function(x[start : start + count]), whole[start : start + count]), (start, count)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("rows", [16, 20, 33, 64, 2048])
def test_a_columns_activation_does_not_depend_on_the_others(name: str, rows: int) -> None:
    spec = FFNSpec(rows, activation=name)
    gate, up = draw(rows, SPAN_ROWS) * 4, draw(SPAN_ROWS, rows).t()

    def activated(first: int, end: int) -> torch.Tensor:
        part = gate[:, first:end].contiguous().clone()  # it is overwritten
        other = up[:, first:end].contiguous().clone()
        return gated(part, other, spec, torch.empty_like(part), torch.empty_like(part))

    whole = activated(0, SPAN_ROWS)
    for count in range(HALF_BLOCK, SPAN_ROWS, HALF_BLOCK):
        for first in (0, HALF_BLOCK, SPAN_ROWS - count):
            assert torch.equal(activated(first, first + count), whole[:, first : first + count]), (first, count)
    shifted = torch.cat((gate[:, 5:21], gate[:, :96]), 1), torch.cat((up[:, 5:21], up[:, :96]), 1)
    moved = gated(*shifted, spec, torch.empty_like(gate), torch.empty_like(gate))
    assert torch.equal(moved[:, :16], whole[:, 5:21])


def test_a_norms_bits_do_not_depend_on_other_rows() -> None:
    for width in (20, 72, 576, 1000, 4096):
        x, weight = draw(512, width), draw(width)
        whole = rms_norm(x, weight, 1e-6)
        for count in (1, 2, 3, 17, 33, 511):
            assert torch.equal(rms_norm(x[7 : 7 + count], weight, 1e-6), whole[7 : 7 + count])


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
@pytest.mark.parametrize("columns", [32, 33])
def test_activations_match_float64(name: str, reference: Callable[[torch.Tensor], torch.Tensor], columns: int) -> None:
    gate, up = draw(64, columns) * 3, draw(64, columns + 1)[:, :columns]
    spec = FFNSpec(64, activation=name)
    got = gated(gate.clone(), up.clone(), spec, torch.empty_like(gate), torch.empty_like(gate))
    # torch's own fp32 gelu is off by more than this where it uses AVX-512.
    assert torch.allclose(got.double(), reference(gate.double()) * up.double(), rtol=1e-6, atol=1e-6)


def test_an_unknown_activation_is_an_error() -> None:
    with pytest.raises(ValueError, match="relu"):
        gated(draw(2, 2), draw(2, 2), FFNSpec(2, activation="relu"), draw(2, 2), draw(2, 2))


def test_padding() -> None:
    assert [padded(n) for n in (1, 16, 17)] == [ROW_PADDING, ROW_PADDING, 2 * ROW_PADDING]
    assert [padded(n, HALF_BLOCK) for n in (1, 8, 17)] == [8, 8, 24]


def test_spans_hold_all_rows() -> None:
    assert spans(ROW_PADDING) == ((0, ROW_PADDING),)
    for rows in range(HALF_BLOCK, 4200, HALF_BLOCK):
        parts = spans(rows)
        assert [first for first, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == rows
        sizes = {end - first for first, end in parts}
        if rows % ROW_PADDING:
            assert max(sizes) - min(sizes) in (0, HALF_BLOCK)
            assert len(parts) == -(-rows // SPAN_ROWS)
        else:
            assert rows < 6 * ROW_PADDING or sizes <= {3 * ROW_PADDING, 4 * ROW_PADDING, 7 * ROW_PADDING}
            assert len(parts) <= -(-rows // SPAN_ROWS) + 1
        assert max(sizes) <= SPAN_ROWS
        assert all(size % HALF_BLOCK == 0 for size in sizes)


def test_no_more_products_than_spans_need() -> None:
    """Every other number of rows is a kernel that is made and kept."""
    assert len({end - first for rows in range(16, 4200, 16) for first, end in spans(rows)}) <= SPAN_ROWS // ROW_PADDING
