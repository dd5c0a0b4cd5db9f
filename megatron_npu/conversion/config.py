"""Reading ``config.json`` so that no key is overlooked: each is used, known to be harmless, or refused."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron_npu.errors import UsageError

NAME = "config.json"

# Keys that do not change the logits of a causal language model in evaluation.
HARMLESS = frozenset(
    "_attn_implementation_autoset _name_or_path architectures auto_map begin_suppress_tokens bos_token_id "
    "chunk_size_feed_forward decoder_start_token_id dtype eos_token_id finetuning_task forced_bos_token_id "
    "forced_eos_token_id gradient_checkpointing id2label label2id model_type num_labels output_attentions "
    "output_hidden_states output_past pad_token_id pretraining_tp problem_type return_dict "
    "return_dict_in_generate sep_token_id summary_activation summary_first_dropout summary_proj_to_labels "
    "summary_type summary_use_proj task_specific_params tokenizer_class torch_dtype torchscript "
    "transformers_version unsloth_version use_cache".split()
)


class Config:
    """The keys of a ``config.json``, and which of them have been dealt with.

    Args:
        values: the keys.
        path: the file, for messages.
    """

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.path = path
        # null says that a key is not used
        self._null = {key for key, value in values.items() if value is None}
        self._values = {key: value for key, value in values.items() if value is not None}
        self._seen: set[str] = set()

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of a key, ``default`` if it is absent.

        Raises:
            UsageError: it is absent, and there is no default.
        """
        self._seen.add(key)
        value = self._values.get(key, default)
        if value is None:
            raise UsageError(f"{self.path} has no {key}", "the config.json of a whole model", "Add it.")
        return value

    def number(self, key: str, default: int | None = None) -> int:
        """Return a whole number above 0.

        Raises:
            UsageError: it is absent, or none.
        """
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 1:
            raise self.refusal(key, value, "a whole number above 0")
        return int(value)

    def table(self, key: str) -> dict[str, Any]:
        """Return the keys inside a key; none if it is absent.

        Raises:
            UsageError: it is not an object.
        """
        value = self.take(key, {})
        if not isinstance(value, dict):
            raise self.refusal(key, value, "an object")
        return dict(value)

    def require(self, key: str, *allowed: Any, absent: Any = None) -> Any:
        """Return the value of a key that can have some values only; absent is the first of them.

        Raises:
            UsageError: it has another.
        """
        value = self.take(key, allowed[0] if absent is None else absent)
        if value not in allowed:
            raise self.refusal(key, value, " or ".join(map(_shown, allowed)))
        return value

    def has(self, key: str) -> bool:
        """Return whether there is such a key, with a value."""
        return key in self._values

    def is_null(self, key: str) -> bool:
        """Return whether a key is there and null, which some families tell from its absence."""
        return key in self._null

    def ignore(self, *keys: str) -> None:
        """Take keys that mean nothing beside the others."""
        self._seen.update(keys)

    def refusal(self, key: str, value: Any, expected: str) -> UsageError:
        """Return the error for a value that Megatron has no way to say."""
        return UsageError(
            f"{self.path}: {key} {_shown(value)}, which cannot be converted", expected, "Nothing was written."
        )

    def finish(self, harmless: Iterable[str] = ()) -> None:
        """Check that nothing is left over.

        Raises:
            UsageError: a key is neither used nor known to be harmless.
        """
        rest = sorted(self._values.keys() - self._seen - HARMLESS - set(harmless))
        if rest:
            raise UsageError(
                f"{self.path}: {', '.join(f'{key} {_shown(self._values[key])}' for key in rest)}",
                "keys that this conversion knows",
                "Take out what does not change the model's results; the rest cannot be converted.",
            )


def _shown(value: Any) -> str:
    return json.dumps(value, default=str)


def read(folder: Path) -> dict[str, Any]:
    """Return the keys of ``folder/config.json``.

    Raises:
        UsageError: it is not there, or not a JSON object.
    """
    path = folder / NAME
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(
            f"{path}: {reason}", "the config.json of a Hugging Face model", "Give the model's folder."
        ) from error
    if not isinstance(values, dict):
        raise UsageError(f"{path}: another JSON", "an object", "Give the model's folder.")
    return values
