"""Read ``config.json``, and check that each of its keys is used, has no effect, or is rejected."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError

NAME = "config.json"
_MOST = 2.0**53  # up to here each whole number is a float
_LONGEST = 200  # characters of a value in a message

# Keys that do not change the logits of a causal language model in evaluation: where it came from, how it is
# stored, what else it was trained for, how text is drawn from its logits.
HARMLESS = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash
    _flash_attn_2_enabled _model_name_or_path _name_or_path _num_labels architectures auto_map
    attn_implementation bad_words_ids begin_suppress_tokens bos_token_id cache_implementation
    chunk_size_feed_forward cls_token_id decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label is_decoder label2id
    length_penalty mask_token_id max_length max_new_tokens min_length model_max_length model_type
    neftune_noise_alpha no_repeat_ngram_size num_beam_groups num_beams num_labels num_return_sequences
    output_attentions output_hidden_states output_past output_scores pad_token_id prefix pretraining_tp
    problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate sep_token_id
    summary_activation summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
    suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p torch_dtype
    torchscript transformers.js_config transformers_version typical_p unk_token_id unsloth_fixed
    unsloth_version use_bfloat16 use_cache use_reentrant_checkpointing
    """.split()
)
# Keys that would, and the one value of each that does not.
_HARMLESS_VALUES: dict[str, Any] = {
    "is_llama_config": True,
    "pruned_heads": {},
    "qk_layer_norms": False,
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
}


class Config:
    """The keys of a ``config.json`` file, with a record of which of them have been handled.

    Args:
        values: the keys with their values.
        path: the path of the file, used in error messages.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.path = path
        # null says that a key is not used
        self._null = {key for key, value in values.items() if value is None}
        self._values = {key: value for key, value in values.items() if value is not None}
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if the key is absent.

        Raises:
            UsageError: the key is absent, and there is no default.
        """
        self._seen.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise UsageError(f"{self.path} has no {key}, which the conversion requires. Add the key.")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """Return the value of a key after checking that it is a positive integer.

        Raises:
            UsageError: the key is absent, or its value is not a positive integer.
        """
        value = self.take(key, default)
        if not is_number(value) or value != int(value) or value < 1:
            raise self.refusal(key, value, "a positive integer")
        return int(value)

    def whole(self, key: str, default: int | None = None) -> int:
        """Return the value of a key after checking that it is a non-negative integer.

        Raises:
            UsageError: the key is absent, or its value is not a non-negative integer.
        """
        value = self.take(key, default)
        if not is_number(value) or value != int(value) or value < 0:
            raise self.refusal(key, value, "a non-negative integer")
        return int(value)

    def real(self, key: str, default: float | None = None) -> float:
        """Return the value of a key after checking that it is a non-negative number.

        Raises:
            UsageError: the key is absent, or its value is not a non-negative number.
        """
        value = self.take(key, default)
        if not is_number(value) or value < 0:
            raise self.refusal(key, value, "a non-negative number")
        return value

    def text(self, key: str) -> str:
        """Return the value of a key after checking that it is a string.

        Raises:
            UsageError: the key is absent, or its value is not a string.
        """
        value = self.take(key)
        if not isinstance(value, str):
            raise self.refusal(key, value, "a string")
        return value

    def items(self, key: str) -> list[Any]:
        """Return the list stored under a key, or an empty list if the key is absent.

        Raises:
            UsageError: the value is not a list.
        """
        value = self.take(key, [])
        if not isinstance(value, list):
            raise self.refusal(key, value, "a list")
        return value

    def table(self, key: str) -> dict[str, Any]:
        """Return the nested object stored under a key, or an empty one if the key is absent.

        Raises:
            UsageError: the value is not an object.
        """
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return dict(value)

    def require(self, key: str, *allowed: Any, absent: Any = None) -> Any:
        """Return the value of a key after checking that it is one of the given values.

        The first value is the default.

        Raises:
            UsageError: the key has another value.
        """
        value = self.take(key, allowed[0] if absent is None else absent)
        if value not in allowed:
            raise self.refusal(key, value, " or ".join(map(_shown, allowed)))
        return value

    def has(self, key: str) -> bool:
        """Return True if the key exists and its value is not null."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Return True if the value of a key is null.

        Some families distinguish null from a missing key.
        """
        return key in self._null

    def ignore(self, *keys: str) -> None:
        """Mark keys that have no effect on the model as handled."""
        self._seen.update(keys)

    def refusal(self, key: str, value: Any, expected: str) -> UsageError:
        """Return the error for a value that cannot be expressed by Megatron's flags."""
        return UsageError(
            f"{self.path}: {key} must be {expected}, but it is {_shown(value)}, which cannot be converted. "
            "Nothing was written."
        )

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Check that all keys have been handled.

        Raises:
            UsageError: a key is neither used nor known to have no effect.
        """
        rest = sorted(self._values.keys() - self._seen - HARMLESS - set(harmless))
        rest = [key for key in rest if _HARMLESS_VALUES.get(key, ...) != self._values[key]]
        if rest:
            raise UsageError(
                f"{self.path} has keys that this conversion does not support: "
                f"{', '.join(f'{key} {_shown(self._values[key])}' for key in rest)}. Remove those that do "
                "not change the model's results; the others cannot be converted."
            )


def is_number(value: Any) -> bool:
    """Return True if a JSON value is a number of plausible magnitude."""
    return isinstance(value, int | float) and not isinstance(value, bool) and -_MOST <= value <= _MOST


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"


def read(folder: Path) -> dict[str, Any]:
    """Read the keys of the file ``folder/config.json``.

    Raises:
        UsageError: the file does not exist, or is not a JSON object.
    """
    path = folder / NAME
    try:
        values = json.loads(files.text(path))
    except RecursionError as error:
        raise UsageError(
            f"{path} is not a valid JSON object: its brackets are nested too deeply. Get a fresh copy."
        ) from error
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path} is not the config.json of a Hugging Face model: {reason}. Pass the model's folder."
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a JSON object. Pass the model's folder.")
    return values
