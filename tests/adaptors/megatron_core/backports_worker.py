"""Look at each wrong number of one megatron-core with our cure and without; prints a JSON object of both.

In the groups of ``fake_groups``.
"""

from __future__ import annotations

import importlib
import inspect
import json
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import backports_numbers  # beside this file: a tree of Megatron has tests of its own
import torch
import torch.distributed as dist
from fake_groups import TP, groups

import megatron_npu
from megatron_npu import plugin

SEQUENCE, BATCH, EXPERTS = 6, 3, 4


def router(per_token: bool, **changes: Any) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=8,
        num_attention_heads=2,
        num_moe_experts=EXPERTS,
        moe_router_topk=2,
        tensor_model_parallel_size=TP,
        expert_model_parallel_size=2,
        expert_tensor_parallel_size=1,
        sequence_parallel=True,
        add_bias_linear=False,
        use_cpu_initialization=True,
        calculate_per_token_loss=per_token,
        **changes,
    )
    torch.manual_seed(3)
    known = inspect.signature(TopKRouter.__init__).parameters
    named = next((name for name in ("pg_collection", "model_comm_pgs") if name in known), None)
    given = {}
    if named:
        from megatron.core.transformer.moe import moe_utils

        given[named] = next(
            getattr(moe_utils, name)()
            for name in ("get_default_pg_collection", "get_default_model_comm_pgs")
            if hasattr(moe_utils, name)
        )
    made = TopKRouter(config=config, **given)
    made.set_layer_number(1)
    return made.train()


def scale(**changes: Any) -> float:
    """Return by what --calculate-per-token-loss multiplies the gradient of the losses beside."""
    gradients = []
    for per_token in (True, False):
        one = router(per_token, **changes)
        torch.manual_seed(4)
        hidden = torch.randn(SEQUENCE, BATCH, 8)
        probs, _ = one(hidden)
        # the task's own gradient is the same in both; of probabilities that sum to one it is none
        (probs.sum() * 0).backward()
        gradients.append(one.weight.grad)
    return float(gradients[0].norm() / gradients[1].norm())


def z_loss_ranks() -> list[int]:
    """Return over which ranks the z-loss in the log is averaged."""
    from megatron.core.transformer.moe import moe_utils

    seen: set[int] = set()

    def reduce(tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM, group: Any = None, **_: Any) -> None:
        if op == dist.ReduceOp.AVG:
            seen.update(dist.get_process_group_ranks(group))

    router(False, moe_z_loss_coeff=1e-2, moe_aux_loss_coeff=0.0)(torch.randn(SEQUENCE, BATCH, 8))
    kept, dist.all_reduce = dist.all_reduce, reduce
    try:
        moe_utils.reduce_aux_losses_tracker_across_ranks(["z_loss"])
    finally:
        dist.all_reduce = kept
    return sorted(seen)


def reduced() -> float:
    """Return the sum over two ranks of ones that are not contiguous."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import mappings

    group = parallel_state.get_tensor_model_parallel_group()
    given = [group] if "group" in inspect.signature(mappings._reduce).parameters else []
    kept, dist.all_reduce = dist.all_reduce, lambda tensor, **_: tensor.mul_(2)
    try:
        return float(mappings._reduce(torch.ones(3, 2).t(), *given).mean())
    finally:
        dist.all_reduce = kept


def gathered() -> float:
    """Return the gradient of the part that a further layer gathers, where that of the whole is one."""
    from megatron.core.tensor_parallel import mappings
    from megatron.core.transformer import multi_token_prediction as module

    def of_alike(output: torch.Tensor, given: torch.Tensor, **_: Any) -> None:
        output.copy_(TP * given.chunk(TP)[1])

    names = ("all_gather_last_dim_from_tensor_parallel_region", "gather_from_tensor_model_parallel_region")
    gather = next(getattr(module, name) for name in names if hasattr(module, name))
    part = torch.ones(3, 2, requires_grad=True)
    kept, mappings.dist_reduce_scatter_func = mappings.dist_reduce_scatter_func, of_alike
    try:
        gather(part).sum().backward()
    finally:
        mappings.dist_reduce_scatter_func = kept
    return float(part.grad.mean())


def expert_bias_counts() -> bool:
    """Return whether the norm counts a copy of what this rank's experts alone hold."""
    from megatron.core.tensor_parallel import layers

    bias, copied = torch.nn.Parameter(torch.ones(2)), torch.ones(2)
    bias.allreduce, bias.tensor_model_parallel = False, False
    layers.copy_tensor_model_parallel_attributes(copied, bias)
    known = inspect.signature(layers.param_is_not_tensor_parallel_duplicate).parameters
    if "expert_tp_group" in known:  # 0.19 copies the attribute elsewhere, and is told the group
        from megatron.core import parallel_state
        from megatron.core.optimizer.optimizer import copy_optimizer_param_metadata

        copy_optimizer_param_metadata(copied, bias)
        group = parallel_state.get_expert_tensor_parallel_group()
        return bool(layers.param_is_not_tensor_parallel_duplicate(copied, expert_tp_group=group))
    return bool(layers.param_is_not_tensor_parallel_duplicate(copied))


def learning_rates() -> list[float] | None:
    """Return the highest learning rates that two groups have after loading 0.1 and 0.2."""
    from megatron.core.optimizer import optimizer

    find = getattr(optimizer.MegatronOptimizer, "_filter_and_reorder_param_groups", None)
    if find is None:
        return None
    alike = {"wd_mult": 1.0, "lr_mult": 1.0, "is_expert_parallel": False, "is_decoupled_lr": False}
    saved = [{**alike, "max_lr": rate, "min_lr": 0.0, "params": []} for rate in (0.1, 0.2)]
    return [group["max_lr"] for group in find([dict(group) for group in saved], saved)]


def decoupled_rates() -> list[float] | None:
    """Return the highest learning rates of a distributed optimizer's groups after it loads its own state."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False)
    ).bfloat16()
    model[0].weight.is_embedding_or_output_parameter = True
    ours = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    ddp = DistributedDataParallel(ours, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    config = OptimizerConfig(
        optimizer="adam", lr=0.1, min_lr=0.0, decoupled_lr=0.2, bf16=True, use_distributed_optimizer=True
    )
    adam = get_megatron_optimizer(config, [ddp], use_gloo_process_groups=False).chained_optimizers[0]
    saved = [{**group, "step": 1} for group in adam.optimizer.state_dict()["param_groups"]]
    adam.load_state_dict({"optimizer": {"param_groups": saved}})
    return sorted(group["max_lr"] for group in adam.optimizer.param_groups)


def overridden_rates() -> list[float]:
    """Return the highest and least rate that a schedule follows which overrides those of 0.6 and 0.0."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def schedule(rate: float, least: float, optimizer: Any) -> Any:
        names = "lr_warmup_steps lr_decay_steps lr_decay_style start_wd end_wd wd_incr_steps wd_incr_style"
        rest = dict(zip(names.split(), (0, 4, "linear", 0.0, 0.0, 4, "constant"), strict=True))
        return OptimizerParamScheduler(
            optimizer,
            init_lr=0.0,
            max_lr=rate,
            min_lr=least,
            use_checkpoint_opt_param_scheduler=False,
            override_opt_param_scheduler=True,
            **rest,
        )

    def fresh(rate: float, least: float) -> Any:
        return SimpleNamespace(param_groups=[{"max_lr": rate, "min_lr": least, "params": []}])

    before, after = fresh(0.6, 0.0), fresh(0.2, 0.1)
    saved = schedule(0.6, 0.0, before).state_dict()
    resumed = schedule(0.2, 0.1, after)
    after.param_groups[:] = before.param_groups  # as a checkpoint is loaded: optimizer first
    rates = []
    for steps in (0, 4):
        resumed.num_steps = 0
        resumed.load_state_dict({**saved, "num_steps": steps})
        rates.append(after.param_groups[0]["lr"])
    return rates


def updates() -> list[float] | None:
    """Return weight and count of steps of an Adam that Megatron's FSDP has taken over; 1 and 0 are right."""
    name = "megatron.core.distributed.fsdp.src.megatron_fsdp.fully_shard"
    try:
        shard = importlib.import_module(name).fully_shard_optimizer
    except (ModuleNotFoundError, AttributeError):
        return None
    if next(iter(inspect.signature(shard).parameters)) != "optimizer":
        return None
    weight = torch.nn.Parameter(torch.ones(3))
    weight._megatron_fsdp_model = SimpleNamespace(
        model_auto_sync=True, install_optimized_model_weights=lambda: None, zero_grad_buffer=lambda: None
    )
    adam = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.5)
    shard(adam, preproc_state_dict_for_dcp_ckpt=False)
    assert adam.param_groups[0]["lr"] == 0.1
    assert adam.param_groups[0]["weight_decay"] == 0.5
    steps = adam.state[weight].get("step", torch.tensor(0.0))
    return [float(weight[0]), float(steps)]


def everything() -> dict[str, Any]:
    """Return what the numbers are; scales as parts of what they ought to be."""
    tokens = SEQUENCE * BATCH * TP
    aux = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 1e-2}
    return {
        "aux": round(scale(**aux) / tokens, 4),
        "z": round(scale(moe_z_loss_coeff=1e-2, moe_aux_loss_coeff=0.0) / tokens, 4),
        "seq": round(scale(**{**aux, "moe_router_load_balancing_type": "seq_aux_loss"}) / tokens, 4),
        "z logged over": z_loss_ranks(),
        "reduced": reduced(),
        "gathered": gathered(),
        "expert bias counts": expert_bias_counts(),
        "learning rates": learning_rates(),
        "decoupled rates": decoupled_rates(),
        "overridden rates": overridden_rates(),
        "updates": updates(),
        **backports_numbers.everything(),
    }


if __name__ == "__main__":
    megatron_npu.install()
    groups()
    cured = everything()
    rows = [asdict(row) for row in plugin.engine().ledger.rows if row.state == "applied"]
    plugin.engine().undo()
    from megatron.core.transformer.moe import moe_utils

    vars(moe_utils).setdefault("te_general_gemm", None)  # 0.13 to 0.16 cannot run without: another bug
    print(json.dumps({"cured": cured, "stock": everything(), "applied": rows}))
