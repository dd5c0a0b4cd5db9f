"""Names that upstream has removed but libraries still use; connects ``transformer.enums``."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import wrap


@wrap(
    "megatron.core.transformer.enums:ModelType",
    versions=">=0.17",
    why="mbridge 0.15.1 compares every model's type with that of T5's (core/util.py:52, 83), which is gone",
)
def with_type_of_two_stacks(original: type) -> type:
    """Return upstream's enumeration with the name; it is no member, so that no model is of that type."""
    if not hasattr(original, "encoder_and_decoder"):
        original.encoder_and_decoder = "encoder_and_decoder"  # type: ignore[attr-defined]
    return original
