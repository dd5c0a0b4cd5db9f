"""Define the acceleration switches of ``train`` and ``pretrain``, some of which exclude each other.

The names are those of the PAI-Rapidformer document. The effect of a switch is implemented where the model is
prepared: in ``finetune`` for Transformers and user models, and in ``pretrain`` for Megatron's models.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.arg_parser import whole

SHARDINGS = ("none", "zero-1", "zero-2", "zero-3", "fsdp")
GRAPH, DOCUMENTED_GRAPH = "--graph-optimization", "--onnx-runtime-training"  # ours, and the document's
FULLY = ("zero-2", "zero-3", "fsdp")  # those that shard more than the optimizer's states
_SHARDED = (  # by stage of ZeRO
    "optimizer states",
    "optimizer states and gradients",
    "optimizer states, gradients and parameters",
)


@dataclass(frozen=True)
class Switches:
    """The acceleration switches that are on.

    ``Switches()`` enables none.

    Attributes:
        mixed_precision: ``bf16`` or ``fp16`` matmuls with fp32 main weights, or None for fp32.
        sharding: one of ``SHARDINGS``, what the data-parallel ranks shard: ``zero-1`` optimizer states,
            ``zero-2`` also gradients, ``zero-3`` and ``fsdp`` also parameters.
        cpu_offload: whether to store the sharded states (without sharding, the optimizer states) in host
            memory.
        checkpoint_activations: whether to store only each block's input, and recompute the rest in the
            backward pass.
        graph_optimization: whether to compile the blocks with torch.compile.
        graph_word: the flag that requested graphs.
        dynamic_shape: whether to pad batches to a few lengths, with one set of graphs for all of them.
        fused_ops: whether to replace the model's operations with this project's.
        lora_rank: the rank of the adapters, if only these are trained; 0 trains all weights.
    """

    mixed_precision: str | None = None
    sharding: str = "none"
    cpu_offload: bool = False
    checkpoint_activations: bool = False
    graph_optimization: bool = False
    graph_word: str = GRAPH
    dynamic_shape: bool = False
    fused_ops: bool = False
    lora_rank: int = 0

    @classmethod
    def from_args(cls, args: argparse.Namespace) -> Switches:
        """Read the switches from a namespace of parsed flags."""
        return cls(**{name: getattr(args, name) for name in cls.__dataclass_fields__})


class _Graph(argparse.Action):
    """Argparse action that turns on compiled graphs and records which of two flags was used."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        """Set ``graph_optimization`` and ``graph_word`` in the namespace."""
        namespace.graph_optimization, namespace.graph_word = True, option_string or GRAPH


def add_switches(parser: argparse.ArgumentParser) -> None:
    """Add the acceleration switches to a parser."""
    group = parser.add_argument_group("acceleration")
    add, share_out = group.add_argument, group.add_mutually_exclusive_group().add_argument
    add(
        "--mixed-precision",
        nargs="?",
        choices=["bf16", "fp16"],
        const="bf16",
        help="compute in 16 bits with fp32 main weights; without a value: bf16",
    )
    for stage, what in enumerate(_SHARDED, 1):
        share_out(
            f"--zero-{stage}-memory-optimization",
            action="store_const",
            const=f"zero-{stage}",
            dest="sharding",
            default="none",
            help=f"shard {what} over the data-parallel ranks",
        )
    share_out(
        "--fsdp-memory-optimization",
        action="store_const",
        const="fsdp",
        dest="sharding",
        help="shard parameters, gradients and optimizer states with torch's fully_shard, like zero-3",
    )
    add(
        "--cpu-offload",
        action="store_true",
        help="keep sharded states in host memory and update the weights there",
    )
    add("--checkpoint-activations", action="store_true", help="recompute activations in the backward pass")
    add(
        GRAPH,
        DOCUMENTED_GRAPH,
        dest="graph_optimization",
        action=_Graph,
        nargs=0,
        default=False,
        help=(
            "compile the model's blocks with torch.compile; on an NPU, for which torch.compile has no "
            "kernels, --onnx-runtime-training means --fused-ops"
        ),
    )
    parser.set_defaults(graph_word=GRAPH)
    add(
        "--dynamic-shape",
        action="store_true",
        help="pad batches to a few lengths, so that a few compiled graphs cover all batches",
    )
    add(
        "--fused-ops",
        action="store_true",
        help="replace the model's operations with this package's fused operations",
    )
    add(
        "--lora-rank",
        type=whole,
        default=0,
        metavar="R",
        help="train only LoRA adapters of rank R (0: train all weights)",
    )
