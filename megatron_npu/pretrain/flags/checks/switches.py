"""Convert acceleration switches to Megatron's flags, or reject them with a one-line error."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.options import memory_flags
from megatron_npu.options.switch_rules import Place, meant, refuse
from megatron_npu.options.switches import Switches
from megatron_npu.pretrain.flags import derive

_FIRST_FSDP = (0, 16)  # before, Megatron's FSDP multiplies the wrong gradients on a device without NCCL


def check(args: Namespace) -> None:
    """Check the acceleration switches, and log on rank 0 which Megatron flags each switch sets.

    Raises:
        UsageError: Megatron models do not support a switch, or it contradicts another flag.
    """
    place = _place(args)
    switches, line = meant(Switches.from_args(args), place)
    derive.sharding(args, None)
    _precision(args, switches)
    precision = "fp16" if args.fp16 else "bf16" if args.bf16 else None
    refuse(replace(switches, mixed_precision=precision), place)
    if line:
        _say(args, line)
    if switches.sharding != "none":
        _share_out(args, switches.sharding, place)
    _offload(args, switches)
    if switches.checkpoint_activations:
        derive.recompute_all(args)
    if switches.fused_ops:
        _say(args, "--fused-ops has no effect, because the plug-in already uses this project's operations")


def _say(args: Namespace, line: str) -> None:
    if args.rank == 0:
        print(f"megatron_npu: {line}", flush=True)


def _precision(args: Namespace, switches: Switches) -> None:
    wanted = switches.mixed_precision
    if wanted is None:
        return
    other = "fp16" if wanted == "bf16" else "bf16"
    if getattr(args, other):
        raise UsageError(
            f"--mixed-precision {wanted} and --{other} are mutually exclusive", remedy="Remove one of them."
        )
    derive.precision(args, wanted)
    _say(
        args,
        f"--mixed-precision means --{wanted} here, with weights in {wanted} and optimizer states in fp32",
    )


def _place(args: Namespace) -> Place:
    cut = derive.model_parallel_size(args) > 1
    return Place("megatron", devices.current().name, cut, alone=_ranks(args) == 1)


def _share_out(args: Namespace, sharding: str, place: Place) -> None:
    flag = f"--{sharding}-memory-optimization"
    if sharding == "zero-1":
        _optimizer_states(args, flag)
    elif place.cut:
        _optimizer_states(
            args,
            flag,
            "; each rank keeps the full gradients of its part of the model, because a pipeline accumulates "
            "into them with every micro batch and shards only their sums at the end of a step; weights are "
            "not sharded",
        )
    elif place.alone:  # where megatron-core 0.16's FSDP doubles its gradients
        _say(args, f"{flag} has no effect, because there is only one data-parallel rank")
    else:
        _FULLY[sharding](args, flag)


def _optimizer_states(args: Namespace, flag: str, note: str = "") -> None:
    derive.distributed_optimizer(args)
    _say(
        args,
        f"{flag} means --use-distributed-optimizer here: Adam's states and the fp32 main weights "
        f"are sharded over {_ranks(args)} data-parallel rank(s){note}",
    )


def _gradients_too(args: Namespace, flag: str) -> None:
    _megatron_fsdp(args, flag, "optim_grads", "Adam's states, the fp32 main weights and the gradients")


def _parameters_too(args: Namespace, flag: str) -> None:
    what = "Adam's states, gradients and weights; a layer's weights are gathered while it computes"
    _megatron_fsdp(args, flag, "optim_grads_params", what)


def _megatron_fsdp(args: Namespace, flag: str, strategy: str, what: str) -> None:
    version = tuple(int(part) for part in args.megatron_version.split(".")[:2])
    if version < _FIRST_FSDP:
        raise UsageError(
            f"{flag} cannot be used with megatron-core {args.megatron_version}; it requires 0.16 or newer, "
            "whose FSDP reduces gradients correctly",
            remedy="Use --fsdp-memory-optimization (torch's FSDP) or --zero-1-memory-optimization, or "
            "install megatron-core 0.16.",
        )
    _require_shardable(args, flag)
    derive.sharding(args, "megatron", strategy)
    derive.distributed_optimizer(args)
    _say(args, f"{flag} means Megatron's FSDP ({strategy}) here, which shards {what}")


def _torch_fsdp(args: Namespace, flag: str) -> None:
    if args.use_distributed_optimizer:
        raise UsageError(
            f"{flag} and --use-distributed-optimizer are mutually exclusive",
            remedy="Remove --use-distributed-optimizer.",
        )
    _require_shardable(args, flag)
    derive.sharding(args, "torch")
    _say(args, f"{flag} means torch's fully_shard here, which shards Adam's states, gradients and weights")


def _require_shardable(args: Namespace, flag: str) -> None:
    """Check that no other flag prevents the weights from being sharded."""
    overlaps = "FSDP always overlaps communication"
    for word, reason, remedy in (
        (
            "--num-experts",
            "experts are distributed over different groups of ranks",
            "Use --zero-1-memory-optimization.",
        ),
        ("--sample-prompt", "weights are gathered only for training", "Remove the flag."),
        ("--overlap-grad-reduce", overlaps, "Remove the flag."),
        ("--overlap-param-gather", overlaps, "Remove the flag."),
    ):
        if getattr(args, word.removeprefix("--").replace("-", "_")):
            raise UsageError(f"{word} cannot be used with {flag}, because {reason}", remedy=remedy)


def _ranks(args: Namespace) -> int:
    return max(args.world_size // derive.model_parallel_size(args), 1)


_FULLY: dict[str, Callable[[Namespace, str], None]] = {
    "zero-2": _gradients_too,
    "zero-3": _parameters_too,
    "fsdp": _torch_fsdp,
}


def _offload(args: Namespace, switches: Switches) -> None:
    if not switches.cpu_offload:
        derive.offloaded_optimizer(args, on=False)
        return
    if memory_flags.precision_aware_optimizer(args):
        raise UsageError(
            "--cpu-offload cannot be used with --use-precision-aware-optimizer or --reuse-fp32-param, "
            "because the update on the host is in fp32",
            remedy="Remove one of them.",
        )
    for flag, given, without in (
        ("--save", args.save, args.no_save_optim),
        ("--load", args.load, args.no_load_optim or args.finetune),
    ):
        if given and not without:
            raise UsageError(
                f"{flag} with --cpu-offload requires a checkpoint without the optimizer, because the "
                "offloaded optimizer of megatron-core 0.12 to 0.16 saves torch objects, which cannot be "
                "loaded safely",
                remedy=f"Pass --no-{flag.removeprefix('--')}-optim, or remove --cpu-offload.",
            )
    derive.offloaded_optimizer(args, on=True)
    _say(args, "--cpu-offload: Adam's states and the fp32 main weights are stored and updated on the host")
