"""Products of bf16 matrices by our kernel against fp64, and on which processors they are taken."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.ops.attention import attention
from megatron_npu.ops.compiled import library, products
from megatron_npu.ops.compiled.products import Arithmetic
from megatron_npu.ops.products import linear
from megatron_npu.ops.products.weight_gradient import accumulate_weight_gradient
from tests.ops.against_fp64 import check
from tests.support.tolerances import assert_near

needs_kernels = pytest.mark.skipif(library() is None, reason="no g++, or threads not of libgomp")
# of each side: one row or vector of registers, several with a rest, more than a block of cache
SIZES = st.sampled_from([16, 17, 31, 45, 64, 250, 300, 530, 1030])


@pytest.fixture
def taken(monkeypatch):
    """Let this processor be one that multiplies fp32 faster."""
    monkeypatch.setattr(products, "_arithmetic", lambda: Arithmetic.WIDENED)


@pytest.fixture(params=Arithmetic, ids=lambda arithmetic: arithmetic.name)
def either(request, monkeypatch):
    """Let this processor be one for which the kernel has an arithmetic."""
    if request.param is Arithmetic.PAIRED and library() and not library().can_pair():
        pytest.skip("the processor has no instruction for pairs of bf16")
    monkeypatch.setattr(products, "_arithmetic", lambda: request.param)


def random(*shape: int, transposed: bool = False, stride: int = 0) -> torch.Tensor:
    """Return bf16 of a shape, by columns or by rows, which are further apart by ``stride``."""
    sizes = [*shape[:-2], *((shape[-1], shape[-2]) if transposed else shape[-2:])]
    tensor = torch.randn(*sizes[:-1], sizes[-1] + stride).bfloat16()[..., : sizes[-1]]
    return tensor.mT if transposed else tensor


@needs_kernels
@settings(max_examples=40)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    batch=st.sampled_from([(), (1,), (3,)]),
    transposed=st.tuples(st.booleans(), st.booleans()),
    stride=st.sampled_from([0, 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    add=st.booleans(),
    with_bias=st.booleans(),
)
def test_a_product(either, sizes, batch, transposed, stride, dtype, add, with_bias):
    n, m, k = sizes
    left = random(*batch, n, m, transposed=transposed[0], stride=stride)
    right = random(*batch, m, k, transposed=transposed[1], stride=stride)
    out = torch.randn(*batch, n, k + stride).to(dtype)[..., :k]
    bias = torch.randn(k) if with_bias else None
    expected = 0.5 * (left.double() @ right.double()) + (0 if bias is None else bias.double())
    expected = expected + out.double() if add else expected
    products.multiply(left, right, out, bias, 0.5, add)
    assert_near(out, expected, dtype, loose=0.25)  # one rounding


@needs_kernels
@settings(max_examples=40)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    transposed=st.tuples(st.booleans(), st.booleans()),
    stride=st.sampled_from([0, 3]),
)
def test_a_sum(either, sizes, transposed, stride):
    n, m, k = sizes
    left = random(n, m, transposed=transposed[0], stride=stride)
    right = random(m, k, transposed=transposed[1], stride=stride)
    whole = torch.randn(n, k + stride)
    total, beyond = whole[:, :k], whole[:, k:].clone()
    expected = total.double() + left.double() @ right.double()
    assert products.adds(total, left, right)
    products.add(total, left, right)
    assert_near(total, expected, torch.float32)
    assert torch.equal(whole[:, k:], beyond)


@needs_kernels
@settings(max_examples=40)
@given(
    sizes=st.tuples(SIZES, SIZES, SIZES),
    transposed=st.tuples(st.booleans(), st.booleans()),
    with_bias=st.booleans(),
)
def test_exponentials(either, sizes, transposed, with_bias):
    n, m, k = sizes
    left = random(n, m, transposed=transposed[0])
    right = random(m, k, transposed=transposed[1]) * m**-0.5
    bias, reference, sums = torch.randn(k) if with_bias else None, torch.randn(n), torch.ones(n)
    logits = left.double() @ right.double() + (0 if bias is None else bias.double())
    expected = (logits - reference[:, None]).exp()
    result = products.exponentials(left, right, bias, reference, sums)
    torch.testing.assert_close(result.double(), expected, rtol=2.0**-8, atol=0)  # one rounding
    torch.testing.assert_close(sums.double(), 1 + expected.sum(1), rtol=1e-5, atol=0)


@needs_kernels
def test_a_product_does_not_depend_on_threads(either):
    left, right = random(300, 700), random(700, 250, transposed=True) * 0.01
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        total, sums = torch.ones(300, 250), torch.zeros(300)
        products.add(total, left, right)
        powers = products.exponentials(left, right, None, torch.zeros(300), sums)
        found.append((products.multiply(left, right, torch.empty(300, 250)), total, powers, sums))
    torch.set_num_threads(before)
    for others in found[1:]:
        assert all(map(torch.equal, found[0], others))


@needs_kernels
def test_what_is_not_a_number_stays_so(either):
    left, right = torch.ones(20, 20).bfloat16(), torch.ones(20, 20).bfloat16()
    left[3, 4], left[5, 6] = torch.nan, torch.inf
    out = products.multiply(left, right, torch.empty(20, 20))
    assert out[3].isnan().all()
    assert out[5].isinf().all()
    assert (out.isfinite().sum(1) == 20).sum() == 18


@needs_kernels
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer(taken, transposed, with_bias):
    torch.manual_seed(1)
    weight = torch.randn(40, 33)
    tensors = [torch.randn(9, 4, 33), weight.t().contiguous() if transposed else weight]
    tensors += [torch.randn(40)] if with_bias else []

    def formula(x, w, b=0.0):
        return x @ (w if transposed else w.t()) + b

    check(lambda x, w, b=None: linear.linear(x, w, b, transposed), formula, tensors, torch.bfloat16)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_gradient_is_not_rounded_before_its_sum(taken, dtype):
    x, grad, main_grad = random(6, 20, 48), random(6, 20, 33), torch.ones(33, 48, dtype=dtype)
    accumulate_weight_gradient(x, grad, main_grad)
    expected = 1 + torch.einsum("sbo,sbi->oi", grad.double(), x.double())
    assert_near(main_grad, expected, dtype, loose=0.25)


@needs_kernels
def test_matmul_of_what_the_kernel_does_not_take(taken):
    """Few rows, three dimensions on the right, another dtype: torch's own."""
    for shapes in (((3, 20), (20, 20)), ((2, 20, 20), (2, 20, 20)), ((20,), (20, 20))):
        left, right = (torch.randn(shape).bfloat16() for shape in shapes)
        assert torch.equal(linear.matmul(left, right), left @ right)
    assert not products.takes(torch.ones(20, 20), torch.ones(20, 20))
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        assert not products.takes(*torch.empty(2, 20, 20, dtype=torch.bfloat16))


@needs_kernels
@pytest.mark.parametrize("layout", ["SBND", "BSND", "BNSD"])
@pytest.mark.parametrize("heads", [(3, 3), (4, 2)])
@pytest.mark.parametrize("length", [200, 600])
def test_attention(either, layout, heads, length):
    """Heads that lie apart, copied heads of groups and of long sequences, tiles with a rest."""
    torch.manual_seed(3)
    order = ["bnsd".index(letter) for letter in layout.lower()]
    # columns of a larger matrix, as a split product for queries, keys and values has them
    tensors = [torch.randn(2, n, length, 96)[..., :32].permute(order) for n in (heads[0], heads[1], heads[1])]
    back = [order.index(i) for i in range(4)]

    def formula(q, k, v):
        q, k, v = (t.permute(back) for t in (q, k, v))
        k, v = (t.repeat_interleave(heads[0] // heads[1], 1) for t in (k, v))
        scores = q @ k.mT / 32**0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -torch.inf).softmax(-1) @ v).permute(order)

    def ours(q, k, v):
        return attention(q, k, v, layout=layout, scale=32**-0.5, causal=True)

    check(ours, formula, tensors, torch.bfloat16)


AVX512 = "avx512f avx512bw avx512vl avx512dq"


@pytest.mark.parametrize(
    ("vendor", "flags", "expected"),
    [
        ("GenuineIntel", f"{AVX512} avx512_bf16 avx512_fp16", Arithmetic.WIDENED),  # Sapphire Rapids, no AMX
        ("GenuineIntel", f"{AVX512} avx512_bf16 avx512_fp16 amx_bf16 amx_tile", None),
        ("GenuineIntel", f"{AVX512} avx512_bf16", Arithmetic.PAIRED),  # Cooper Lake
        ("GenuineIntel", AVX512, Arithmetic.WIDENED),  # Ice Lake and before
        ("AuthenticAMD", f"{AVX512} avx512_bf16", Arithmetic.PAIRED),
        ("AuthenticAMD", "avx2 fma", None),
    ],
)
def test_which_processors(vendor, flags, expected):
    text = f"processor\t: 0\nvendor_id\t: {vendor}\nflags\t\t: fpu {flags}\n"
    assert products.arithmetic_of(text) is expected


def test_no_processor_known():
    assert products.arithmetic_of("") is None


def test_a_library_without_the_instruction_does_not_pair(monkeypatch):
    """Of an old compiler, which knows the processor but not what it can."""
    monkeypatch.setattr(products, "_arithmetic", lambda: Arithmetic.PAIRED)
    for can in (False, True):
        monkeypatch.setattr(products, "library", lambda can=can: SimpleNamespace(can_pair=lambda: can))
        assert products.takes(*torch.ones(2, 20, 20).bfloat16()) is can
    assert not products.are_fastest()
