"""Apply the chat template of a checkpoint, which converts messages to the text format used in its training.

Templates are written in Jinja and are distributed with the Hugging Face tokenizer, so they are untrusted.
Templates are rendered like in Transformers, in Jinja's sandbox, which only gives access to the messages, and
with limits of time and memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization import hf
from megatron_npu.pretrain.flags.plan_parts import TokenizerFlags

FILE = "chat_template.jinja"
_KEY = "chat_template"  # of tokenizer_config.json and of chat_template.json
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

_SECONDS = 5.0  # for a text; a template takes less than a thousandth

Message = dict[str, Any]


class ChatTemplate:
    """A chat template, and the special tokens that it may use.

    Args:
        source: the Jinja source.
        special_tokens: the special tokens by role.

    Raises:
        UsageError: the source is not valid Jinja.
    """

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        from jinja2 import TemplateError

        self.source, self._special = source, special_tokens
        try:
            self._template = _environment().from_string(source)
        except (TemplateError, RecursionError) as error:
            raise UsageError(
                f"the chat template is not a valid Jinja template: {str(error)[:200]}",
                remedy="Get a fresh copy of the tokenizer.",
            ) from error

    def render(self, messages: Sequence[Message], *, begin_answer: bool = True) -> str:
        """Convert messages to text with the chat template.

        Args:
            messages: the messages, each with a ``role`` and a ``content``.
            begin_answer: whether to add the start of the answer. If False, the text ends inside the last
                message, which the model then continues.

        Raises:
            UsageError: the template rejects the messages or fails.
        """
        from megatron_npu.generation.bounded_jinja import spending

        try:
            with _at_most(_SECONDS), spending():
                text = self._template.render(
                    messages=list(messages),
                    tools=None,
                    documents=None,
                    add_generation_prompt=begin_answer,
                    **self._special,
                )
        except Exception as error:  # a template can fail in any way that an expression of Python can
            raise UsageError(
                f"the chat template rejects the messages: {str(error)[:200]}. The messages must have the "
                "roles and the order that the model was trained on",
                remedy="Change the messages.",
            ) from error
        if begin_answer:
            return text
        last = str(messages[-1]["content"]).strip()
        return text[: text.rindex(last) + len(last)] if last in text else text


def of(flags: TokenizerFlags) -> ChatTemplate | None:
    """Return the chat template of a checkpoint's tokenizer, or None if it has none.

    Args:
        flags: the flags of the training run that specify the tokenizer.

    Raises:
        UsageError: the template is not valid Jinja.
    """
    if flags.tokenizer_type != "HuggingFaceTokenizer" or flags.tokenizer_model is None:
        return None
    folder = Path(flags.tokenizer_model)
    source = _source(folder)
    if source is None:
        return None
    tokens = {role: hf.special_token(folder, role) for role in _SPECIAL}
    return ChatTemplate(source, {role: token for role, token in tokens.items() if token is not None})


def _source(folder: Path) -> str | None:
    try:
        return files.text(folder / FILE)
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
    from megatron_npu.generation.bounded_jinja import BoundedSandbox

    environment = BoundedSandbox(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.add_filter("tojson", _as_json)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


@contextlib.contextmanager
def _at_most(seconds: float) -> Iterator[None]:
    """Limit the time that the ``with`` block may take in the current thread.

    The block is interrupted at the first line of Python that is reached after the limit. This works because
    the loops of a template are Python loops. A separate thread is not used because it could not be stopped.

    Raises:
        TimeoutError: the limit was exceeded.
    """
    until, before = time.monotonic() + seconds, sys.gettrace()

    def look(frame: FrameType, event: str, argument: object) -> Any:
        if time.monotonic() > until:
            raise TimeoutError(f"rendering the chat template did not finish within {seconds:g} s")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(before)


def _as_json(value: Any, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=False, **options)


def _refuse(message: str) -> None:
    from jinja2 import TemplateError

    raise TemplateError(message)
