"""``megatron.training.arguments``: the flags of the fused attention; what the device or the machine lacks."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

from megatron_npu import attention_flags, devices
from megatron_npu.adaptors.megatron_core import unsupported_options
from megatron_npu.adaptors.megatron_core.decorators import WITHOUT_CUDA, transformer_engine_present, wrap
from megatron_npu.errors import UsageError
from megatron_npu.ops import dispatch

# The flags of FSDP: torch's, and Megatron's by its name before 0.14 and since.
_SHARDED = ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp")


@wrap(
    "megatron.training.arguments:add_megatron_arguments",
    why="--pre-tockens, --next-tockens and --shape-order of the fused attention",
)
def add_attention_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Add the flags to the parser."""

    @functools.wraps(original)
    def add_megatron_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parser = original(parser)
        attention_flags.add_attention_flags(parser)
        return parser

    return add_megatron_arguments


@wrap(
    "megatron.training.arguments:validate_args",
    why="the flags of the fused attention take effect; --transformer-impl transformer_engine, the default, "
    "ends in a NameError without TransformerEngine; so does, in other errors, the default of a fused RoPE",
)
def take_flags(original: Callable[..., Any]) -> Callable[..., Any]:
    """Publish our flags, and take the local implementation, with our operations, where there is no other."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        attention_flags.CURRENT = attention_flags.AttentionFlags.from_args(args)
        if transformer_engine_present() is None:
            _do_without_transformer_engine(args)
        return original(args, *rest, **kwargs)

    return validate_args


@wrap(
    "megatron.training.arguments:validate_args",
    devices=WITHOUT_CUDA,
    why="it asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism, and for anything else "
    "with FSDP, and with --deterministic-mode for an NCCL_ALGO; without CUDA they mean nothing",
)
def with_variables_of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Set the variables where they are asked for and not set; launch scripts often set the first to 1."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        if any(getattr(args, option, False) for option in _SHARDED):
            if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
                del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
        else:
            os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        if args.deterministic_mode:
            os.environ.setdefault("NCCL_ALGO", "Ring")
        return original(args, *rest, **kwargs)

    return validate_args


@wrap(
    "megatron.training.arguments:validate_args",
    devices=WITHOUT_CUDA,
    why="it checks the options of CUDA graphs against others, which mean nothing without the graphs; "
    "buffers registered with NCCL, and SHARP, end in errors of torch in the middle of the start",
)
def without_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Switch the graphs off, and say so, before it does; refuse the others."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        unsupported_options.refuse(args, unsupported_options.NEED_CUDA, "CUDA")
        reason = f"there are no CUDA graphs on the {devices.current().name} device"
        unsupported_options.switch_off(args, unsupported_options.CUDA_GRAPHS, reason)
        return original(args, *rest, **kwargs)

    return validate_args


@wrap(
    "megatron.training.arguments:validate_args",
    devices=WITHOUT_CUDA,
    why="--profile without --use-pytorch-profiler is for Nsight Systems, and --record-memory-history needs "
    "an allocator that keeps one: both end in an AttributeError, the first in the middle of the run",
)
def refuse_tools_of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Say before anything is built what cannot be had."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        device = devices.current().name
        if args.profile and not args.use_pytorch_profiler:
            raise UsageError(
                f"--profile alone on the {device} device",
                "--profile --use-pytorch-profiler",
                "Without the second flag Megatron profiles for Nsight Systems, which sees GPUs only.",
            )
        if args.record_memory_history and device == "cpu":
            raise UsageError(
                "--record-memory-history on the cpu device",
                "a device whose allocator keeps a history",
                "Leave the flag away: torch takes host memory from the C library, which keeps none.",
            )
        return original(args, *rest, **kwargs)

    return validate_args


@wrap(
    "megatron.training.arguments:validate_args",
    why="--optimizer-cpu-offload with fp32 parameters is a ValueError of torch when the optimizer is built: "
    "the offloading one is handed views of them, which are no leaves (0.12 to 0.16, every device)",
)
def refuse_offload_in_fp32(original: Callable[..., Any]) -> Callable[..., Any]:
    """Say before anything is built that only copies in fp32 of 16-bit parameters can be offloaded."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        if args.optimizer_cpu_offload and not (args.bf16 or args.fp16):
            raise UsageError(
                "--optimizer-cpu-offload with fp32 parameters",
                "--bf16 or --fp16 beside it",
                "Add one, or leave --optimizer-cpu-offload away: Megatron cannot offload fp32 parameters.",
            )
        return original(args, *rest, **kwargs)

    return validate_args


@wrap(
    "megatron.training.arguments:validate_args",
    why="--rerun-mode report_stats is a ValueError when the run starts: the state machine calls that mode "
    "report_determinism_stats, which the parser refuses (0.12 to 0.16)",
)
def name_the_rerun_mode(original: Callable[..., Any]) -> Callable[..., Any]:
    """Call it as the state machine does."""

    @functools.wraps(original)
    def validate_args(args: argparse.Namespace, *rest: Any, **kwargs: Any) -> argparse.Namespace:
        if args.rerun_mode == "report_stats":
            args.rerun_mode = "report_determinism_stats"
        return original(args, *rest, **kwargs)

    return validate_args


def _do_without_transformer_engine(args: argparse.Namespace) -> None:
    unsupported_options.refuse(args, unsupported_options.NEED_TRANSFORMER_ENGINE)
    reason = "TransformerEngine is not installed"
    unsupported_options.switch_off(args, unsupported_options.DO_WITHOUT_TRANSFORMER_ENGINE, reason)
    if args.transformer_impl != "local":  # transformer_engine, the default, or since 0.16 inference_optimized
        dispatch.report_fallback(
            "transformer_engine",
            "not installed: --transformer-impl local runs",
            remedy="Give --transformer-impl local",
        )
        args.transformer_impl = "local"
    # On by default, and refused then without TransformerEngine; the path without it is as fused here.
    if args.rotary_interleaved or args.multi_latent_attention:
        args.apply_rope_fusion = False
