"""Check the flag --cuda-graph-impl."""

from __future__ import annotations

from argparse import Namespace

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.dispatch import report_fallback
from megatron_npu.pretrain.flags import derive

_FLAG = "--cuda-graph-impl local"


def check(args: Namespace) -> None:
    """Check that every step of the run can replay the same CUDA graph.

    On devices without CUDA, the graph is disabled.

    Raises:
        UsageError: a flag makes steps differ, or requires the host to read results during a step.
        FallbackForbiddenError: the device has no CUDA graphs, and strict mode is enabled.
    """
    if args.cuda_graph_impl == "none":
        return
    name = devices.current().name
    if name != "cuda":
        derive.no_step_graph(args)
        report_fallback(_FLAG, f"there are no CUDA graphs on the {name} device", does="does nothing")
        return
    for given, why in _obstacles(args):
        raise UsageError(
            f"{_FLAG} cannot be used with {given}: {why}",
            remedy=f"Remove {_FLAG.split()[0]}, or the other flag.",
        )


def _obstacles(args: Namespace) -> list[tuple[str, str]]:
    """Return the given flags that prevent the use of a CUDA graph, each with a reason."""
    changing, reads = (
        "each step must generate different random numbers",
        "the host reads results during a step",
    )
    found = [
        (
            args.pipeline_model_parallel_size > 1,
            "--pipeline-model-parallel-size",
            "pipeline stages wait for each other",
        ),
        (args.context_parallel_size > 1, "--context-parallel-size", "the combination is not tested"),
        (bool(args.num_experts), "--num-experts", "the number of tokens per expert changes between steps"),
        (bool(args.mtp_num_layers), "--mtp-num-layers", reads),
        (args.fp16, "--fp16", "the loss scale changes between steps"),
        (args.attention_dropout > 0, "--attention-dropout above 0", changing),
        (args.hidden_dropout > 0, "--hidden-dropout above 0", changing),
        (bool(args.recompute_granularity), "--recompute-granularity", "it resets the random generators"),
        (
            args.overlap_grad_reduce,
            "--overlap-grad-reduce",
            "gradients are sent while others are still being computed",
        ),
        (args.fully_sharded, "fully sharded weights", "parameters are gathered during the forward pass"),
        (bool(settings.verified_operations()), settings.VERIFY.name, reads),
    ]
    return [(given, why) for holds, given, why in found if holds]
