"""Check a stock script's arguments before upstream checks them.

Each check is a function of the parsed arguments, listed in ``CHECKS`` with its reason. To add a check, write
the function and its entry there.
"""

from __future__ import annotations

import argparse
import functools
import logging
import math
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

from megatron_npu import devices
from megatron_npu.adaptors.megatron_core.backports.positions import UPSTREAMS_FACTOR
from megatron_npu.adaptors.megatron_core.decorators import (
    NOT_FIXED,
    WITHOUT_CUDA,
    fused_optimizer_present,
    installed,
    te_layers_present,
    transformer_engine_present,
)
from megatron_npu.adaptors.megatron_core.layers import activation_offloading, tensor_parallel_overlap
from megatron_npu.adaptors.megatron_core.optimizers import swapped_optimizer
from megatron_npu.adaptors.megatron_core.options import input_checks, optimizer_checks, unsupported_options
from megatron_npu.adaptors.megatron_core.run import communicators
from megatron_npu.adaptors.shared import decorators
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.options import hccl_buffers, memory_flags, older_flags
from megatron_npu.patching.patch import ALL_DEVICES

logger = logging.getLogger(__name__)

# The flags of FSDP: torch's, and Megatron's by its name before 0.14 and since.
_SHARDED = ("use_torch_fsdp2", "use_custom_fsdp", "use_megatron_fsdp")


_NEVER = 2**31 - 1  # iterations between two evaluations: more than any run has


class Check(NamedTuple):
    """A function that checks or changes the arguments before upstream validates them.

    Attributes:
        run: changes the arguments, or raises a UsageError.
        why: the reason, which the ledger shows.
        devices: the devices to which the check applies.
        condition: called before each run; if it returns a string, that is the reason to skip the check.
        until: for a fix of an upstream bug, when it may be removed.
    """

    run: Callable[[argparse.Namespace], None]
    why: str
    devices: tuple[str, ...] = ALL_DEVICES
    condition: Callable[[], str | None] | None = None
    until: str = ""

    @property
    def name(self) -> str:
        """The name of the check's function."""
        return self.run.__name__


def take_older_flags(args: argparse.Namespace) -> None:
    """Translate flags of older Megatron versions to current flags that upstream accepts."""
    older_flags.apply(args, sys.argv[1:])
    args.checkpoint_activations = False


def check_precision_aware_optimizer(args: argparse.Namespace) -> None:
    """Set whether the precision-aware optimizer is used, and reject flags that conflict with it."""
    memory_flags.check_precision_aware_optimizer(args)
    args.use_precision_aware_optimizer = memory_flags.precision_aware_optimizer(args)


def name_the_rerun_mode(args: argparse.Namespace) -> None:
    """Replace the value report_stats of --rerun-mode with the value that upstream's state machine uses."""
    if args.rerun_mode == "report_stats":
        args.rerun_mode = "report_determinism_stats"


def evaluate_at_the_end_alone(args: argparse.Namespace) -> None:
    """Evaluate only after training if --eval-interval is not given.

    Since 0.16, this flag has no default.

    The training loop accepts None, but the code that counts the samples before training divides by the value.
    """
    if args.eval_interval is None:
        args.eval_interval = _NEVER


def tell_factors_without_effect(args: argparse.Namespace) -> None:
    """Log which rotary position flags upstream's scripts do not pass to the model."""
    if decorators.backports_not_wanted() is None:
        return
    interpolation = getattr(args, "rotary_seq_len_interpolation_factor", None)
    scaling = getattr(args, "rope_scaling_factor", UPSTREAMS_FACTOR)
    without = [f"--rotary-seq-len-interpolation-factor {interpolation}"] * (interpolation not in (None, 1))
    if getattr(args, "use_rope_scaling", False) and scaling != UPSTREAMS_FACTOR:
        without.append(f"--rope-scaling-factor {scaling:g}")
    for flag in without:
        line = (
            "%s has no effect, because the script does not pass it to the model. Set %s=1 to have it passed"
        )
        logger.warning(line, flag, settings.BACKPORT.name)


def name_the_length_for_servers(args: argparse.Namespace) -> None:
    """Store the value of --inference-max-seq-length also under the name that the text-generation server
    reads.
    """
    if hasattr(args, "inference_max_seq_length") and not hasattr(args, "inference_max_sequence_length"):
        args.inference_max_sequence_length = args.inference_max_seq_length


def refuse_reruns_of_hybrid_batches(args: argparse.Namespace) -> None:
    """Reject reruns in training with hybrid context parallelism, which deals out batches in advance."""
    trains = getattr(args, "train_iters", None) or getattr(args, "train_samples", None)
    if trains and getattr(args, "hybrid_context_parallel", False) and args.rerun_mode != "disabled":
        raise UsageError(
            "--hybrid-context-parallel requires --rerun-mode disabled, because Megatron cannot repeat a "
            f"batch that is already distributed to the ranks, but got --rerun-mode {args.rerun_mode}. Add "
            "--rerun-mode disabled."
        )


def refuse_grouped_experts_of_other_kinds(args: argparse.Namespace) -> None:
    """Reject grouped experts that have biases or are not in bf16, which the grouped MLP before 0.17 does
    not support.
    """
    from megatron.core import package_info

    grouped = args.moe_grouped_gemm and args.num_experts
    if not grouped or (package_info.MAJOR, package_info.MINOR) >= (0, 17):
        return
    for wrong, given, flag in (
        (not args.bf16, "without --bf16", "--bf16"),
        (args.add_bias_linear, "with biases", "--disable-bias-linear"),
    ):
        if wrong:
            raise UsageError(
                f"--moe-grouped-gemm {given} requires {flag} in Megatron {package_info.__version__}, "
                f"because its grouped experts support only bf16 without biases. Add {flag}, remove "
                "--moe-grouped-gemm, or use Megatron 0.17 or newer."
            )


def refuse_xavier_weights(args: argparse.Namespace) -> None:
    """Reject a flag that upstream assigns to a configuration field that does not exist."""
    if getattr(args, "init_method_xavier_uniform", False):
        raise UsageError(
            "--init-method-xavier-uniform is not supported, because Megatron sets a field that its "
            "configuration does not have. Remove it; --init-method-std sets the standard deviation of the "
            "weights."
        )


def refuse_flex_dispatching(args: argparse.Namespace) -> None:
    """Reject the token dispatcher that requires a CUDA library."""
    if args.num_experts and args.moe_token_dispatcher_type == "flex":
        raise UsageError(
            "--moe-token-dispatcher-type must be allgather or alltoall, because flex uses DeepEP or "
            "HybridEP, which are CUDA libraries. Pass alltoall."
        )


def refuse_wrong_hierarchical_sizes(args: argparse.Namespace) -> None:
    """Reject hierarchical sizes that do not match, with an explanatory message.

    Upstream only has an assertion.
    """
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    if sizes and math.prod(sizes) != args.context_parallel_size:
        raise UsageError(
            "the product of --hierarchical-context-parallel-sizes must be --context-parallel-size "
            f"{args.context_parallel_size}, but got {' '.join(map(str, sizes))}. Change one of the two flags."
        )


def refuse_tools_of_cuda(args: argparse.Namespace) -> None:
    """Reject tools that require CUDA before the model is built."""
    device = devices.current().name
    if args.profile and not args.use_pytorch_profiler:
        raise UsageError(
            f"--profile requires --use-pytorch-profiler on the {device} device. Add --use-pytorch-profiler, "
            "because without it Megatron profiles for Nsight Systems, which supports only GPUs."
        )
    if args.record_memory_history and device == "cpu":
        raise UsageError(
            "--record-memory-history is not supported on the cpu device, because torch's host allocator "
            "records no history. Remove the flag."
        )


def do_without_cuda(args: argparse.Namespace) -> None:
    """Reject options that require NCCL or SHARP, and disable CUDA graphs."""
    unsupported_options.refuse(args, unsupported_options.NEED_CUDA, "CUDA")
    unsupported_options.do_without_cuda_graphs(args)


def refuse_linear_loss_alone(args: argparse.Namespace) -> None:
    """Reject the linear loss without --cross-entropy-loss-fusion, because upstream would ignore it."""
    if args.cross_entropy_fusion_impl == "linear" and not args.cross_entropy_loss_fusion:
        raise UsageError(
            "--cross-entropy-fusion-impl linear requires --cross-entropy-loss-fusion. Add "
            "--cross-entropy-loss-fusion, because without it Megatron ignores --cross-entropy-fusion-impl."
        )


def set_variables_of_cuda(args: argparse.Namespace) -> None:
    """Set the CUDA variables that upstream requires if they are unset.

    Launch scripts often set the first to 1.
    """
    if any(getattr(args, option, False) for option in _SHARDED):
        on_cuda = (
            devices.current().name == "cuda"
        )  # where it has an effect, and upstream's word about it counts
        if os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1" and not on_cuda:
            del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]
    else:
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if args.deterministic_mode:
        os.environ.setdefault("NCCL_ALGO", "Ring")


CHECKS = (  # they run in this order
    Check(
        take_older_flags,
        why="--checkpoint-activations ends a run with exit code 0, as if it had trained; --batch-size, "
        "--warmup and --model-parallel-size end it with an assertion's traceback",
    ),
    Check(
        name_the_rerun_mode,
        why="--rerun-mode report_stats raises a ValueError when the run starts: the state machine calls "
        "that mode report_determinism_stats, which the parser rejects (0.12 to 0.16)",
        until=NOT_FIXED,
    ),
    Check(
        evaluate_at_the_end_alone,
        why="without --eval-interval a script of 0.16 or newer raises a TypeError when its data is built",
        until=NOT_FIXED,
    ),
    Check(
        tell_factors_without_effect,
        why="--rotary-seq-len-interpolation-factor and --rope-scaling-factor silently have no effect (0.12 "
        "to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        name_the_length_for_servers,
        why="tools/run_text_generation_server.py and run_inference_performance_test.py raise an "
        "AttributeError: they read inference_max_sequence_length, but the flag's name is "
        "inference_max_seq_length (0.18 to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        refuse_reruns_of_hybrid_batches,
        why="--hybrid-context-parallel (0.16 to 0.19) raises an AssertionError in the first step with any "
        "--rerun-mode except disabled, which is not the default: training.py wraps its scheduler around "
        "the rewindable iterator",
        until=NOT_FIXED,
    ),
    Check(
        optimizer_checks.refuse_offload_in_fp32,
        why="--optimizer-cpu-offload with fp32 parameters makes torch raise a ValueError when the optimizer "
        "is built: the offloading optimizer is given views of them, which are not leaves (0.12 to 0.16, "
        "every device)",
        until=NOT_FIXED,
    ),
    Check(
        input_checks.refuse_missing_files,
        why="a missing vocabulary or dataset ends a script with a traceback, after the model is built",
    ),
    Check(
        input_checks.refuse_uneven_heads,
        why="a hidden size that the heads do not divide ends a script with an assertion without a message",
    ),
    Check(
        input_checks.refuse_uneven_batches,
        why="a global batch size that is no multiple of a step ends a script with an assertion's traceback",
    ),
    Check(
        refuse_linear_loss_alone,
        why="--cross-entropy-fusion-impl alone is silently ignored",
    ),
    Check(
        optimizer_checks.refuse_muon_without_its_package,
        why="--optimizer muon without emerging_optimizers fails an assertion, after the model is built",
    ),
    Check(
        optimizer_checks.refuse_lion_that_nothing_builds,
        why="--optimizer lion of 0.17 raises a ValueError, Invalid optimizer type!, after the model is built",
    ),
    Check(
        optimizer_checks.refuse_soap_that_cannot_be_saved,
        why="--optimizer soap of 0.18 and 0.19 fails an assertion when saved in a distributed format",
    ),
    Check(
        optimizer_checks.refuse_shares_that_cannot_be_saved,
        why="--optimizer muon --use-distributed-optimizer of 0.18 raises an AttributeError when saved in "
        "--ckpt-format torch",
    ),
    Check(
        refuse_grouped_experts_of_other_kinds,
        condition=te_layers_present,
        why="--moe-grouped-gemm with biases, or not in bf16, fails an assertion of upstream's grouped MLP "
        "after the model is built, or in the first step (0.12 to 0.16)",
    ),
    Check(
        refuse_xavier_weights,
        why="--init-method-xavier-uniform raises a TypeError when the configuration is created: it is "
        "passed on as scaled_init_method, which TransformerConfig does not have (0.12 to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        refuse_flex_dispatching,
        devices=WITHOUT_CUDA,
        condition=functools.partial(installed, "deep_ep"),
        why="--moe-token-dispatcher-type flex fails with an assertion or an ImportError when the model is "
        "built",
    ),
    Check(
        refuse_wrong_hierarchical_sizes,
        why="--hierarchical-context-parallel-sizes whose product is not the number of ranks fail an "
        "assertion without a message",
    ),
    Check(
        refuse_tools_of_cuda,
        devices=WITHOUT_CUDA,
        why="--profile without --use-pytorch-profiler is for Nsight Systems, and --record-memory-history "
        "needs an allocator that records a history: both raise an AttributeError, the first in the "
        "middle of the run",
    ),
    Check(
        do_without_cuda,
        devices=WITHOUT_CUDA,
        why="upstream checks CUDA graph options, which mean nothing without the graphs, against others; "
        "NCCL-registered buffers and SHARP end in torch errors in the middle of the start",
    ),
    Check(
        set_variables_of_cuda,
        why="upstream requires CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism, any other "
        "value with FSDP, and an NCCL_ALGO with --deterministic-mode; without CUDA they mean nothing, "
        "and with CUDA its examples set them",
    ),
    Check(
        check_precision_aware_optimizer,
        condition=fused_optimizer_present,
        why="--reuse-fp32-param is for bf16 parameters; --use-precision-aware-optimizer fails an assertion "
        "without the distributed optimizer, and loads rounded main weights from --ckpt-format torch",
    ),
    Check(
        swapped_optimizer.tell_adam,
        condition=fused_optimizer_present,
        why="Megatron has no argument for --swap-optimizer, which needs an NPU and fp32 moments",
    ),
    Check(
        hccl_buffers.choose,
        why="--hccl-group-buffer-adaptive is only for HCCL; the sizes follow from the arguments",
    ),
    Check(
        communicators.refuse_an_unreadable_file,
        devices=WITHOUT_CUDA,
        why="a file for --nccl-communicator-config-path that does not exist, or is not YAML, causes a "
        "traceback",
    ),
    Check(
        tensor_parallel_overlap.refuse_arguments,
        devices=("npu",),
        condition=transformer_engine_present,
        why="--tp-comm-overlap without --sequence-parallel fails an assertion in upstream",
    ),
    Check(
        activation_offloading.refuse_on_the_host,
        devices=("cpu",),
        why=(
            "on a CPU, --fine-grained-activation-offloading would move activations from the host to the host"
        ),
    ),
    Check(
        memory_flags.refuse_moving_nothing,
        why="--fine-grained-activation-offloading without modules fails an assertion without a message, and "
        "modules without it silently move nothing",
    ),
    Check(
        unsupported_options.take_local_implementation,
        condition=transformer_engine_present,
        why="--transformer-impl transformer_engine, the default, raises a NameError without "
        "TransformerEngine; the default of a fused RoPE fails too, with other errors",
    ),
)
