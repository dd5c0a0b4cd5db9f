"""Random numbers on the simulated NPU: torch_npu's generators decide, the host's are left alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.simulated

DRAWS: dict[str, Callable[[], torch.Tensor]] = {
    "rand": lambda: torch.rand(64, device="npu"),
    "randn": lambda: torch.randn(64, device="npu"),
    "randint": lambda: torch.randint(0, 1000, (64,), device="npu"),
    "randperm": lambda: torch.randperm(64, device="npu"),
    "normal_": lambda: torch.empty(64, device="npu").normal_(2.0, 3.0),
    "uniform_": lambda: torch.empty(64, device="npu").uniform_(-1, 1),
    "bernoulli": lambda: torch.bernoulli(torch.full((64,), 0.5, device="npu")),
    "multinomial": lambda: torch.multinomial(torch.ones(64, device="npu"), 16),
    "exponential_": lambda: torch.empty(64, device="npu").exponential_(),
    "dropout": lambda: F.dropout(torch.ones(64, device="npu")),
    "rand_like": lambda: torch.rand_like(torch.empty(64, device="npu", dtype=torch.bfloat16)),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
class TestEveryDraw:
    def test_a_seed_repeats_it_and_the_next_one_differs(self, draw):
        torch.npu.manual_seed(5)
        first, second = draw(), draw()
        torch.npu.manual_seed(5)
        assert torch.equal(draw(), first)
        assert not torch.equal(second, first)

    def test_a_state_repeats_it(self, draw):
        draw()
        state = torch.npu.get_rng_state()
        first = draw()
        torch.npu.set_rng_state(state)
        assert torch.equal(draw(), first)

    def test_the_hosts_sequence_is_left_alone(self, draw):
        torch.manual_seed(3)
        expected = torch.rand(4)
        torch.manual_seed(3)
        draw()
        assert torch.equal(torch.rand(4), expected)

    def test_forking_leaves_the_sequence_alone(self, draw):
        torch.npu.manual_seed(11)
        expected = draw()
        torch.npu.manual_seed(11)
        with torch.random.fork_rng(devices=[0], device_type="npu"):
            torch.npu.manual_seed(12)
            draw()
        assert torch.equal(draw(), expected)


def test_devices_have_generators_of_their_own():
    torch.npu.manual_seed_all(1)
    expected = torch.rand(8, device="npu:1")
    torch.npu.manual_seed_all(1)
    torch.rand(8, device="npu:0")
    assert torch.equal(torch.rand(8, device="npu:1"), expected)


def test_a_generator_of_ones_own():
    generator = torch.Generator(device="npu").manual_seed(7)
    state = generator.get_state()
    first = torch.randn(16, device="npu", generator=generator)
    assert not torch.equal(torch.randn(16, device="npu", generator=generator), first)
    generator.set_state(state)
    assert torch.equal(torch.randn(16, device="npu", generator=generator), first)
    assert generator.initial_seed() == 7


def test_a_host_generator_is_refused():
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(4, device="npu", generator=torch.Generator())


def test_distributions():
    torch.npu.manual_seed(0)
    normal = torch.randn(20_000, device="npu").cpu()
    assert abs(normal.mean().item()) < 0.03
    assert abs(normal.std().item() - 1) < 0.03
    kept = (F.dropout(torch.ones(20_000, device="npu"), 0.3) != 0).float().mean().item()
    assert abs(kept - 0.7) < 0.02
    assert sorted(torch.randperm(100, device="npu").tolist()) == list(range(100))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_dropout(reentrant):
    dropout = torch.nn.Dropout(0.5)
    x = torch.ones(256, device="npu", requires_grad=True)
    y = checkpoint(dropout, x, use_reentrant=reentrant)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert 0 < (y == 0).sum() < 256
