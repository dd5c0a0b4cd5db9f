"""Norms, softmax, activations, rotary embedding, casts and dropout on the simulated NPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.against_fp64 import DTYPES, compare

pytestmark = pytest.mark.simulated
few = settings(max_examples=10)
sizes = st.integers(1, 5)
dtypes = st.sampled_from(DTYPES)


def npu(name: str):
    """Return an operation of torch_npu by name, called like its Python entry point."""
    import torch_npu

    return getattr(torch_npu, name)


def rms_norm(x, gamma, epsilon=1e-6, dims=(-1,)):
    return x / (x.square().mean(dims, keepdim=True) + epsilon).sqrt() * gamma


@few
@given(dtypes, sizes, sizes, st.integers(1, 33), st.sampled_from([1e-6, 1e-2]))
def test_rms_norm(dtype, rows, columns, hidden, epsilon):
    compare(
        lambda x, g: npu("npu_rms_norm")(x, g, epsilon)[0],
        lambda x, g: rms_norm(x, g, epsilon),
        [torch.randn(rows, columns, hidden), torch.randn(hidden)],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_over_two_dimensions(dtype):
    inputs = [torch.randn(3, 4, 8), torch.randn(4, 8)]
    compare(
        lambda x, g: npu("npu_rms_norm")(x, g)[0], lambda x, g: rms_norm(x, g, dims=(-2, -1)), inputs, dtype
    )


def test_rms_norm_returns_one_over_rms_in_fp32():
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    rstd = npu("npu_rms_norm")(x.npu(), torch.ones(8, dtype=torch.bfloat16).npu(), 1e-5)[1]
    torch.testing.assert_close(rstd.cpu(), (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(dtype):
    def formula(x1, x2, gamma):
        total = (x1 + x2).to(dtype).double()  # the device rounds the sum, which it also returns
        return rms_norm(total, gamma), total

    inputs = [torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(8)]
    operation = npu("npu_add_rms_norm")
    compare(lambda *x: operation(*x)[::2], formula, inputs, dtype, differentiable=False)


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_layer_norm(dtype):
    """Its own gradient, of the norm and of the sum, which it gives out as well."""

    def formula(x1, x2, gamma, beta):
        total = x1 + x2
        return F.layer_norm(total, (8,), gamma, beta, 1e-5), total

    inputs = [torch.randn(3, 4, 8), torch.randn(3, 4, 8), torch.randn(8), torch.randn(8)]
    operation = npu("npu_add_layer_norm")
    compare(lambda *x: operation(*x, 1e-5, True)[::3], formula, inputs, dtype)


MASKS = {
    "full": lambda b, n, h, w: (b, n, h, w),
    "shared by heads": lambda b, n, h, w: (b, 1, h, w),
    "shared by all": lambda b, n, h, w: (1, 1, h, w),
    "two dimensions": lambda b, n, h, w: (h, w),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize("shape", [(2, 3, 32, 64), (1, 2, 96, 32)])
def test_scaled_masked_softmax(dtype, kind, shape):
    mask = torch.rand(MASKS[kind](*shape)) > 0.6
    compare(
        lambda x, m: npu("npu_scaled_masked_softmax")(x, m, 0.5, False),
        lambda x, m: (x * 0.5).masked_fill(m, -10000.0).softmax(-1),
        [torch.randn(shape), mask],
        dtype,
    )


def test_scaled_masked_softmax_of_a_masked_row_is_uniform():
    mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).npu()
    result = npu("npu_scaled_masked_softmax")(torch.randn(1, 1, 32, 32).npu(), mask, 1.0, False)
    torch.testing.assert_close(result.cpu(), torch.full((1, 1, 32, 32), 1 / 32))


def test_scaled_masked_softmax_with_its_own_triangle_ignores_the_mask():
    triangle = torch.ones(64, 64, dtype=torch.bool).triu(1)
    compare(
        lambda x, m: npu("npu_scaled_masked_softmax")(x, m, 2.0, True),
        lambda x, m: (x * 2.0).masked_fill(triangle, -10000.0).softmax(-1),
        [torch.randn(1, 2, 64, 64), torch.ones(64, 64, dtype=torch.bool)],
        torch.float32,
    )


def swiglu(x, dim=-1):
    first, second = x.tensor_split(2, dim)
    return first / (1 + (-first).exp()) * second


@few
@given(dtypes, st.lists(sizes, min_size=1, max_size=4), st.data())
def test_swiglu(dtype, shape, data):
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    shape[dim] *= 2
    compare(lambda x: npu("npu_swiglu")(x, dim), lambda x: swiglu(x, dim), [torch.randn(shape)], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu(dtype):
    compare(npu("npu_gelu"), lambda x: 0.5 * x * (1 + (x / 2**0.5).erf()), [torch.randn(3, 17) * 3], dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gelu_in_its_tanh_form(dtype):
    def formula(x):
        return 0.5 * x * (1 + ((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)).tanh())

    compare(lambda x: npu("npu_gelu")(x, approximate="tanh"), formula, [torch.randn(3, 17) * 3], dtype)


def rotation(size, mode):
    """Return the matrix that turns pairs of coordinates by a right angle, for row vectors."""
    matrix = torch.zeros(size, size, dtype=torch.float64)
    first = range(size // 2) if mode == "half" else range(0, size, 2)
    for i in first:
        j = i + (size // 2 if mode == "half" else 1)
        matrix[j, i], matrix[i, j] = -1.0, 1.0
    return matrix


def rotary(x, cos, sin, mode):
    return cos * x + sin * (x @ rotation(x.size(-1), mode))


LAYOUTS = {"SBND": (4, 1, 1), "BSND": (1, 4, 1), "BNSD": (1, 1, 4)}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("mode", ["half", "interleave"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotary_mul(dtype, mode, layout):
    shape = {"SBND": (4, 2, 3, 6), "BSND": (2, 4, 3, 6), "BNSD": (2, 3, 4, 6)}[layout]
    angle = torch.randn(*LAYOUTS[layout], 6)
    compare(
        lambda x, c, s: npu("npu_rotary_mul")(x, c, s, mode),
        lambda x, c, s: rotary(x, c, s, mode),
        [torch.randn(shape), angle.cos(), angle.sin()],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_mul_by_a_matrix(dtype):
    x, angle = torch.randn(2, 4, 3, 6), torch.randn(1, 4, 1, 6)
    matrix = rotation(6, "interleave").float()
    compare(
        lambda x, c, s, m: npu("npu_rotary_mul")(x, c, s, "interleave", m),
        lambda x, c, s, m: rotary(x, c, s, "interleave"),
        [x, angle.cos(), angle.sin(), matrix],
        dtype,
        differentiable=False,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_rotary_pos_emb_works_in_place(dtype):
    query, key = torch.randn(2, 4, 3, 64).to(dtype), torch.randn(2, 4, 1, 64).to(dtype)
    angle = torch.randn(2, 4, 1, 64)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    on_npu = query.npu(), key.npu()
    results = npu("npu_apply_rotary_pos_emb")(*on_npu, cos.npu(), sin.npu())
    for given_, result, host in zip(on_npu, results, (query, key), strict=True):
        expected = rotary(host.double(), cos.double(), sin.double(), "half")
        torch.testing.assert_close(result.cpu().double(), expected, atol=3e-2, rtol=2e-2)
        assert torch.equal(given_.cpu(), result.cpu())


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(dtype):
    inputs = [torch.randn(4, 8), torch.randn(3, 8), torch.randn(3)]
    compare(npu("npu_linear"), lambda x, w, b: x @ w.T + b, inputs, dtype)


@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("source", [torch.float32, torch.bfloat16, torch.float16])
def test_dtype_cast_and_its_gradient(source, target):
    x = (torch.randn(3, 5) * 100).to(source)
    leaf = x.npu().requires_grad_()
    cast = npu("npu_dtype_cast")(leaf, target)
    assert torch.equal(cast.cpu(), x.to(target))
    grad = torch.randn(3, 5).to(target)
    cast.backward(grad.npu())
    assert torch.equal(leaf.grad.cpu(), grad.to(source))


def test_the_gradient_of_a_cast_has_the_dtype_of_its_input():
    grad = torch.randn(3).to(torch.bfloat16).npu()
    for name in ("npu_dtype_cast_backward", "_npu_dtype_cast_backward"):
        assert getattr(torch.ops.npu, name)(grad, torch.float32).dtype == torch.float32


@pytest.mark.parametrize("target", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_dtype_cast_to_integers(target):
    x = torch.tensor([0.0, 1.5, 3.9])
    assert torch.equal(npu("npu_dtype_cast")(x.npu(), target).cpu(), x.to(target))


def test_a_cast_to_a_private_format_keeps_the_values():
    x = torch.randn(2, 3, 16, 16)
    assert torch.equal(npu("npu_format_cast")(x.npu(), 29).cpu(), x)


def test_the_overflow_flag_stays_down():
    x = torch.tensor([3e38]).npu() * 10
    assert x.isinf().all()
    status = npu("npu_get_float_status")(npu("npu_alloc_float_status")(x))
    assert status.dtype == torch.int32
    assert status.tolist() == [0] * 8
    assert npu("npu_clear_float_status")(torch.zeros(8).npu()).tolist() == [0.0] * 8


def test_dropout_keeps_its_share_and_replays_its_mask():
    torch.npu.manual_seed(3)
    leaf = torch.ones(1000, 100).npu().requires_grad_()
    dropped, mask = npu("_npu_dropout")(leaf, 0.3)
    kept = dropped.detach().cpu() != 0
    assert abs(kept.double().mean().item() - 0.7) < 0.01
    torch.testing.assert_close(dropped.detach().cpu()[kept], torch.full((int(kept.sum()),), 1 / 0.7))
    assert mask.dtype == torch.uint8
    assert mask.numel() == -(-100000 // 128) * 16
    dropped.sum().backward()
    assert torch.equal(leaf.grad.cpu(), dropped.detach().cpu())


def test_dropout_follows_the_generator():
    x = torch.ones(200).npu()
    torch.npu.manual_seed(7)
    state = torch.npu.get_rng_state()
    first, second = (npu("_npu_dropout")(x, 0.5)[0].cpu() for _ in range(2))
    torch.npu.set_rng_state(state)
    assert torch.equal(npu("_npu_dropout")(x, 0.5)[0].cpu(), first)
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("left", "right"), [((3,), (3,)), ((2, 3), (3,)), ((3,), (3, 4)), ((5, 2, 3), (3, 4))]
)
def test_matmul_backward_of_torch_npu(left, right):
    compare(torch.matmul, torch.matmul, [torch.randn(left), torch.randn(right)], torch.float32)


def test_other_backwards_of_torch_npu():
    x, counts = torch.randn(3, 4), torch.tensor([2, 0, 1])
    compare(lambda a: a.repeat_interleave(2, 1), lambda a: a.repeat_interleave(2, 1), [x], torch.float32)
    repeat = lambda a, c: a.repeat_interleave(c, 0)  # noqa: E731
    compare(repeat, repeat, [x, counts], torch.float32)
    compare(F.l1_loss, F.l1_loss, [x, torch.randn(3, 4)], torch.float32)
    divergence = [x.log_softmax(-1), torch.randn(3, 4).softmax(-1)]
    compare(
        lambda a, b: F.kl_div(a, b, reduction="sum"),
        lambda a, b: F.kl_div(a, b, reduction="sum"),
        divergence,
        torch.float32,
    )
