"""Fix ``tools/generate_samples_gpt.py``, whose calls no longer match the interface of upstream's model.

The script declares a flag that the tree now declares itself, and passes keys and values between steps in the
form that bigscience's model expects (``layer_past``). The GPT of this checkout otherwise keeps them in
``InferenceParams``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from torch import Tensor

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, around

_TWICE = "--local_rank"  # of the checkout, and of the tool


@around(
    "megatron.arguments:parse_args",
    why=(
        "tools/generate_samples_gpt.py declares --local_rank, which the tree now declares too, so the "
        "tool raises an ArgumentError"
    ),
    upstream_bug=True,
    until=UNTIL,
    order=1,
)
def with_flag_of_the_tool(
    original: Callable[..., argparse.Namespace], extra_args_provider: Any = None, *args: Any, **kwargs: Any
) -> argparse.Namespace:
    """Allow the script to declare a flag that is already declared.

    The script's declaration takes precedence.
    """

    def provide(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        declared = parser._option_string_actions
        of_the_tree = declared.pop(_TWICE)
        extended: argparse.ArgumentParser = extra_args_provider(parser)
        declared.setdefault(_TWICE, of_the_tree)
        return extended

    return original(extra_args_provider and provide, *args, **kwargs)


@around(
    "megatron.text_generation_utils:forward_step",
    why="tools/generate_samples_gpt.py passes keys and values to the model through an old interface and "
    "raises a TypeError; and padding entries of the vocabulary, whose tokens have no text, are sampled "
    "too",
    upstream_bug=True,
    until=UNTIL,
)
def forward_step(original: Callable[..., Any], model: Any, *args: Any, **kwargs: Any) -> Any:
    """Run one generation step, adapting upstream's call to the interface of the model's key-value cache."""
    return original(_Remembering(model), *args, **kwargs)


class _Remembering:
    """Wrapper with a key-value cache through which ``megatron.text_generation_utils`` can call a model of
    this checkout.
    """

    def __init__(self, model: Any) -> None:
        from megatron import text_generation_utils as tool

        wrappers = (tool.torchDDP, tool.LocalDDP, tool.Float16Module)
        self._model = model
        self.set_input_tensor = tool.unwrap_model(model, wrappers).set_input_tensor

    def __call__(
        self,
        tokens: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor,
        *,
        tokentype_ids: Tensor | None,
        layer_past: Any,
        get_key_value: bool | None,
        forward_method_parallel_output: bool | None,
    ) -> Any:
        """Run the model on the given tokens, and return the output ``[b, s, v]``.

        With ``get_key_value``, the cache of all tokens so far is returned too.

        Args:
            tokens: ``[b, s]``; with ``get_key_value``, only those that have not been processed yet.
            position_ids: the positions of the tokens.
            attention_mask: ``[1 or b, 1, all, all]`` for the whole sequence, True where masked.
            tokentype_ids: ``[b, s]``.
            layer_past: the cache that the last call returned, or None in the first call.
            get_key_value: whether to keep keys and values.
            forward_method_parallel_output: ignored, because the model was built with this setting.
        """
        if get_key_value:
            memory = layer_past or _memory(tokens.size(0), attention_mask.size(-1))
            end = memory.sequence_len_offset + tokens.size(1)
            mask = attention_mask[..., memory.sequence_len_offset : end, :end]
        else:
            memory, mask = None, attention_mask
        output, _ = self._model(
            tokens, position_ids, mask, tokentype_ids=tokentype_ids, inference_params=memory
        )
        _forbid_padding(output)
        if memory is None:
            return output
        memory.sequence_len_offset = end
        return output, memory


def _memory(batch: int, length: int) -> Any:
    """Return an empty key-value cache, with a tensor ``[length, batch, n, d]`` for each layer."""
    from megatron.text_generation.forward_step import InferenceParams

    return InferenceParams(batch, length)


def _forbid_padding(output: Tensor) -> None:
    """Set the last stage's logits ``[b, s, v]`` of padding entries of the vocabulary to -inf."""
    from megatron import get_tokenizer
    from megatron.core import mpu

    if mpu.is_pipeline_last_stage():
        output[..., get_tokenizer().vocab_size :] = float("-inf")
