"""A process of ``test_found_groups``: an optimizer goes on with other rates than those of its checkpoint.

Two of its three groups differ in their rates alone.
"""

from __future__ import annotations

from typing import Any

import torch

import megatron_npu
from tests.adaptors.megatron_core.fake_groups import groups


def optimizer(kind: str, rate: float, more: float) -> Any:
    """Return an optimizer of three matrices, one of which has the rate ``more``, and a vector."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, ParamKey, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import ParamGroupOverride
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8, bias=False))
    if kind != "plain":
        model = model.bfloat16()
    sharded = kind == "distributed"
    ours = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp = DistributedDataParallel(
        ours, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model
    )
    config = OptimizerConfig(
        optimizer="adam", lr=rate, min_lr=0.0, bf16=kind != "plain", use_distributed_optimizer=sharded
    )
    overrides = {
        ParamKey(name="*.1.weight"): ParamGroupOverride(max_lr=more),
        ParamKey(name="*.bias"): ParamGroupOverride(wd_mult=0.0),
    }
    made = get_megatron_optimizer(config, [ddp], config_overrides=overrides, use_gloo_process_groups=False)
    return getattr(made, "chained_optimizers", [made])[0]


def settings(adam: Any) -> list[tuple[float, float]]:
    """Return highest rate and weight decay of each group, in their order."""
    return [(each["max_lr"], each["wd_mult"]) for each in adam.optimizer.param_groups]


def saved_state(kind: str, adam: Any) -> dict[str, Any]:
    """Return what a checkpoint has of the groups' settings, with moments where the optimizer loads them."""
    if kind == "distributed":  # its moments are loaded by themselves
        saved = [{**group, "step": 7} for group in adam.optimizer.state_dict()["param_groups"]]
        return {"optimizer": {"param_groups": saved}}
    adam.init_state_fn(adam.optimizer, adam.config)
    for moments, number in zip(adam.optimizer.state.values(), (1.0, 2.0, 3.0), strict=True):
        moments["exp_avg"].fill_(number)
    return adam.state_dict()


def goes_on(kind: str) -> None:
    """Load a state into optimizers of a kind (distributed, half, plain) with the same and other rates."""
    before = optimizer(kind, 0.1, 0.3)
    assert sorted(settings(before)) == [(0.1, 0.0), (0.1, 1.0), (0.3, 1.0)]
    state = saved_state(kind, before)
    for rate, more in ((0.1, 0.3), (0.01, 0.03), (0.2, 0.05)):
        after = optimizer(kind, rate, more)
        after.load_state_dict(state)
        assert settings(after) == settings(before), "each has the rate that it was saved with"
        for group in after.optimizer.param_groups:
            assert not [name for name in group if "place" in name]
            if kind == "distributed":  # this rank has a part of a weight, or nothing
                continue
            weight = group["params"][0]
            last = weight.numel() == 64 and _is_last(weight, kind)
            assert group["max_lr"] == (0.3 if last else 0.1), "the group of another rate has changed places"


def _is_last(weight: torch.Tensor, kind: str) -> bool:
    """Return whether a weight is the one that the override is for: no other is initialised like it."""
    torch.manual_seed(5)
    torch.nn.Linear(8, 8)  # which draws before it
    last = torch.nn.Linear(8, 8, bias=False).weight.detach()
    expected = last if kind == "plain" else last.bfloat16().float()
    return torch.equal(weight.detach().float().view(-1), expected.view(-1))


if __name__ == "__main__":
    megatron_npu.install()
    groups()
    for each in ("distributed", "half", "plain"):
        goes_on(each)
