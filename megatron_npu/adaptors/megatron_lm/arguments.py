"""Patch ``megatron.arguments`` to add this package's flags, and to accept the arguments of torch's
current launchers.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared.arguments import (
    WHY_FLAGS,
    accept_local_rank_with_a_dash,
    add_attention_flags,
    declaring,
)
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.options import hccl_buffers, memory_flags

around("megatron.arguments:_add_training_args", why=WHY_FLAGS)(add_attention_flags)


@around(
    "megatron.arguments:_add_training_args",
    why="--cross-entropy-fusion-impl, which is newer than this version: linear avoids storing the full "
    "logits",
)
def add_linear_loss(
    original: Callable[..., argparse.ArgumentParser], parser: argparse.ArgumentParser
) -> argparse.ArgumentParser:
    """Add the flag of later Megatron versions that selects the linear loss."""
    parser = original(parser)
    parser.add_argument(
        "--cross-entropy-fusion-impl",
        choices=["native", "linear"],
        default="native",
        help=(
            "implementation of the cross-entropy; linear fuses the loss with the output layer and "
            "computes it block by block over the vocabulary, so that the full logits are never stored"
        ),
    )
    return parser


around(
    "megatron.arguments:_add_training_args",
    why="--swap-optimizer, the flag that Ascend users know for moments in host memory",
)(declaring(memory_flags.add_swap_optimizer))

_WHY_BUFFERS = "--hccl-group-buffer-adaptive, the flag that Ascend users know for per-group HCCL buffers"

around("megatron.arguments:_add_training_args", why=_WHY_BUFFERS)(declaring(hccl_buffers.add))


@around("megatron.arguments:validate_args", why=_WHY_BUFFERS)
def choose_buffers(
    original: Callable[..., argparse.Namespace], args: argparse.Namespace, *rest: Any, **named: Any
) -> argparse.Namespace:
    """Reject the HCCL buffer flag on other backends, and store the arguments if the flag is permitted."""
    hccl_buffers.choose(args)
    return original(args, *rest, **named)


@around(
    "megatron.arguments:validate_args",
    why="Megatron has no argument for --swap-optimizer, which needs an NPU and Adam",
)
def tell_adam(
    original: Callable[..., argparse.Namespace], args: argparse.Namespace, *rest: Any, **named: Any
) -> argparse.Namespace:
    """Enable the swapping of moments in Adam, or reject the flag."""
    memory_flags.check_swap_optimizer(args)
    if args.swap_optimizer:
        from apex.optimizers import FusedAdam as FoundAdam  # the real one, or ours under that name

        memory_flags.refuse_foreign_adam(FoundAdam, FusedAdam)
    FusedAdam.swap_moments = args.swap_optimizer
    return original(args, *rest, **named)


_WHY_OFFLOADING = f"{memory_flags.OFFLOADING} and --offload-modules, which are newer than this version"

around("megatron.arguments:_add_training_args", why=_WHY_OFFLOADING)(
    declaring(memory_flags.add_activation_offloading)
)


@around("megatron.arguments:validate_args", why=_WHY_OFFLOADING)
def check_activation_offloading(
    original: Callable[..., argparse.Namespace], args: argparse.Namespace, *rest: Any, **named: Any
) -> argparse.Namespace:
    """Reject unsupported combinations of flags, after upstream has determined which layers are recomputed."""
    validated = original(args, *rest, **named)
    memory_flags.check_activation_offloading(validated)
    return validated


around(
    "megatron.arguments:_add_distributed_args",
    why="torch.distributed.launch passes --local-rank since torch 2.0; upstream defines only --local_rank",
)(accept_local_rank_with_a_dash)


@around(
    "megatron.arguments:validate_args",
    why=(
        "upstream requires CUDA_DEVICE_MAX_CONNECTIONS=1, which only CUDA's driver reads, and this driver"
        " is not in use"
    ),
)
def presume_one_connection(original: Callable[..., Any], *args: Any, **kwargs: Any) -> argparse.Namespace:
    """Set CUDA_DEVICE_MAX_CONNECTIONS to 1 if the user has not set it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    return original(*args, **kwargs)


@around(
    "megatron.arguments:validate_args",
    why="T5 with only --num-layers, as in upstream's examples, has no number of decoder layers and fails",
    upstream_bug=True,
    until="never: 285068c8 is frozen",
)
def complete_decoder_layers(original: Callable[..., Any], *args: Any, **kwargs: Any) -> argparse.Namespace:
    """Set the number of decoder layers to the number of encoder layers by default."""
    validated = original(*args, **kwargs)
    if validated.decoder_num_layers is None:
        validated.decoder_num_layers = validated.encoder_num_layers
    return validated
