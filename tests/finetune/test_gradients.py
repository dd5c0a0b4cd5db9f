"""The norm of gradients is exact where torch's own is not, in a dtype that cannot hold it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from megatron_npu.finetune.model.gradients import norm_of
from megatron_npu.finetune.model.optimizer_state import load_optimizer_state, optimizer_state

CPU = torch.device("cpu")


def test_a_norm_beyond_fp16_is_no_overflow() -> None:
    gradients = [torch.full((4096,), 2000.0, dtype=torch.float16) for _ in range(2)]
    assert norm_of(gradients, CPU) == pytest.approx(2000 * 8192**0.5, rel=1e-6)
    assert torch.nn.utils.get_total_norm(gradients).isinf()  # why it is not taken: a sound step is left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_of_many_numbers_is_that_of_fp64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(2**22).mul_(1e-3).to(dtype), torch.randn(3, 5).to(dtype)]
    exact = sum(gradient.double().square().sum() for gradient in gradients) ** 0.5
    assert norm_of(gradients, CPU) == pytest.approx(float(exact), rel=2e-6)


def test_every_weight_has_a_state_and_no_step_is_counted() -> None:
    """What torch's own function for checkpoints does otherwise."""

    def stepped() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(3, 3), "unused": torch.nn.Linear(3, 3)})
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model["used"](torch.ones(2, 3)).sum().backward()
        optimizer.step()
        return model, optimizer

    model, optimizer = stepped()
    assert "unused.weight" not in get_optimizer_state_dict(model, optimizer)["state"]
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    saved = optimizer_state(optimizer, dict(model.named_parameters()))
    assert saved["state"].keys() == before.keys()
    assert [float(saved["state"][f"{name}.weight"]["step"]) for name in ("used", "unused")] == [1, 0]
    for name, weight in model.named_parameters():
        assert torch.equal(weight, before[name])
    other, again = stepped()
    load_optimizer_state(again, dict(other.named_parameters()), copy.deepcopy(saved))
    for one in (optimizer, again):
        one.param_groups[0]["params"][2].grad = torch.ones(3, 3)
        one.step()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)
