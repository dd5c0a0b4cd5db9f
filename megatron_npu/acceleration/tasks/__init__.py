"""What ``--task`` names: one template a task, filled in for models of Transformers. One file a task."""

from __future__ import annotations

import argparse
import importlib
from typing import TYPE_CHECKING

from megatron_npu.errors import UsageError

if TYPE_CHECKING:
    from megatron_npu.acceleration.templates import Finetuner, PreTrainer

_TEMPLATES = {
    "sequence_classification": "SequenceClassification",
    "token_classification": "TokenClassification",
    "question_answering": "QuestionAnswering",
    "causal_lm": "CausalLM",
    "masked_lm": "MaskedLM",
    "seq2seq": "Seq2Seq",
    "pretraining": "PreTraining",
}
NAMES = tuple(_TEMPLATES)


def template_for(args: argparse.Namespace) -> type[Finetuner] | type[PreTrainer]:
    """Return the template of a task; only now Transformers is imported.

    Raises:
        UsageError: there is no such task, or a package that it needs is not installed.
    """
    if args.task not in _TEMPLATES:
        raise UsageError(
            f"--task {args.task}", " or ".join(NAMES), "Give one of them, or --user-script FILE."
        )
    try:
        module = importlib.import_module(f"megatron_npu.acceleration.tasks.{args.task}")
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("megatron_npu"):
            raise
        raise UsageError(
            f"--task {args.task} ({error})",
            f"the package {error.name}",
            "Install it: pip install 'megatron_npu[train]'.",
        ) from error
    return getattr(module, _TEMPLATES[args.task])
