"""Checks of a stock script's arguments that run before upstream's own.

Each check is a function of the parsed arguments, listed in ``CHECKS`` with its reason. To add one, write the
function and its entry there.
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
from megatron_npu.adaptors.megatron_core.options import optimizer_checks, unsupported_options
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
    """A check or change of the arguments before upstream validates them.

    Attributes:
        run: changes the arguments, or raises a UsageError.
        why: the reason, for the ledger.
        devices: the devices that it applies to.
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
    """Translate flags of older Megatron versions to their current meaning, so that upstream accepts them."""
    older_flags.apply(args, sys.argv[1:])
    args.checkpoint_activations = False


def name_the_rerun_mode(args: argparse.Namespace) -> None:
    """Rename --rerun-mode report_stats to the value that the state machine knows."""
    if args.rerun_mode == "report_stats":
        args.rerun_mode = "report_determinism_stats"


def evaluate_at_the_end_alone(args: argparse.Namespace) -> None:
    """Let a script without --eval-interval, which has no default since 0.16, evaluate only after training.

    The training loop accepts None, but the code that counts the samples beforehand divides by it.
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
        line = "%s has no effect: the script does not pass it to the model. %s=1 does"
        logger.warning(line, flag, settings.BACKPORT.name)


def name_the_length_for_servers(args: argparse.Namespace) -> None:
    """Also store --inference-max-seq-length under the name that the text-generation server reads."""
    if hasattr(args, "inference_max_seq_length") and not hasattr(args, "inference_max_sequence_length"):
        args.inference_max_sequence_length = args.inference_max_seq_length


def refuse_reruns_of_hybrid_batches(args: argparse.Namespace) -> None:
    """Reject reruns of batches that are already distributed to the ranks, before anything is built."""
    if getattr(args, "hybrid_context_parallel", False) and args.rerun_mode != "disabled":
        raise UsageError(
            f"--hybrid-context-parallel with --rerun-mode {args.rerun_mode}",
            "--rerun-mode disabled: Megatron cannot repeat a batch that is already distributed to the ranks",
            "Add --rerun-mode disabled.",
        )


def refuse_grouped_experts_of_other_kinds(args: argparse.Namespace) -> None:
    """Reject grouped experts with biases or without bf16 before 0.17, whose grouped MLP rejects them."""
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
                f"--moe-grouped-gemm {given} with Megatron {package_info.__version__}",
                f"{flag} with it: its grouped experts support only bf16 without biases",
                f"Add {flag}, leave out --moe-grouped-gemm, or use Megatron 0.17 or newer.",
            )


def refuse_xavier_weights(args: argparse.Namespace) -> None:
    """Reject a flag whose value upstream assigns to a field that no configuration has."""
    if getattr(args, "init_method_xavier_uniform", False):
        raise UsageError(
            "--init-method-xavier-uniform",
            "no such flag: Megatron sets a field that its configuration does not have",
            "Remove it; --init-method-std sets the standard deviation of the weights.",
        )


def refuse_flex_dispatching(args: argparse.Namespace) -> None:
    """Reject the dispatcher that sends through a CUDA library."""
    if args.num_experts and args.moe_token_dispatcher_type == "flex":
        raise UsageError(
            "--moe-token-dispatcher-type flex",
            "allgather or alltoall: flex uses DeepEP or HybridEP, which are CUDA libraries",
            "Pass alltoall.",
        )


def refuse_wrong_hierarchical_sizes(args: argparse.Namespace) -> None:
    """Reject mismatched hierarchical sizes with a message; upstream only asserts."""
    sizes = getattr(args, "hierarchical_context_parallel_sizes", None)
    if sizes and math.prod(sizes) != args.context_parallel_size:
        raise UsageError(
            f"--hierarchical-context-parallel-sizes {' '.join(map(str, sizes))} with "
            f"--context-parallel-size {args.context_parallel_size}",
            "sizes whose product is the context-parallel size",
            "Change one of the two flags.",
        )


def refuse_tools_of_cuda(args: argparse.Namespace) -> None:
    """Reject tools that need CUDA before anything is built."""
    device = devices.current().name
    if args.profile and not args.use_pytorch_profiler:
        raise UsageError(
            f"--profile without --use-pytorch-profiler on the {device} device",
            "--profile --use-pytorch-profiler",
            "Add the second flag: without it Megatron profiles for Nsight Systems, which supports only GPUs.",
        )
    if args.record_memory_history and device == "cpu":
        raise UsageError(
            "--record-memory-history on the cpu device",
            "a device whose allocator records a history",
            "Remove the flag: torch's host allocator records none.",
        )


def do_without_cuda(args: argparse.Namespace) -> None:
    """Reject options that need NCCL or SHARP; switch off CUDA graphs and log that."""
    unsupported_options.refuse(args, unsupported_options.NEED_CUDA, "CUDA")
    unsupported_options.do_without_cuda_graphs(args)


def refuse_linear_loss_alone(args: argparse.Namespace) -> None:
    """Reject the flag alone: upstream's loss uses it only together with --cross-entropy-loss-fusion."""
    if args.cross_entropy_fusion_impl == "linear" and not args.cross_entropy_loss_fusion:
        raise UsageError(
            "--cross-entropy-fusion-impl linear without --cross-entropy-loss-fusion",
            "both flags",
            "Add --cross-entropy-loss-fusion: without it Megatron ignores both.",
        )


def set_variables_of_cuda(args: argparse.Namespace) -> None:
    """Set the variables that upstream requires if they are unset; launch scripts often set the first to 1."""
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
        "--warmup and --model-parallel-size with the traceback of an assertion",
    ),
    Check(
        name_the_rerun_mode,
        why="--rerun-mode report_stats is a ValueError when the run starts: the state machine calls that "
        "mode report_determinism_stats, which the parser refuses (0.12 to 0.16)",
        until=NOT_FIXED,
    ),
    Check(
        evaluate_at_the_end_alone,
        why="without --eval-interval a script of 0.16 or newer ends in a TypeError, when its data are built",
        until=NOT_FIXED,
    ),
    Check(
        tell_factors_without_effect,
        why="--rotary-seq-len-interpolation-factor and --rope-scaling-factor have no effect, and nothing "
        "says so (0.12 to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        name_the_length_for_servers,
        why="tools/run_text_generation_server.py and run_inference_performance_test.py are AttributeErrors: "
        "they read inference_max_sequence_length of a flag that is inference_max_seq_length (0.18 to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        refuse_reruns_of_hybrid_batches,
        why="--hybrid-context-parallel (0.16 to 0.19) is an AssertionError in the first step "
        "with any --rerun-mode but disabled, which is not the default: training.py puts its scheduler around "
        "the iterator that can be rewound",
        until=NOT_FIXED,
    ),
    Check(
        optimizer_checks.refuse_offload_in_fp32,
        why="--optimizer-cpu-offload with fp32 parameters is a ValueError of torch when the optimizer is "
        "built: the offloading one is handed views of them, which are not leaves (0.12 to 0.16, every "
        "device)",
        until=NOT_FIXED,
    ),
    Check(
        refuse_linear_loss_alone,
        why="--cross-entropy-fusion-impl alone is silently left out",
    ),
    Check(
        optimizer_checks.refuse_muon_without_its_package,
        why="--optimizer muon ends in an assertion without emerging_optimizers, when the model is there",
    ),
    Check(
        optimizer_checks.refuse_lion_that_nothing_builds,
        why="--optimizer lion of 0.17 is a ValueError, Invalid optimizer type!, when the model is there",
    ),
    Check(
        optimizer_checks.refuse_soap_that_cannot_be_saved,
        why="--optimizer soap of 0.18 and 0.19 ends in an assertion when it is saved in a distributed format",
    ),
    Check(
        optimizer_checks.refuse_shares_that_cannot_be_saved,
        why="--optimizer muon --use-distributed-optimizer of 0.18 ends in an AttributeError when it is saved "
        "in --ckpt-format torch",
    ),
    Check(
        refuse_grouped_experts_of_other_kinds,
        condition=te_layers_present,
        why="--moe-grouped-gemm with biases, or not in bf16, is an assertion of upstream's grouped MLP when "
        "the model is there, or in the first step (0.12 to 0.16)",
    ),
    Check(
        refuse_xavier_weights,
        why="--init-method-xavier-uniform is a TypeError when the configuration is made: it is handed on as "
        "scaled_init_method, which TransformerConfig does not have (0.12 to 0.20)",
        until=NOT_FIXED,
    ),
    Check(
        refuse_flex_dispatching,
        devices=WITHOUT_CUDA,
        condition=functools.partial(installed, "deep_ep"),
        why="--moe-token-dispatcher-type flex ends in an assertion, or an ImportError, when the model is "
        "built",
    ),
    Check(
        refuse_wrong_hierarchical_sizes,
        why="--hierarchical-context-parallel-sizes that do not make up the ranks are an assertion without "
        "words",
    ),
    Check(
        refuse_tools_of_cuda,
        devices=WITHOUT_CUDA,
        why="--profile without --use-pytorch-profiler is for Nsight Systems, and --record-memory-history "
        "needs an allocator that keeps one: both end in an AttributeError, the first in the middle of the "
        "run",
    ),
    Check(
        do_without_cuda,
        devices=WITHOUT_CUDA,
        why="upstream checks the options of CUDA graphs against others, which mean nothing without the "
        "graphs; buffers registered with NCCL, and SHARP, end in errors of torch in the middle of the start",
    ),
    Check(
        set_variables_of_cuda,
        why="upstream asks for CUDA_DEVICE_MAX_CONNECTIONS=1 with tensor or context parallelism, for "
        "anything else with FSDP, and for an NCCL_ALGO with --deterministic-mode; without CUDA they mean "
        "nothing, and with it they are what its examples set",
    ),
    Check(
        memory_flags.check_precision_aware_optimizer,
        condition=fused_optimizer_present,
        why="--reuse-fp32-param is for bf16 parameters; --use-precision-aware-optimizer ends in an "
        "assertion without the distributed optimizer, and loads rounded main weights from --ckpt-format "
        "torch",
    ),
    Check(
        swapped_optimizer.tell_adam,
        condition=fused_optimizer_present,
        why="Megatron has no argument for --swap-optimizer, which needs an NPU and fp32 moments",
    ),
    Check(
        hccl_buffers.choose,
        why="--hccl-group-buffer-adaptive is for HCCL alone; the sizes follow from the arguments",
    ),
    Check(
        communicators.refuse_an_unreadable_file,
        devices=WITHOUT_CUDA,
        why="a file of --nccl-communicator-config-path that is not there, or is no YAML, is a traceback",
    ),
    Check(
        tensor_parallel_overlap.refuse_arguments,
        devices=("npu",),
        condition=transformer_engine_present,
        why="--tp-comm-overlap without --sequence-parallel is an assertion of upstream",
    ),
    Check(
        activation_offloading.refuse_on_the_host,
        devices=("cpu",),
        why="--fine-grained-activation-offloading would move activations from the host to the host",
    ),
    Check(
        memory_flags.refuse_moving_nothing,
        why="--fine-grained-activation-offloading without modules is an assertion without words, and modules "
        "without it move nothing, and nothing is said",
    ),
    Check(
        unsupported_options.take_local_implementation,
        condition=transformer_engine_present,
        why="--transformer-impl transformer_engine, the default, ends in a NameError without "
        "TransformerEngine; so does, in other errors, the default of a fused RoPE",
    ),
)
