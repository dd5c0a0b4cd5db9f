"""Optimizer state in 16 bits: remainders to the bit, moments against fp64, what is saved and loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.ops.optimizers import narrow_states, remainders
from megatron_npu.ops.optimizers.adam import FusedAdam
from tests.ops.test_adam import BETAS, DECAY, LR, SHAPES, give_gradients, parameters, written_out

REMAINDERS = {"master_weights": True, "use_decoupled_grad": True, "store_param_remainders": True}
# Of a low half: nothing, the smallest and largest, a tie and its neighbours.
LOW = st.one_of(st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]), st.integers(0, 0xFFFF))
# Of a high half: zeros, subnormals, the largest finite, infinities, NaNs.
HIGH = st.one_of(st.sampled_from([0, 1, 0x7F, 0x80, 0x7F7F, 0x7F80, 0x7FC0, 0xFFFF]), st.integers(0, 0xFFFF))


@given(st.lists(st.tuples(HIGH, LOW), min_size=1, max_size=64))
def test_every_fp32_number_comes_back(halves):
    """All 2^32 patterns were once compared in this way: none differed."""
    bits = torch.tensor([(high << 16) + low for high, low in halves]).to(torch.int32)
    main = bits.view(torch.float32)
    weight, remainder, flag = remainders.split(main)
    assert torch.equal(weight.view(torch.int16), main.bfloat16().view(torch.int16))
    back = remainders.join(weight, remainder, flag)
    assert (back.isnan() == main.isnan()).all()
    assert torch.equal(back.view(torch.int32)[~main.isnan()], bits[~main.isnan()])


@settings(max_examples=15)
@given(st.lists(st.tuples(HIGH, HIGH), min_size=1, max_size=64), st.integers(1, 4))
def test_a_step_from_any_weights_is_the_plain_optimizers(halves, steps):
    """Any pattern of bf16 for weight and gradient; the plain optimizer has fp32 main weights."""
    weight, grad = (
        torch.tensor(column).to(torch.int16).view(torch.bfloat16) for column in zip(*halves, strict=True)
    )
    plain, ours = torch.nn.Parameter(weight.float()), torch.nn.Parameter(weight.clone())
    by_plain = FusedAdam([plain], lr=LR, weight_decay=DECAY)
    by_ours = FusedAdam([ours], lr=LR, weight_decay=DECAY, **REMAINDERS)
    for _ in range(steps):
        plain.grad, ours.decoupled_grad = grad.float(), grad.float()
        by_plain.step()
        by_ours.step()
    right, found = plain.detach(), by_ours.get_unscaled_state(ours, "master_param")
    whole = ~right.isnan()
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found[whole].view(torch.int32), right[whole].view(torch.int32))
    assert torch.equal(ours.detach()[whole], right.bfloat16()[whole])


def train(weights, optimizer, first, last):
    for step in range(first, last):
        give_gradients(weights, step, torch.float32 if weights[0].dtype is torch.float32 else None)
        if optimizer.use_decoupled_grad:
            for weight in weights:
                weight.decoupled_grad, weight.grad = weight.grad.float(), None
        optimizer.step()


def test_remainders_cut_resumed_and_converted(device, monkeypatch):
    """Blocks smaller than a weight; then saved, and loaded with and without remainders and 16-bit moments."""
    monkeypatch.setattr(narrow_states, "BLOCK", 64)
    options = {"lr": LR, "betas": BETAS, "weight_decay": DECAY}
    plain = [torch.nn.Parameter(w.detach().float()) for w in parameters(device, torch.bfloat16)]
    by_plain = FusedAdam(plain, **options)
    ours = parameters(device, torch.bfloat16)
    by_ours = FusedAdam(ours, **options, **REMAINDERS)
    for step in range(6):
        give_gradients(plain, step)
        for a, b in zip(plain, ours, strict=True):
            b.decoupled_grad = a.grad.clone()
        by_plain.step()
        by_ours.step()
        if step == 2:
            saved, weights = copy.deepcopy(by_ours.state_dict()), [w.detach().clone() for w in ours]
            ours = [torch.nn.Parameter(torch.zeros_like(w)) for w in weights]
            for weight, value in zip(ours, weights, strict=True):
                weight.data.copy_(value)
            by_ours = FusedAdam(ours, **options, **REMAINDERS)
            by_ours.load_state_dict(saved)
    saved = by_ours.state_dict()
    others = [torch.nn.Parameter(w.detach().clone()) for w in ours]
    narrow = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.bfloat16}
    converted = FusedAdam(others, **options, **(REMAINDERS | {"store_param_remainders": False}), **narrow)
    converted.load_state_dict(copy.deepcopy(saved))
    for right, weight, other in zip(plain, ours, others, strict=True):
        state = by_ours.state[weight]
        assert state["master_param"].dtype is torch.int16
        assert torch.equal(by_ours.get_unscaled_state(weight, "master_param"), right.detach())
        assert torch.equal(weight.detach(), right.detach().bfloat16())
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(by_ours.get_unscaled_state(weight, name), by_plain.state[right][name])
            loaded = converted.get_unscaled_state(other, name)
            largest = by_plain.state[right][name].abs().max().item()
            torch.testing.assert_close(loaded, by_plain.state[right][name], rtol=4e-3, atol=1e-3 * largest)
        assert torch.equal(converted.state[other]["master_param"], right.detach())


@pytest.mark.parametrize("first", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("main", [torch.float32, torch.float16])
def test_narrow_moments_follow_the_papers(device, first, main):
    """Also to the bit over a state dict, whose scales must come along."""
    options = {
        "lr": LR, "betas": BETAS, "weight_decay": DECAY, "master_weights": True, "use_decoupled_grad": True,
        "exp_avg_dtype": first, "exp_avg_sq_dtype": torch.bfloat16, "master_weight_dtype": main,
    }  # fmt: skip
    weights = parameters(device, torch.bfloat16)
    starts = [w.detach().clone() for w in weights]
    optimizer = FusedAdam(weights, **options)
    train(weights, optimizer, 0, 4)
    others = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    resumed = FusedAdam(others, **options)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(weights, optimizer, 4, 8)
    train(others, resumed, 4, 8)
    gradients = []
    for step in range(8):
        twins = parameters(device, torch.bfloat16)
        give_gradients(twins, step)
        gradients.append([t.grad for t in twins])
    for a, b, right in zip(weights, others, written_out(starts, gradients, True, True), strict=True):
        assert torch.equal(a, b)
        kept = optimizer.get_unscaled_state(a, "master_param").double().cpu()
        # eight roundings: of the moments to 8 bits, each of which moves a step of about LR, and of a main
        # weight in fp16 to 11
        rounding = 8 * 2**-11 if main is torch.float16 else 0
        torch.testing.assert_close(kept, right, rtol=rounding, atol=8 * LR * 2**-7)


def test_fp32_parameters_have_themselves_as_main_weights(device):
    """Megatron's checkpoints look for a main weight of every parameter."""
    weights = parameters(device)
    plain = [torch.nn.Parameter(w.detach().clone()) for w in weights]
    optimizer = FusedAdam(weights, lr=LR, **REMAINDERS)
    train(weights, optimizer, 0, 1)
    train(plain, FusedAdam(plain, lr=LR), 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    train(weights, optimizer, 1, 2)
    optimizer.load_state_dict(saved)
    assert all(torch.equal(a, b) for a, b in zip(weights, plain, strict=True))
    for weight in weights:
        assert optimizer.state[weight]["master_param"].data_ptr() == weight.data_ptr()
        optimizer.set_scaled_state(weight, "master_param", torch.ones_like(weight))
        assert (weight == 1).all()


def test_bytes_of_a_parameter():
    """2 for the remainder in place of 4, 2 for a bf16 moment."""
    for options, size in (
        ({}, 10),
        ({"store_param_remainders": False}, 12),
        ({"exp_avg_dtype": torch.bfloat16}, 8),
    ):
        weights = parameters("cpu", torch.bfloat16)
        optimizer = FusedAdam(weights, **(REMAINDERS | options))
        train(weights, optimizer, 0, 1)
        states = [t for state in optimizer.state.values() for t in state.values()]
        count = sum(torch.Size(shape).numel() for shape in SHAPES)
        assert sum(t.numel() * t.element_size() for t in states) == size * count


def test_dtypes_that_it_does_not_keep_are_refused():
    weights = [torch.nn.Parameter(torch.ones(1))]
    with pytest.raises(ValueError, match=r"FusedAdam stores exp_avg in .*, but torch.uint8"):
        FusedAdam(weights, exp_avg_dtype=torch.uint8)


def test_decoupled_gradients_are_forgotten(device):
    weights = parameters(device)
    for weight in weights:
        weight.decoupled_grad = torch.ones_like(weight)
    optimizer = FusedAdam(weights, use_decoupled_grad=True)
    optimizer.zero_grad(set_to_none=False)
    assert all((weight.decoupled_grad == 0).all() for weight in weights)
    optimizer.zero_grad()
    assert all(weight.decoupled_grad is None for weight in weights)
