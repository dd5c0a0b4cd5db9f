"""bias_dropout_add: exact where nothing is dropped, unbiased and reproducible where something is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from megatron_npu import devices
from megatron_npu.ops import tiling
from megatron_npu.ops.dropout import (
    KEEP_LEVELS,
    bias_dropout_add,
    dropout,
    dropout_in_a_graph,
    keep_mask_bits,
)
from tests.ops.against_fp64 import RELAXED, check, rows_of
from tests.support.tolerances import TOLERANCE, assert_near

widths = st.integers(1, 40)


def seed(device, value):
    """Seed the generator that operations on the device draw from, as the RNG tracker does."""
    {"cpu": devices.CpuDevice, "cuda": devices.CudaDevice, "npu": devices.NpuDevice}[device]().manual_seed(
        value
    )


def tensors(shape, device, dtype=torch.float32):
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(s, generator=generator) for s in (shape, shape[-1:], shape)]
    return [t.to(device, dtype).requires_grad_() for t in made]


@RELAXED
@given(shape=rows_of(widths), training=st.booleans(), with_bias=st.booleans())
def test_nothing_dropped(device, dtype, shape, training, with_bias):
    x, bias, residual = (t.detach() for t in tensors(shape, device))
    p = 0.0 if training else 0.3
    if with_bias:
        check(
            lambda x, b, r: bias_dropout_add(x, b, r, p, training),
            lambda x, b, r: x + b + r,
            [x, bias, residual],
            dtype,
        )
    else:
        check(lambda x, r: bias_dropout_add(x, None, r, p, training), torch.add, [x, residual], dtype)


@RELAXED
@given(shape=rows_of(widths), with_bias=st.booleans(), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_every_value_is_kept_and_scaled_or_dropped(device, dtype, shape, with_bias, p):
    """The mask shows in the output; with it, output and gradients are those of the formula."""
    x, bias, residual = tensors(shape, device, dtype)
    bias = bias if with_bias else None
    seed(device, 3)
    output = bias_dropout_add(x, bias, residual, p, True)
    assert output.dtype is dtype
    seed(device, 3)
    ones = torch.ones_like(x, requires_grad=False)
    kept = bias_dropout_add(ones, None, torch.zeros_like(ones), p, True).cpu().double() > 0
    leaves = [x, residual, bias][: 2 + with_bias]
    doubles = [t.detach().cpu().double().requires_grad_() for t in leaves]
    keep = round((1 - p) * 65536) / 65536 if device == "cpu" else 1 - p
    expected = doubles[1] + kept * (doubles[0] + (doubles[2] if with_bias else 0)) / keep
    assert_near(output, expected, dtype)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(2)).to(dtype)
    ours = torch.autograd.grad(output, leaves, grad.to(device))
    for a, b in zip(ours, torch.autograd.grad(expected, doubles, grad.double()), strict=True):
        assert_near(a, b, dtype, "gradient")


@pytest.mark.parametrize("p", [0.1, 0.37, 0.9])
def test_as_many_are_dropped_as_asked_for(device, p):
    ones = torch.ones(2000, 500, device=device)
    seed(device, 5)
    output = bias_dropout_add(ones, None, torch.zeros_like(ones), p, True).cpu().double()
    deviation = (p * (1 - p) / output.numel()) ** 0.5
    assert abs((output == 0).double().mean().item() - p) < 5 * deviation
    assert output.mean().item() == pytest.approx(1.0, abs=5 * deviation / (1 - p))
    kept = (output > 0).double()  # no pattern along rows, along columns or between neighbours
    for mean, size in ((kept.mean(0), 2000), (kept.mean(1), 500)):
        assert (mean - (1 - p)).abs().max() < 6 * (p * (1 - p) / size) ** 0.5
    for lag in (1, 2, 3, 4, 500):
        flat = kept.flatten() - (1 - p)
        assert abs((flat[lag:] * flat[:-lag]).mean().item()) < 5 * p * (1 - p) / flat.numel() ** 0.5


def test_a_state_of_the_generator_repeats_the_mask(device):
    """What Megatron's RNG tracker and recomputation rely on."""
    x, bias, residual = tensors((5, 3, 17), device)
    kind = {"cpu": devices.CpuDevice, "cuda": devices.CudaDevice, "npu": devices.NpuDevice}[device]()
    seed(device, 7)
    state = kind.rng_state()
    first = bias_dropout_add(x, bias, residual, 0.5, True)
    second = bias_dropout_add(x, bias, residual, 0.5, True)
    after = kind.rng_state()
    kind.set_rng_state(state)
    assert torch.equal(bias_dropout_add(x, bias, residual, 0.5, True), first)
    assert not torch.equal(first, second)
    bias_dropout_add(x, bias, residual, 0.5, True)
    assert torch.equal(kind.rng_state(), after)


@pytest.mark.parametrize("width", [1, 7, 64])
def test_the_mask_does_not_depend_on_the_pieces(device, width, monkeypatch):
    x, bias, residual = tensors((50, 3, width), device)
    results = []
    for size in (1 << 18, 400, 4):
        monkeypatch.setattr(tiling, "_TILE_BYTES", size)
        seed(device, 9)
        results.append(bias_dropout_add(x, bias, residual, 0.5, True))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_the_mask_takes_a_byte_at_most(device, dtype):
    x, bias, residual = (t * 1 for t in tensors((64, 2, 32), device, dtype))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (kept.__setitem__(t.data_ptr(), t.nbytes), t)[1], lambda t: t
    ):
        bias_dropout_add(x, bias, residual, 0.1, True)
    assert sum(kept.values()) <= x.numel() + bias.nbytes


def test_the_gradient_of_the_residual_is_not_copied(device):
    x, bias, residual = tensors((4, 2, 8), device)
    output = bias_dropout_add(x, bias, residual, 0.5, True)
    grad = torch.ones_like(output)
    assert torch.autograd.grad(output, residual, grad)[0].data_ptr() == grad.data_ptr()


def test_inference_works_in_place(device):
    x, bias, residual = (t.detach() for t in tensors((4, 2, 8), device))
    expected = x + bias + residual
    output = bias_dropout_add(x, bias, residual, 0.5, False)
    assert output.data_ptr() == x.data_ptr()
    torch.testing.assert_close(output, expected)


def test_training_leaves_the_input_alone(device):
    """With recomputation the first forward runs without gradients, on tensors that others may keep."""
    x, bias, residual = (t.detach() for t in tensors((4, 2, 8), device))
    before = x.clone()
    for p in (0.0, 0.5):
        bias_dropout_add(x, bias, residual, p, True)
        assert torch.equal(x, before)


def test_another_dtype_of_the_residual(device):
    x, bias, _ = tensors((4, 2, 8), device, torch.bfloat16)
    residual = torch.randn(4, 2, 8, device=device, requires_grad=True)
    output = bias_dropout_add(x, bias, residual, 0.5, True)
    output.sum().backward()
    assert output.dtype is torch.bfloat16
    assert residual.grad.dtype is torch.float32


@pytest.mark.parametrize("p", [1.0, 1e-7])
def test_probabilities_at_the_ends(device, p):
    x, bias, residual = tensors((4, 2, 8), device)
    output = bias_dropout_add(x, bias, residual, p, True)
    expected = residual if p == 1.0 else residual + x + bias
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE[torch.float32])


def test_refuses_what_is_no_probability(device):
    x, bias, residual = tensors((4, 2, 8), device)
    with pytest.raises(ValueError, match=r"p must be in \[0, 1\], but got 1\.5"):
        bias_dropout_add(x, bias, residual, 1.5, True)


def test_mask_bits_at_the_ends_of_the_range():
    """Everything is kept at the highest level; one of 65,536 values at the lowest, on average."""
    draws = torch.empty(1 << 16, dtype=torch.int64)
    torch.manual_seed(1)
    full = torch.empty(1 << 18, dtype=torch.float32)
    assert keep_mask_bits(draws, full.shape, KEEP_LEVELS, full).all()
    assert 0 < int(keep_mask_bits(draws, (512, 511), 1).sum()) < 20


@RELAXED
@given(shape=rows_of(widths), p=st.sampled_from([0.1, 0.5, 0.9]))
def test_dropout_alone_keeps_and_scales_or_drops(device, dtype, shape, p):
    x, _, _ = tensors(shape, device, dtype)
    seed(device, 3)
    output = dropout(x, p, True)
    seed(device, 3)
    # of the dtype: a GPU draws for as many values at once as a vector of its width holds
    kept = dropout(torch.ones(shape, device=device, dtype=dtype), p, True).cpu().double()
    assert set(kept.unique().tolist()) <= {0.0, kept.max().item()}
    assert_near(output, x.detach().cpu().double() * kept, dtype)
    (grad,) = torch.autograd.grad(output, x, torch.full_like(output, 2.0))
    assert_near(grad, 2 * kept, dtype)
    assert dropout(x, p, False) is x
    assert dropout(x, 0.0, True) is x


def test_dropout_alone_drops_as_many_as_it_says(device):
    x = torch.ones(200, 1000, device=device)
    seed(device, 5)
    output = dropout(x, 0.1, True)
    assert output.mean().item() == pytest.approx(1.0, abs=5e-3)
    assert (output == 0).float().mean().item() == pytest.approx(0.1, abs=5e-3)


class TestInAGraph:
    """Dropout as torch.compile sees it; partitioned as for inductor, but run as it is, without a compiler."""

    @staticmethod
    def twice(x, p, drop):
        return drop(x, p, True) + 2 * drop(x, p, True)

    @pytest.mark.parametrize("shape", [(5, 3, 7), (300, 257)], ids=str)  # one tile of draws, and several
    def test_drops_what_it_drops_outside(self, device, dtype, shape):
        """Both masks of one tensor, too, which the compiler must not take for one."""
        if device != "cpu":
            pytest.skip("the case: graphs of other devices have dropout of torch's own")
        x = tensors(shape, "cpu", dtype)[0]
        compiled = torch.compile(self.twice, backend="aot_eager_decomp_partition")
        devices.CpuDevice().manual_seed(3)
        output = compiled(x, 0.5, dropout_in_a_graph)
        devices.CpuDevice().manual_seed(3)
        masks = [dropout(torch.ones(shape), 0.5, True).double() for _ in range(2)]
        assert not torch.equal(*masks)
        kept = masks[0] + 2 * masks[1]
        assert_near(output, x.detach().double() * kept, dtype)
        (grad,) = torch.autograd.grad(output, x, torch.ones_like(output))
        assert_near(grad, kept, dtype)

    def test_what_is_computed_again_drops_the_same(self, device):
        """Within a graph the compiler computes activations again, and draws again; not so outside."""
        if device != "cpu":
            pytest.skip("the case: graphs of other devices have dropout of torch's own")

        def again(x, drop):
            return checkpoint(lambda x: drop(x.sin(), 0.5, True).cos(), x, use_reentrant=False).sin()

        x = tensors((40, 33), "cpu")[0]
        gradients = []
        for function, drop in (
            (torch.compile(again, backend="aot_eager_decomp_partition"), dropout_in_a_graph),
            (again, dropout),
        ):
            devices.CpuDevice().manual_seed(3)
            gradients += torch.autograd.grad(function(x, drop).sum(), x)
        torch.testing.assert_close(*gradients)

    def test_the_mask_takes_a_byte(self, dtype):
        x = tensors((64, 2, 32), "cpu", dtype)[0] * 1
        kept = {}
        compiled = torch.compile(dropout_in_a_graph, backend="aot_eager_decomp_partition")
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (kept.__setitem__(t.data_ptr(), t.nbytes), t)[1], lambda t: t
        ):
            compiled(x, 0.1, True)
        assert sum(kept.values()) == x.numel()

    def test_leaves_a_tensor_alone_where_nothing_is_dropped(self):
        x = torch.ones(3)
        assert dropout_in_a_graph(x, 0.5, False) is x
        assert dropout_in_a_graph(x, 0.0, True) is x
        assert not dropout_in_a_graph(x, 1.0, True).any()
