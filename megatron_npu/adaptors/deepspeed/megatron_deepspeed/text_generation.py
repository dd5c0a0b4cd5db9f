"""Patch ``megatron.text_generation_utils`` so that padding entries of the vocabulary are never sampled.

``tools/generate_samples_gpt.py`` uses that module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import around


@around(
    "megatron.text_generation_utils:forward_step",
    why="padding entries of the vocabulary are sampled too, and decoding their tokens raises a KeyError in "
    "the tokenizer",
    upstream_bug=True,
    until="never: 8387ae17 is the last commit",
)
def forward_without_padding(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Set the logits ``[b, s, v]`` of padding entries of the vocabulary to -inf; v is the padded
    vocabulary size.
    """
    from megatron import get_tokenizer, mpu

    result = original(*args, **kwargs)
    if mpu.is_pipeline_last_stage():
        logits = result[0] if isinstance(result, tuple) else result
        logits[..., get_tokenizer().vocab_size :] = float("-inf")
    return result
