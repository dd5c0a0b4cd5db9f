"""Load the checkpoint of a hybrid model into a GPT model.

Upstream's main branch supports only the reverse direction.

Patches ``megatron.training.checkpointing`` and ``megatron.core.dist_checkpointing.gpt_checkpoint_interop``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import hybrid_layers

_WHY = (
    "main deprecates GPT in favor of HybridModel and loads GPT checkpoints into a hybrid; loading a "
    "hybrid's checkpoint into a GPT raises a RuntimeError, although *-*- is the same model"
)


class IntoGPT:
    """Marker that replaces upstream's layer maps when a hybrid checkpoint is loaded into a GPT model."""


@around("megatron.training.checkpointing:_maybe_setup_gpt_to_hybrid_load", versions=">=0.20", why=_WHY)
def accept_a_hybrid(
    original: Callable[..., tuple[Any, bool]],
    args: argparse.Namespace,
    ckpt_args: argparse.Namespace,
    model: Sequence[Any],
) -> tuple[Any, bool]:
    """Return ``IntoGPT`` instead of raising upstream's error, and return whether the optimizer state is
    loaded.
    """
    pattern = _pattern(ckpt_args)
    if not pattern or _pattern(args) or args.ckpt_format != "torch_dist":
        return original(args, ckpt_args, model)
    layers = hybrid_layers.layers_of_gpt(pattern)
    if layers != args.num_layers:
        raise UsageError(
            f"--num-layers must be {layers} for the hybrid model's checkpoint with the pattern {pattern}, "
            "because one attention layer and one MLP layer of the pattern form one GPT layer, but got "
            f"{args.num_layers}. Pass --num-layers {layers}."
        )
    load_optimizer = not args.no_load_optim and not getattr(ckpt_args, "no_save_optim", False)
    if load_optimizer:
        _require_named_state(ckpt_args)
    return IntoGPT(), load_optimizer


def _pattern(args: argparse.Namespace) -> str | None:
    return getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)


def _require_named_state(ckpt_args: argparse.Namespace) -> None:
    """Check that the optimizer state is not stored in buckets, whose order of parameters is specific to the
    hybrid model.

    Raises:
        UsageError: it is stored in buckets.
    """
    named = getattr(ckpt_args, "dist_ckpt_optim_fully_reshardable", False)
    if getattr(ckpt_args, "use_distributed_optimizer", False) and not named:
        raise UsageError(
            "a hybrid model's checkpoint that stores the distributed optimizer's state in buckets cannot "
            "be loaded into a GPT model; it must have been saved with --dist-ckpt-optim-fully-reshardable. "
            "Save it again with that flag, or add --no-load-optim to load only the weights."
        )


@around(
    "megatron.core.dist_checkpointing.gpt_checkpoint_interop:retarget_sharded_state_dict_to_gpt_checkpoint",
    versions=">=0.20",
    why=_WHY,
)
def look_where_the_hybrid_has_it(
    original: Callable[..., None], sharded_state_dict: dict[str, Any], layer_maps: Any
) -> None:
    """Map the entries of a GPT model's state to those of the hybrid model if ``layer_maps`` is
    ``IntoGPT``.
    """
    if isinstance(layer_maps, IntoGPT):
        hybrid_layers.point_at(sharded_state_dict)
    else:
        original(sharded_state_dict, layer_maps)
