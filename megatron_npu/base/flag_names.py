"""Map flags of MindSpeed, Transformers and Megatron to the equivalent flags of this project."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Container
from typing import NamedTuple


class Instead(NamedTuple):
    """The replacement of a flag in those commands that have a certain other flag.

    Attributes:
        where: the flag that a command must have for ``text`` to apply to it.
        text: the flags to use in place of the unknown flag, or a sentence that begins with ``remove``.
    """

    where: str
    text: str


_WINDOW = "--pre-tockens"  # only commands and scripts that train Megatron's models have this flag
_ALWAYS_ON = (
    Instead(_WINDOW, "remove this flag, because fused operations are always on"),
    Instead("--fused-ops", "--fused-ops, which replaces all operations that have a fused implementation"),
)
_OFFLOADED = (Instead(_WINDOW, "--fine-grained-activation-offloading --offload-modules core_attn attn_proj"),)

_INSTEAD: dict[str, tuple[Instead, ...]] = {
    "--window-size": (Instead(_WINDOW, "--pre-tockens LEFT --next-tockens RIGHT"),),
    "--sliding-window": (
        Instead(_WINDOW, "--pre-tockens N, where N is one less than Transformers' sliding_window"),
    ),
    "--use-fused-rmsnorm": _ALWAYS_ON,
    "--use-fused-swiglu": _ALWAYS_ON,
    "--use-fused-rotary-pos-emb": _ALWAYS_ON,
    "--use-fused-ring-attention-update": _ALWAYS_ON,
    "--use-fusion-attn-v2": (Instead(_WINDOW, "remove this flag, because fused attention is always on"),),
    "--use-fused-moe-token-permute-and-unpermute": (Instead(_WINDOW, "--moe-permute-fusion"),),
    "--context-parallel-algo": (Instead(_WINDOW, "--cp-comm-type with p2p, a2a, all_gather or a2a+p2p"),),
    "--ulysses-degree-in-cp": (Instead(_WINDOW, "--hierarchical-context-parallel-sizes U R"),),
    "--use-ascend-mc2": (Instead(_WINDOW, "--tp-comm-overlap with --sequence-parallel"),),
    "--use-ascend-coc": (Instead(_WINDOW, "--tp-comm-overlap with --sequence-parallel"),),
    "--virtual-optimizer": (Instead(_WINDOW, "--swap-optimizer"),),
    "--recompute-activation-function": (
        Instead(_WINDOW, "--recompute-granularity selective --recompute-modules mlp"),
    ),
    "--recompute-norm": (
        Instead(_WINDOW, "--recompute-granularity selective --recompute-modules layernorm"),
    ),
    "--moe-zero-memory": (Instead(_WINDOW, "--recompute-modules moe_act"),),
    "--moe-tp-extend-ep": (Instead(_WINDOW, "--expert-tensor-parallel-size 1"),),
    "--npu-deterministic": (Instead(_WINDOW, "--deterministic-mode"),),
    "--use-cp-send-recv-overlap": (
        Instead(_WINDOW, "remove this flag, because --cp-comm-type p2p, the default, has no such switch"),
    ),
    "--swap-attention": _OFFLOADED,
    "--swap-modules": _OFFLOADED,
    "--disable-gloo-group": (Instead(_WINDOW, "--disable-gloo-process-groups"),),
    "--hccl-group-buffer": (
        Instead(_WINDOW, "--nccl-communicator-config-path FILE, with hccl_buffer_size for each group"),
    ),
    "--noop-layers": (Instead(_WINDOW, "--pipeline-model-parallel-layout"),),
}


# flags that no command has, because an environment variable is for all of them
_VARIABLES = {
    "--device": (
        Instead(
            "--micro-batch-size",
            "the environment variable MEGATRON_NPU_DEVICE, such as MEGATRON_NPU_DEVICE=npu",
        ),
    )
}


def instead_of(flag: str, known: Container[str]) -> str | None:
    """Return the replacement for a flag of another project, or for one that is an environment variable here.

    Args:
        flag: an unknown flag, such as ``--use-fused-rmsnorm``.
        known: the flags of the command or script.

    Returns:
        An instruction for an error message, such as ``use --swap-optimizer``, or None if there is no
        replacement that the command has.
    """
    for one in {**_INSTEAD, **_VARIABLES}.get(flag, ()):
        if one.where in known and all(name in known for name in re.findall(r"--[a-z][\w-]*", one.text)):
            return one.text if one.text.startswith("remove") else f"use {one.text}"
    return None


def nearest(flag: str, known: Collection[str]) -> list[str]:
    """Return up to three known flags with names similar to ``flag``, the most similar first."""
    return difflib.get_close_matches(flag, known, n=3)


def flags_of_others() -> list[str]:
    """Return the flags of other projects that have a replacement in this package."""
    return list(_INSTEAD)
