"""The flags that say what the data of a task are, and which of their columns and pieces are used.

And which of all flags are of some tasks alone: another one would leave them unread.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from megatron_npu.arg_parser import Number, Unfit, positive
from megatron_npu.errors import UsageError

_NEW = ("pretraining",)  # what makes a model, and reads .bin/.idx
_TEXTS = ("causal_lm", "masked_lm")
_PAIRS = ("seq2seq",)
_ROWS = ("sequence_classification", "token_classification", "question_answering", *_TEXTS, *_PAIRS)
# the tasks of each flag that is not everybody's
_TASKS_OF = {
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"), _NEW),
    **dict.fromkeys(("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size"), _NEW),
    **dict.fromkeys(("data_cache_path", "split", "short_seq_prob"), _NEW),
    **dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), ()),
    "mask_prob": ("masked_lm", *_NEW),
    **dict.fromkeys(("data_name", "columns", "validation_fraction"), _ROWS),
    **dict.fromkeys(("doc_stride", "max_answer_length"), ("question_answering",)),
    "append_eod": _TEXTS,
    **dict.fromkeys(("source_prefix", "max_target_length", "predict_with_generate", "num_beams"), _PAIRS),
}
_fraction = Number("a number from 0 to 0.9", float, 0.0, 0.9, metavar="X")


def _role_and_name(text: str) -> tuple[str, str]:
    role, separator, name = text.partition("=")
    if not separator or not role or not name:
        raise Unfit(text, "ROLE=NAME, such as label=stars")
    return role, name


def add_data_flags(add: Callable[..., Any]) -> None:
    """Declare what tasks read besides ``--data-path``, ``--data-name`` and ``--seq-length``."""
    add(
        "--columns",
        type=_role_and_name,
        nargs="+",
        action="extend",
        default=[],
        metavar="ROLE=NAME",
        help="columns that have other names than usual; the roles are text, pair, label, tokens, tags, "
        "question, context, answers, source and target",
    )
    add(
        "--validation-fraction",
        type=_fraction,
        default=0.1,
        help="what is taken from the training part, where no part is there to validate on",
    )
    add("--doc-stride", type=positive, default=128, help="tokens that two windows of a context share")
    add("--max-answer-length", type=positive, default=30, help="tokens of the longest answer")
    add("--append-eod", action="store_true", help="end each text of a language model's with the end token")
    add(
        "--source-prefix",
        default="",
        metavar="TEXT",
        help="what each source begins with",
    )
    add("--max-target-length", type=positive, default=128, help="tokens of the longest output")
    add("--predict-with-generate", action="store_true", help="write targets when evaluating, too")
    add("--num-beams", type=positive, default=1, help="beams of these outputs")


def refuse_repeated_columns(columns: Collection[tuple[str, str]]) -> None:
    """Check that ``--columns`` names each role once, and each column for one role.

    Of two columns for a role the last one would count, and nobody would know.

    Args:
        columns: (role, name) of each.

    Raises:
        UsageError: it does not.
    """
    for role, times in Counter(role for role, _ in columns).items():
        if times > 1:
            names = " ".join(f"{one}={name}" for one, name in columns if one == role)
            raise UsageError(f"--columns {names}", f"one column for the {role}", "Leave the others out.")
    for name, times in Counter(name for _, name in columns).items():
        if times > 1:
            roles = " ".join(f"{role}={one}" for role, one in columns if one == name)
            raise UsageError(f"--columns {roles}", "a column for each role", "Correct the names.")


def refuse_others(args: argparse.Namespace, default: Callable[[str], Any]) -> None:
    """Check that a task reads every flag that is given; a script of the user's may read any.

    Args:
        args: the flags; ``task`` is one of ``--task``.
        default: the value that a flag has where it is not given.

    Raises:
        UsageError: it does not.
    """
    for name, readers in _TASKS_OF.items():
        if args.task not in readers and getattr(args, name, None) != default(name):
            raise UsageError(
                f"--{name.replace('_', '-')} with --task {args.task}, which does not read it",
                f"it with {' or '.join(f'--task {task}' for task in readers)}"
                if readers
                else "it in a script",
                "Leave it out, or give --user-script FILE.",
            )
    if args.num_beams != default("num_beams") and not args.predict_with_generate:
        raise UsageError(
            "--num-beams without --predict-with-generate", "both: beams are of outputs", "Add or drop one."
        )
