"""Define the options that are fixed when a core attention layer is built, such as the window and the
layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_npu.adaptors.megatron_core.options.script_arguments import script_arguments
from megatron_npu.base.errors import UsageError
from megatron_npu.ops.attention import Window
from megatron_npu.options.attention_flags import DEFAULTS, AttentionFlags

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p"]


@dataclass(frozen=True)
class LayerOptions:
    """Options of ``DotProductAttention`` that upstream's class does not have.

    Attributes:
        flags: the run's flags, with this layer's window.
        window_alone: whether the window is ``config.window_size``, which upstream uses instead of the mask
            and the causal triangle.
        cp_comm_type: how ranks share a layer's keys and values; None if the sequence is not partitioned.
    """

    flags: AttentionFlags
    window_alone: bool
    cp_comm_type: CommType | None

    @property
    def window(self) -> Window:
        """The attention window: how many keys before and after its own position a query attends to.

        None means no limit.
        """
        return self.flags.window


def layer_options(module: Any, cp_comm_type: str | None) -> LayerOptions:
    """Return the additional options of ``module`` after upstream's constructor has run.

    The flags ``--pre-tockens`` and ``--next-tockens`` override ``config.window_size`` in the layers that have
    a window. Neither flag applies to cross-attention, where the distance between positions of two
    different sequences has no meaning.

    Raises:
        UsageError: ``comm_type`` rejects the exchange.
    """
    flags = flags_of(module.config)
    communication = comm_type(module.config, cp_comm_type)
    if flags.window != (None, None) and module.attention_type != "cross":
        own = flags if _has_window(module) else flags.without_window()
        return LayerOptions(own, False, communication)
    # since 0.15 some layers have the configured window, others none: window_attn_skip_freq
    size = vars(module.scale_mask_softmax).get("window_size", module.config.window_size)
    if size is None:
        return LayerOptions(flags.without_window(), False, communication)
    left, right = (None if limit < 0 else limit for limit in size)  # -1 is TransformerEngine's "no limit"
    return LayerOptions(flags.with_window(left, right), True, communication)


def _has_window(module: Any) -> bool:
    """Return True if a layer uses window attention.

    ``--window-attn-skip-freq`` may disable it in some layers.

    megatron-core has had the flag since 0.15; for older versions, the built-in trainer sets it in the config.
    """
    config = module.config
    skipped = getattr(config, "window_attn_skip_freq", getattr(config, "layers_with_window", None))
    if skipped is None:
        return True
    if isinstance(skipped, int):
        return bool(module.layer_number % skipped)
    return bool(skipped[module.layer_number - 1])


def flags_of(config: Any) -> AttentionFlags:
    """Return the fused-attention flags for a layer with this TransformerConfig.

    The built-in trainer, or a program that builds its model in Python, sets ``config.attention_flags``; a
    stock script has the flags among its arguments.
    """
    flags: AttentionFlags | None = getattr(config, "attention_flags", None)
    if flags is not None:
        return flags
    args = script_arguments()  # of a script of ours: any object with these attributes, or without
    return DEFAULTS if args is None else AttentionFlags.from_args(args)


def comm_type(config: Any, cp_comm_type: str | None) -> CommType | None:
    """Return how the ranks of a context-parallel group share a layer's keys and values.

    Return None if the sequence is not partitioned.

    Args:
        config: the TransformerConfig. With ``hybrid_context_parallel`` (since 0.16), each batch specifies the
            number of parts into which it is split.
        cp_comm_type: the setting of this layer; None means p2p, as in TransformerEngine. ``a2a+p2p``
            exchanges heads among near ranks and keys among far ranks.

    Raises:
        UsageError: the name is unknown; ``a2a`` or ``a2a+p2p`` is given for heads, or groups of heads, that
            cannot be distributed evenly; or ``a2a+p2p`` is given without the two sizes.
    """
    if config.context_parallel_size == 1 and not getattr(config, "hybrid_context_parallel", False):
        return None
    if cp_comm_type in (None, "p2p"):
        return "p2p"
    if cp_comm_type in ("all_gather", "allgather"):  # the one in the configuration, the other in the help
        return "all_gather"
    if cp_comm_type == "a2a":
        _check_heads(config, cp_comm_type, config.context_parallel_size)
        return "a2a"
    if cp_comm_type == "a2a+p2p":
        _check_heads(config, cp_comm_type, _near_ranks(config))
        return "a2a+p2p"
    raise UsageError(
        f"--cp-comm-type must be p2p, all_gather, a2a or a2a+p2p, but got {cp_comm_type}. Pass one of "
        "these, or one per layer."
    )


def _near_ranks(config: Any) -> int:
    """Return the number of ranks in each group whose members exchange heads."""
    sizes: Sequence[int] = getattr(config, "hierarchical_context_parallel_sizes", None) or ()
    if len(sizes) != 2 or sizes[0] * sizes[1] != config.context_parallel_size:
        raise UsageError(
            "--cp-comm-type a2a+p2p requires two hierarchical sizes whose product is the context-parallel "
            f"size, {config.context_parallel_size}, but got {list(sizes)}. Pass "
            "--hierarchical-context-parallel-sizes NEAR FAR."
        )
    return sizes[0]


def _check_heads(config: Any, cp_comm_type: str, ranks: int) -> None:
    size = ranks * config.tensor_model_parallel_size
    groups = config.num_query_groups or config.num_attention_heads
    if groups % size:
        raise UsageError(
            f"--cp-comm-type {cp_comm_type} requires the number of key heads, {groups}, to be a multiple of "
            f"{size}, the tensor-parallel size times the number of ranks that exchange heads. Use "
            "--cp-comm-type all_gather."
        )
