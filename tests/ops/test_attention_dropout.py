"""Dropout of ops.attention: the probability, the generator, and the same weights again in backward."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron_npu.ops.attention import PackedSequences, attention
from tests.ops.attention_formula import visible
from tests.support.tolerances import assert_near

SIZE = 24  # of a head, and of a sequence: so that the identity can be the values
CASES = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": (5, 0)},
    "mask": {"mask": torch.arange(SIZE)[None] % 3 == 1},
}


def seeded(seed, *tensors, **call):
    torch.manual_seed(seed)
    call = {k: v.to(tensors[0].device) if k == "mask" else v for k, v in call.items()}
    return attention(*tensors, **{"layout": "BNSD", "scale": 0.3, "dropout_p": 0.25, **call})


def random_tensors(device, count, shape=(2, 4, SIZE, SIZE), dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def weights_of(device, seed, dtype=torch.float32, **call):
    """Return the weights after dropout: queries of zero weigh all keys alike, the identity shows them."""
    zero = torch.zeros(2, 4, SIZE, SIZE, device=device, dtype=dtype)
    identity = torch.eye(SIZE, device=device, dtype=dtype).expand(2, 4, SIZE, SIZE)
    return seeded(seed, zero, zero, identity, **call).cpu()


@pytest.mark.parametrize("case", CASES)
def test_the_generator_decides(device, case):
    tensors = random_tensors(device, 3)
    first, again, other = (seeded(seed, *tensors, **CASES[case]) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_every_call_draws_anew(device):
    tensors = random_tensors(device, 3)
    first = seeded(1, *tensors)
    second = attention(*tensors, layout="BNSD", scale=0.3, dropout_p=0.25)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.9])
def test_probability_and_gain(device, probability):
    """A weight is dropped with the given probability, on its own, and what stays makes up for it."""
    kept = torch.cat([weights_of(device, seed, dropout_p=probability).flatten() for seed in range(10)])
    stays = kept != 0
    spread = (probability * (1 - probability) / kept.numel()) ** 0.5
    assert abs(stays.float().mean().item() - (1 - probability)) < 5 * spread
    torch.testing.assert_close(
        kept[stays], torch.full_like(kept[stays], 1 / SIZE / (1 - probability)), rtol=1e-4, atol=0
    )


def test_weights_are_dropped_independently(device):
    """No row, head or batch repeats another's, and neighbours are not correlated."""
    stays = (weights_of(device, 3, dropout_p=0.5) != 0).float()
    rows = stays.flatten(0, 2)
    assert len({tuple(row.tolist()) for row in rows}) == len(rows)
    centered = stays - 0.5
    for shifted in (centered.roll(1, 0), centered.roll(1, 1), centered.roll(1, 2), centered.roll(1, 3)):
        assert abs((centered * shifted).mean().item()) < 5 * 0.25 / stays.numel() ** 0.5


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_use_the_same_weights(device, dtype, case):
    """Against the formula with the weights dropped that ``weights_of`` saw dropped."""
    call = CASES[case]
    stays = weights_of(device, 7, dtype, **call) != 0  # kernels, which draw by themselves, take dtypes
    tensors = [t.requires_grad_() for t in random_tensors(device, 3, dtype=dtype)]
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors]
    actual = seeded(7, *tensors, **call)

    pairs = visible(SIZE, SIZE, call.get("causal", False), call.get("window", (None, None)), 0)
    pairs = pairs & ~call["mask"] if "mask" in call else pairs
    scores = torch.einsum("bnid,bnjd->bnij", *doubles[:2]) * 0.3
    weights = scores.masked_fill(~pairs, -torch.inf).softmax(-1) * stays / 0.75
    expected = weights @ doubles[2]

    assert_near(actual.cpu(), expected, dtype)
    grad = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = torch.autograd.grad(actual, tensors, grad.to(device))
    for index, (left, right) in enumerate(
        zip(ours, torch.autograd.grad(expected, doubles, grad.double()), strict=True)
    ):
        assert_near(left.cpu(), right, dtype, f"gradient {index}")


@pytest.mark.parametrize("case", CASES)
def test_recomputing_drops_the_same_weights(device, case):
    tensors = [t.requires_grad_() for t in random_tensors(device, 3)]
    call = {k: v.to(device) if k == "mask" else v for k, v in CASES[case].items()}

    def run(*leaves):
        return attention(*leaves, layout="BNSD", scale=0.3, dropout_p=0.25, **call).square().sum()

    torch.manual_seed(5)
    plain = torch.autograd.grad(run(*tensors), tensors)
    torch.manual_seed(5)
    recomputed = torch.autograd.grad(checkpoint(run, *tensors, use_reentrant=False), tensors)
    for left, right in zip(plain, recomputed, strict=True):
        assert torch.equal(left, right)


def test_packed_sequences(device):
    """Each sequence draws its own; what is dropped stays within the sequence."""
    packed = PackedSequences((SIZE // 2, SIZE // 2), (SIZE // 2, SIZE // 2))
    zero = torch.zeros(SIZE, 4, SIZE, device=device)
    identity = torch.eye(SIZE, device=device)[:, None].expand(SIZE, 4, SIZE).contiguous()
    weights = seeded(1, zero, zero, identity, layout="TND", packed=packed).cpu().transpose(0, 1)
    first, second = weights[:, : SIZE // 2, : SIZE // 2], weights[:, SIZE // 2 :, SIZE // 2 :]
    assert not torch.equal(first, second)
    assert not weights[:, : SIZE // 2, SIZE // 2 :].any()
    assert not weights[:, SIZE // 2 :, : SIZE // 2].any()
    assert 0.15 < (first == 0).float().mean().item() < 0.35


def test_a_small_probability_drops_something(device):
    """Less than half of 2^-16, the unit on a CPU, is no dropout that is silently none."""
    if device != "cpu":
        pytest.skip("the case: other devices draw by themselves")
    torch.manual_seed(6)
    value = torch.ones(4, 8, 512, 1)
    query = torch.zeros(4, 8, 512, 4)
    output = attention(query, query, value, layout="BNSD", scale=1.0, dropout_p=1e-6)
    dropped = (output < 0.999).sum().item()  # each is 1/512 of a sum; 128 of 8 million weights are expected
    assert 60 < dropped < 240
    assert output.mean().item() == pytest.approx(1, abs=1e-4)
