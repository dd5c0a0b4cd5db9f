"""What ``megatron.core.tensor_parallel.random`` is given through our patches."""

from __future__ import annotations

from typing import Any

from megatron_npu.adaptors.megatron_core.run import random


def test_what_a_later_version_asks_for_besides_fp8_is_handed_on() -> None:
    """Upstream's main of August 2026 has two parameters more."""
    given: list[tuple[Any, ...]] = []

    def original(*args: Any, **kwargs: Any) -> None:
        given.append((*args, kwargs))

    random.false_is_no_fp8(original, "self")
    random.false_is_no_fp8(original, "self", False, "manager", retain_input_tensors=True)
    random.false_is_no_fp8(original, "self", "recipe")
    assert given == [
        ("self", None, {}),
        ("self", None, "manager", {"retain_input_tensors": True}),
        ("self", "recipe", {}),
    ]
