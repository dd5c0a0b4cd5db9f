"""Provide names that upstream has removed or changed, but that libraries built on upstream still use.

Patches ``transformer.enums``, ``transformer.transformer_layer`` and ``distributed.fsdp.mcore_fsdp_adapter``
of ``megatron.core``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.megatron_core.decorators import wrap

# What 0.20's TransformerLayer reads and a layer of its own kind says otherwise: nothing returns its residual.
_UNSET = {
    "_input_layernorm_returns_residual": False,
    "_pre_cross_attn_layernorm_returns_residual": False,
    "_pre_mlp_layernorm_returns_residual": False,
    "_legacy_forward_post_mlp": None,
}


@wrap(
    "megatron.core.transformer.enums:ModelType",
    versions=">=0.17",
    why="mbridge 0.15.1 compares every model's type with T5's (core/util.py:52, 83), which no longer exists",
)
def with_type_of_two_stacks(original: type) -> type:
    """Add a removed name to upstream's enumeration of model types.

    The name is not a member, so that no model has this type.
    """
    if not hasattr(original, "encoder_and_decoder"):
        original.encoder_and_decoder = "encoder_and_decoder"  # type: ignore[attr-defined]
    return original


@wrap(
    "megatron.core.transformer.transformer_layer:TransformerLayer",
    versions=">=0.20",
    why="mcore-bridge 1.6.5 builds the parts of its layer itself and runs upstream's forward, which reads "
    "fields set in 0.20's __init__: the first forward raises an AttributeError",
)
def with_fields_of_layers_that_build_themselves(original: type) -> type:
    """Set the fields that upstream's ``__init__`` sets for layers that do not call it."""
    for name, value in _UNSET.items():
        if not hasattr(original, name):
            setattr(original, name, value)
    return original


@wrap(
    "megatron.core.distributed.fsdp.mcore_fsdp_adapter:FullyShardedDataParallel",
    versions=">=0.20",
    why=(
        "mbridge 0.15.1 checks whether a model is an instance of this name (core/util.py:284), which "
        "raises a TypeError since the name became a function that creates one of two classes"
    ),
)
def as_type_of_either(original: Callable[..., Any]) -> type:
    """Return a type that creates objects by calling the function, and that accepts instances of both
    classes.
    """
    module = sys.modules[original.__module__]

    class Either(type):
        """Metaclass that makes ``FullyShardedDataParallel`` represent either of two classes."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(
                instance, (module.FullyShardedDataParallelV1, module.FullyShardedDataParallelV2)
            )

    return Either(original.__name__, (), {"__doc__": original.__doc__, "__wrapped__": staticmethod(original)})
