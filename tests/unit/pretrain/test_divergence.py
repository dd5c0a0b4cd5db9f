"""What is said of losses that leap, and of numbers that are none."""

from __future__ import annotations

import math
import random

import pytest
import torch

from megatron_npu.ops import verify
from megatron_npu.pretrain.run.divergence import FirstNonFinite, Spikes


def noisy(count: int) -> list[float]:
    rng = random.Random(0)
    return [4 - 0.01 * number + rng.gauss(0, 0.03) for number in range(count)]


def test_a_leap_is_told_once_and_noise_is_not():
    spikes = Spikes()
    losses = noisy(60)
    assert all(spikes.note(number, [loss]) is None for number, loss in enumerate(losses, 1))
    assert (
        spikes.note(63, [losses[-1], 7.5, 7.0])
        == "loss spike at iteration 62: 7.5000, after a median of 3.6986"
    )
    assert spikes.note(64, [math.nan]) is None
    assert spikes.note(65, [3.3]) is None


def test_the_first_losses_are_compared_with_nothing():
    assert Spikes().note(19, [2.0] * 18 + [50.0]) is None


class Breaks(torch.nn.Module):
    def forward(self, value: torch.Tensor) -> tuple[torch.Tensor, None]:
        return value / (value - value), None


@pytest.fixture
def model() -> torch.nn.Module:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = torch.nn.Linear(2, 2), Breaks(), torch.nn.ReLU()

        def forward(self, value: torch.Tensor) -> torch.Tensor:
            return self.third(self.second(self.first(value))[0])

    return Model()


def test_the_first_module_whose_output_is_not_finite_is_named(model, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", "all")
    watched = FirstNonFinite()
    watched.forget()
    assert "the problem is in the backward pass" in watched.words()
    model(torch.ones(1, 2))
    assert watched.words() == "The first non-finite output comes from second (Breaks)."
    watched.forget()
    assert "every output" in watched.words().lower()


def test_it_is_said_once_in_whatever_script_it_is(model, monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", "norm")
    monkeypatch.setattr(verify, "_bad_output", verify._BadOutput())
    verify.follow_modules()
    wrapped = torch.nn.Sequential()
    wrapped.add_module("module", torch.nn.Sequential())
    wrapped.module.add_module("module", model)
    for _ in range(2):
        wrapped(torch.ones(1, 2))
    assert caplog.messages == ["rank 0: the first non-finite output comes from second (Breaks)"]


def test_without_verify_mode_nothing_is_looked_at_and_the_way_there_is_told(model, monkeypatch):
    monkeypatch.delenv("MEGATRON_NPU_VERIFY", raising=False)
    watched = FirstNonFinite()
    watched.forget()
    model(torch.ones(1, 2))
    assert verify.first_bad_output() is None
    assert "MEGATRON_NPU_VERIFY=all to find the first module" in watched.words()
