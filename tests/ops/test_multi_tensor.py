"""The amp_C surface: norms, scaling with its check, on lists of tensors."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops.optimizers.multi_tensor import (
    CopiesTogether,
    MultiTensorApply,
    multi_tensor_l2norm,
    multi_tensor_scale,
    unscale,
)

apply = MultiTensorApply(2048 * 32)
SIZES = (1, 1000, 3, 70_001)


def tensors(device, dtype=torch.float32):
    torch.manual_seed(0)
    return [torch.randn(n, device=device).to(dtype) for n in SIZES]


def flag(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


def test_l2norm(device, dtype):
    values = tensors(device, dtype)
    norm, each = apply(multi_tensor_l2norm, flag(device), [values], True)
    assert norm.shape == (1,)
    assert norm.dtype is each.dtype is torch.float32
    right = [v.double().norm().item() for v in values]
    assert each.tolist() == pytest.approx(right, rel=2e-6)
    assert norm.item() == pytest.approx(sum(r * r for r in right) ** 0.5, rel=2e-6)
    assert apply(multi_tensor_l2norm, flag(device), [values], False)[1] is None


def test_l2norm_of_a_large_tensor_is_exact(device):
    """torch's CPU kernel alone is 1e-3 off here, enough to make clipping depend on the layout."""
    if device == "npu":
        pytest.skip("the case: the simulator has the CPU's kernel; what hardware does is not known")
    value = torch.randn(20_000_000, device=device)
    right = value.double().norm().item()
    assert multi_tensor_l2norm(0, None, [[value]])[0].item() == pytest.approx(right, rel=1e-6)


def test_l2norm_of_nothing(device):
    norm, each = multi_tensor_l2norm(0, flag(device), [[]], True)
    assert norm.tolist() == [0.0]
    assert each.tolist() == []
    assert norm.device.type == device


def test_l2norm_of_non_contiguous_tensors(device):
    value = torch.randn(400, 300, device=device).t()
    assert multi_tensor_l2norm(0, None, [[value]])[0].item() == pytest.approx(
        value.cpu().double().norm().item(), rel=1e-6
    )


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("checked", [True, False])
def test_scale(device, dtype, in_place, checked):
    sources = tensors(device, dtype)
    expected, kept = [s * 0.5 for s in sources], [s.clone() for s in sources]
    targets = sources if in_place else [torch.empty_like(s) for s in sources]
    overflow = flag(device) if checked else None
    apply(multi_tensor_scale, overflow, [sources, targets], 0.5)
    assert all(map(torch.equal, targets, expected))
    assert in_place or all(map(torch.equal, sources, kept))
    assert overflow is None or overflow.item() == 0


def test_scale_from_16_to_32_bits_does_not_round(device):
    sources = tensors(device, torch.bfloat16)
    targets = [torch.empty_like(s, dtype=torch.float32) for s in sources]
    multi_tensor_scale(0, flag(device), [sources, targets], 1 / 3)
    for source, target in zip(sources, targets, strict=True):
        torch.testing.assert_close(target, source.float() * (1 / 3), rtol=1e-6, atol=0)


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("scale", [1e-2, torch.tensor(1e-2)])
def test_scale_from_32_to_16_bits_rounds_products_not_sources(device, checked, scale):
    scale = scale.to(device) if torch.is_tensor(scale) else scale
    sources = [
        torch.tensor([1e5, 2.0, 1e-8], device=device),
        torch.tensor([1.00390625 + 2**-9], device=device),
    ]
    targets = [torch.zeros(3, dtype=torch.float16, device=device), torch.zeros(1, device=device).bfloat16()]
    kept, overflow = [s.clone() for s in sources], flag(device)
    multi_tensor_scale(0, overflow if checked else None, [sources, targets], scale)
    for source, before, target in zip(sources, kept, targets, strict=True):
        assert torch.equal(source, before)
        assert torch.equal(target, (before * 1e-2).to(target.dtype))
    assert overflow.item() == 0
    sources[0][0] = float("inf")
    multi_tensor_scale(0, overflow if checked else None, [sources, targets], scale)
    assert overflow.item() == checked


def test_scale_between_kinds_of_16_bits(device):
    """Whose numbers the other has not: 1e5 is inf in fp16 and 0.1234 is rounded in bf16."""
    sources = [
        torch.tensor([1e5], device=device).bfloat16(),
        torch.tensor([0.1234], dtype=torch.float16, device=device),
    ]
    targets = [torch.empty_like(s) for s in reversed(sources)]
    overflow = flag(device)
    multi_tensor_scale(0, overflow, [sources, targets], 0.3)
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(target, (source.float() * 0.3).to(target.dtype))
    assert overflow.item() == 0


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
def test_scale_reports_what_is_not_finite(device, dtype, bad):
    sources = tensors(device, dtype)
    sources[1][500] = bad
    overflow = flag(device)
    multi_tensor_scale(0, overflow, [sources, [torch.empty_like(s) for s in sources]], 0.5)
    assert overflow.item() == 1
    multi_tensor_scale(0, overflow, [sources[:1], sources[:1]], 0.5)
    assert overflow.item() == 1  # once set, it stays


def test_scale_takes_a_tensor(device):
    values = tensors(device)
    expected = [v * 0.25 for v in values]
    multi_tensor_scale(0, flag(device), [values, values], torch.tensor(0.25, device=device))
    assert all(map(torch.equal, values, expected))


def test_unscale(device, dtype):
    values = tensors(device, dtype)
    expected = [v * 0.125 for v in values]
    found = torch.zeros((), device=device)
    unscale(values, found, torch.tensor([0.125], device=device))
    assert all(map(torch.equal, values, expected))
    assert found.item() == 0
    values[3][-1] = float("nan")
    unscale(values, found, 1.0)
    assert found.item() == 1


def test_copies_wait_for_the_end_of_a_loop(device):
    half = [torch.full((n,), float(n), dtype=torch.float16, device=device) for n in (1, 3)]
    row, table = torch.ones(3, device=device), torch.zeros(2, 3, device=device)
    target, kept = torch.zeros(3, dtype=torch.bfloat16, device=device), row.float()
    with CopiesTogether():
        wide = [t.float() for t in half]
        assert row.float() is row  # as torch has it
        assert target.copy_(half[1]) is target
        table.copy_(row)  # is broadcast: at once
        assert table.sum() == 6
        assert not target.any()
    assert all(
        w.dtype is torch.float32 and torch.equal(w, t.float()) for w, t in zip(wide, half, strict=True)
    )
    assert target.tolist() == [3.0] * 3
    assert kept is row


def test_copies_of_a_loop_that_fails_are_not_done(device):
    target = torch.zeros(2, device=device)

    def loop():
        with CopiesTogether():
            target.copy_(torch.ones(2, device=device))
            raise ArithmeticError

    with pytest.raises(ArithmeticError):
        loop()
    assert not target.any()
