"""What is cached: until its source is written to, and never what only inference mode could use."""

from __future__ import annotations

import copy
import types

import pytest
import torch
from torch import Tensor

from megatron_npu.ops import rotary, softmax
from megatron_npu.ops.attention import attention
from megatron_npu.ops.attention.packed_mask import sequence_lengths
from megatron_npu.ops.caching import cache_on_object, cache_on_tensor, lru_cache_tensors


def counted_sum(calls: list[int], *tensors: Tensor | None) -> int:
    calls.append(1)
    return sum(int(tensor.sum()) for tensor in tensors if tensor is not None)


def test_a_value_is_computed_anew_after_a_write_for_another_key_and_for_a_copy() -> None:
    source, calls = torch.ones(3), []

    def value(tensor: Tensor = source, key: object = ()) -> int:
        return cache_on_tensor(tensor, "sum", lambda: counted_sum(calls, tensor), key)

    assert [value(), value()] == [3, 3]
    assert len(calls) == 1
    with torch.inference_mode():  # a write in that mode to a tensor from outside counts as well
        source.add_(1)
    assert [value(), value(key=1)] == [6, 6]
    assert len(calls) == 3
    other = copy.deepcopy(source)
    while other._version < source._version:
        other.add_(1)
    assert value(other, key=1) == int(other.sum())


def test_what_is_cached_on_an_object_follows_all_its_tensors() -> None:
    ends, padded, calls = torch.ones(3), torch.ones(2), []
    owner = types.SimpleNamespace(ends=ends, padded=None)

    def value(holder: types.SimpleNamespace) -> int:
        sources = (holder.ends, holder.padded)
        return cache_on_object(holder, "sum", sources, lambda: counted_sum(calls, *sources))

    assert [value(owner), value(owner)] == [3, 3]
    assert len(calls) == 1
    ends.add_(1)
    assert value(owner) == 6
    owner.padded = padded
    assert value(owner) == 8
    other = copy.copy(owner)
    other.ends = ends + 1  # of the same version as the first
    other.ends.add_(0)
    assert value(other) == 11
    assert value(owner) == 8


@pytest.mark.parametrize("made_in_inference", [False, True])
def test_nothing_kept_is_of_inference_mode(made_in_inference: bool) -> None:
    @lru_cache_tensors(maxsize=2)
    def table(size: int) -> Tensor:
        return torch.ones(size)

    with torch.inference_mode(made_in_inference):
        source = torch.zeros(3)
    with torch.inference_mode():
        found = cache_on_tensor(source, "plus", lambda: source + 1)
        on = cache_on_object(types.SimpleNamespace(), "plus", (source,), lambda: source + 1)
        once = table(3)
    assert table(3) is once
    assert not once.is_inference()
    assert not once.requires_grad
    assert found.is_inference() == on.is_inference() == made_in_inference
    found = cache_on_tensor(source, "plus", lambda: source + 1)
    assert not found.is_inference()
    assert not found.requires_grad


def test_a_write_in_inference_mode_is_seen() -> None:
    """Such a tensor counts no writes, so that what is known of it holds for one call only."""
    with torch.inference_mode():
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).triu(1)
        assert sequence_lengths(mask) == (4,)
        mask[..., 2:, :2] = True
        assert sequence_lengths(mask) == (2, 2)


# Sizes that no other test has: what is kept per arguments is made here, in inference mode.
MASKS = ("none", "triangle", "documents", "any")


def mask_of(kind: str, size: int, device: str) -> Tensor | None:
    mask = torch.ones(1, 1, size, size, dtype=torch.bool).triu(1)
    if kind == "documents":
        mask[..., 5:, :5] = True
    if kind == "any":
        mask[..., 7, 2] = True
    return None if kind == "none" else mask.to(device)


def attend(kind: str, window: tuple[int | None, int | None]):
    def run(x: Tensor, mask: Tensor | None) -> Tensor:
        seen = {"causal": True} if mask is None else {"mask": mask}
        return attention(x, x, x, layout="SBND", scale=0.5, window=window, **seen)

    return kind, (37, 1, 2, 8), run


def normalise(kind: str, causal: bool):
    return kind, (1, 1, 160, 160), lambda x, mask: softmax.scale_mask_softmax(x, mask, 0.5, causal)


def turn(interleaved: bool):
    def run(x: Tensor, mask: Tensor | None) -> Tensor:
        return rotary.rotary(x, mask[0, 0, :, None, None, :8].float() * 3, interleaved)

    return "any", (37, 1, 2, 8), run


CASES = {
    **{f"attention, {kind}": attend(kind, (None, None)) for kind in MASKS},
    **{f"attention in a window, {kind}": attend(kind, (3, 0)) for kind in MASKS},
    **{f"softmax, {kind}": normalise(kind, True) for kind in MASKS},
    "softmax of one mask": normalise("any", False),
    "rotary": turn(False),
    "rotary, interleaved": turn(True),
}


@pytest.mark.parametrize("case", CASES)
def test_generate_train_generate(device: str, case: str) -> None:
    """Both ways round, with masks of either mode: no result may depend on what was kept in the other."""
    kind, shape, run = CASES[case]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device)

    def trained(mask: Tensor | None) -> tuple[Tensor, Tensor]:
        leaf = values.clone().requires_grad_()
        output = run(leaf, mask)
        output.square().sum().backward()
        return output.detach(), leaf.grad

    size = shape[2] if len(set(shape[2:])) == 1 else shape[0]
    mask = mask_of(kind, size, device)
    with torch.inference_mode():
        generated = [run(values.clone(), m) for m in (mask_of(kind, size, device), mask)]
    output, gradient = trained(mask)
    with torch.inference_mode():
        generated += [run(values.clone(), m) for m in (mask_of(kind, size, device), mask)]
    for other in generated:
        torch.testing.assert_close(other, output)
    assert gradient.isfinite().all()
    assert gradient.count_nonzero()
