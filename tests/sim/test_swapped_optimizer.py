"""Adam with its moments in the host's memory: the bits of the run without, 8 bytes a parameter less."""

from __future__ import annotations

import pytest
import torch

from tests.support import tiny

pytestmark = pytest.mark.simulated
FLAGS = "--bf16 --attention-dropout 0 --hidden-dropout 0 --train-iters 4 --eval-iters 0 --no-plot".split()
MOMENTS = ("exp_avg", "exp_avg_sq")


@pytest.fixture
def swapping(monkeypatch):
    from megatron_npu.ops.optimizers.adam import FusedAdam

    monkeypatch.setattr(FusedAdam, "swap_moments", True)


def stepped(saved=None, steps=3, **options):
    """Return the weights and the optimizer after some steps from given seeds."""
    from megatron_npu.ops.optimizers.adam import FusedAdam

    torch.manual_seed(1)
    weights = [torch.nn.Parameter(torch.randn(shape).npu()) for shape in ((300, 257), (5,), (0, 4))]
    optimizer = FusedAdam(weights, lr=0.1, weight_decay=0.1, **options)
    if saved is not None:
        optimizer.load_state_dict(saved)
    for _ in range(steps):
        for weight in weights:
            weight.grad = torch.randn(weight.shape).npu()
        optimizer.step()
    return weights, optimizer


def bits(optimizer):
    states = optimizer.state_dict()["state"]
    return [states[key][name].cpu() for key in sorted(states) for name in MOMENTS]


@pytest.mark.parametrize("options", [{}, {"bias_correction": False}, {"adam_w_mode": False}])
def test_equal_to_the_bit_and_not_on_the_device(options, monkeypatch):
    from megatron_npu.ops.optimizers import swapped_memory
    from megatron_npu.ops.optimizers.adam import FusedAdam
    from megatron_npu.sim import counting

    with counting() as before:
        plain = stepped(**options)
    monkeypatch.setattr(FusedAdam, "swap_moments", True)
    with counting() as after:
        swapped = stepped(**options)
    for a, b in zip(plain[0], swapped[0], strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(bits(plain[1]), bits(swapped[1]), strict=True))
    states = [state[name] for w, state in swapped[1].state.items() for name in MOMENTS if w.numel()]
    assert all(swapped_memory.is_swapped(tensor) for tensor in states)
    numbers = 300 * 257 + 5
    assert before.peak - after.peak >= 8 * 300 * 257
    assert after.registered >= 8 * numbers > before.registered == 0
    # written once when they are made, then read and written in each of three steps
    assert after.swapped.bytes == 8 * numbers * (1 + 2 * 3)


@pytest.mark.parametrize("from_swapped", [True, False])
@pytest.mark.parametrize("to_swapped", [True, False])
def test_a_state_goes_from_one_to_the_other(from_swapped, to_swapped, monkeypatch, tmp_path):
    """As it is, and through a file, of which torch makes tensors of the host."""
    from megatron_npu.ops.optimizers import swapped_memory
    from megatron_npu.ops.optimizers.adam import FusedAdam

    monkeypatch.setattr(FusedAdam, "swap_moments", from_swapped)
    _, first = stepped()
    monkeypatch.setattr(FusedAdam, "swap_moments", to_swapped)
    _, second = stepped(first.state_dict(), steps=0)
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(second), strict=True))
    torch.save(first.state_dict(), tmp_path / "state")
    _, third = stepped(torch.load(tmp_path / "state", map_location="cpu"), steps=0)
    assert all(torch.equal(a, b) for a, b in zip(bits(first), bits(third), strict=True))
    _, going_on = stepped(torch.load(tmp_path / "state", map_location="cpu"), steps=1)
    assert all(state["exp_avg"].device.type == "npu" for state in going_on.state.values())
    weight = second.param_groups[0]["params"][0]
    assert swapped_memory.is_swapped(second.state[weight]["exp_avg"]) is to_swapped


def test_the_driver_trains_and_resumes_to_the_bit(tmp_path):
    """Two runs of two iterations, of the plain and of the distributed optimizer."""
    pytest.importorskip("megatron.core")
    from megatron_npu.ops.optimizers.adam import FusedAdam
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import pretrain
    from megatron_npu.sim import counting

    flags = [*tiny.flags_for(tiny.write_dataset(tmp_path / "numbers")), *FLAGS]

    def train(name: str, *more: str) -> list[tuple]:
        log = tmp_path / f"{name}.json"
        pretrain.train(arguments.parse([*flags, *more, "--json-log", str(log)]))
        return [(row["loss"], row["grad_norm"]) for row in tiny.rows(log)]

    before = FusedAdam.swap_moments
    try:
        for kind in ([], ["--use-distributed-optimizer"]):
            folder = ["--save", str(tmp_path / f"saved{len(kind)}")]
            whole = train(f"whole{len(kind)}", *kind)
            with counting() as counts:
                half = train(f"half{len(kind)}", *kind, *folder, "--exit-interval", "2", "--swap-optimizer")
            assert half == whole[:2]
            assert counts.swapped.bytes
            swapped = [] if kind else ["--swap-optimizer"]
            assert train(f"rest{len(kind)}", *kind, "--load", folder[1], *swapped) == whole[2:]
    finally:
        FusedAdam.swap_moments = before
