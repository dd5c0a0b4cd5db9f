"""Patch ``tasks/orqa`` to parse the answers in a question file, which upstream would pass to ``eval``."""

from __future__ import annotations

import ast
import csv
from typing import Any

from megatron_npu.base.errors import UsageError
from megatron_npu.patching.registry import Recorder


def connect(recorder: Recorder, module: str, *, until: str, versions: str = "") -> None:
    """Record a patch that parses answers in question files instead of evaluating them as code.

    Args:
        recorder: the checkout's recorder.
        module: the module that reads Natural Questions.
        until: the condition under which the patch may be removed.
        versions: the upstream versions that have the module.
    """
    recorder.replace(
        f"{module}:NQDataset.process_samples_from_single_path",
        why="upstream evaluates the answers of --qa-data-dev and --qa-data-test as Python, which executes "
        "any code in them",
        upstream_bug=True,
        until=until,
        versions=versions,
    )(read_questions)


def read_questions(filename: str) -> list[dict[str, Any]]:
    """Return the questions and their lists of answers from a file of tab-separated values.

    Raises:
        UsageError: a line does not have this form.
    """
    with open(filename, encoding="utf-8") as file:
        rows = csv.reader(file, delimiter="\t")
        samples = [_sample(row, f"{filename}, line {rows.line_num}") for row in rows]
    print(f" >> processed {len(samples)} samples.", flush=True)
    return samples


def _sample(row: list[str], place: str) -> dict[str, Any]:
    try:
        answers = ast.literal_eval(row[1])
    except (IndexError, ValueError, SyntaxError, MemoryError, RecursionError):
        answers = None
    if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
        raise UsageError(
            f"{place} must contain a question, a tab, and a list of strings in Python notation, such as "
            "['Paris', 'the capital of France']. Correct the file; nothing was evaluated."
        )
    return {"question": row[0], "answers": answers}
