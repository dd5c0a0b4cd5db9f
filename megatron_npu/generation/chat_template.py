"""The chat template of a checkpoint: messages of several roles to the text that the model was trained on.

It is Jinja, and comes with the tokenizer of Hugging Face: a file of strangers. It is rendered as Transformers
renders it, in Jinja's sandbox, where a template reaches nothing but the messages.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import hf

FILE = "chat_template.jinja"
_KEY = "chat_template"  # of tokenizer_config.json and of chat_template.json
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Message = dict[str, Any]


class ChatTemplate:
    """A template and the special tokens that it may name.

    Args:
        source: Jinja.
        special_tokens: by their roles.

    Raises:
        UsageError: it is no Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        from jinja2 import TemplateError

        self.source, self._special = source, special_tokens
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise UsageError(
                f"the chat template: {error}", "a template of Jinja", "Get a fresh copy of the tokenizer."
            ) from error

    def render(self, messages: Sequence[Message], *, begin_answer: bool = True) -> str:
        """Return the text of messages.

        Args:
            messages: each with ``role`` and ``content``.
            begin_answer: go on to where the answer begins; else stop inside the last message, for the model
                to go on with that.

        Raises:
            UsageError: the template refuses the messages, or fails with them.
        """
        try:
            text = self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=begin_answer,
                **self._special,
            )
        except Exception as error:  # a template can fail in any way that an expression of Python can
            raise UsageError(
                f"messages that the chat template refuses: {str(error)[:200]}",
                "messages in the roles and the order that the model was trained with",
                "Change them.",
            ) from error
        if begin_answer:
            return text
        last = str(messages[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)] if last in text else text


def of(args: argparse.Namespace) -> ChatTemplate | None:
    """Return the template beside a checkpoint's tokenizer; None if there is none.

    Args:
        args: the flags of the training.

    Raises:
        UsageError: it is no Jinja.
    """
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return None
    folder = Path(args.tokenizer_model)
    source = _source(folder)
    if source is None:
        return None
    tokens = {role: hf.special_token(folder, role) for role in _SPECIAL}
    return ChatTemplate(source, {role: token for role, token in tokens.items() if token is not None})


def _source(folder: Path) -> str | None:
    try:
        return (folder / FILE).read_text(encoding="utf-8")
    except OSError:
        pass
    for name in (hf.CONFIG, "chat_template.json"):
        found = hf.read_object(folder / name).get(_KEY)
        if isinstance(found, list):  # several, each with a name
            named = {row.get("name"): row.get("template") for row in found if isinstance(row, dict)}
            found = named.get("default")
        if isinstance(found, str):
            return found
    return None


def _environment() -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _as_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _as_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
