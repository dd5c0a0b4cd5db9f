"""Read prompts from files (one per line), and write samples to files (JSON lines)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from megatron_npu.base import files, given_files
from megatron_npu.base.errors import UsageError
from megatron_npu.generation.sampling.sampler import Sample
from megatron_npu.generation.trained_model import TrainedModel


def read_prompts(file: str) -> list[str]:
    """Return the prompts in a file, one per line.

    Raises:
        UsageError: the file does not exist, is not UTF-8, has no lines, or has an empty line.
    """
    try:
        lines = given_files.lines(file)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"the file is not UTF-8: {error}"
        raise UsageError(
            f"--sample-input-file {file} cannot be read: {reason}. It must be a UTF-8 text file with one "
            "prompt per line. Correct the file or its path."
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            raise UsageError(
                f"{file}, line {number}: the prompt is empty, but each line must contain some text. Remove "
                "the line; --num-samples N generates unconditional samples."
            )
    if not lines:
        raise UsageError(
            f"--sample-input-file {file} contains no prompt. Add at least one prompt; each line is one "
            "prompt."
        )
    return lines


def record(model: TrainedModel, sample: Sample) -> dict[str, Any]:
    """Return a sample as a JSON record.

    In the record, ``text`` is the prompt with its continuation, ``length`` is the number of tokens in this
    text, and ``finished`` tells whether the model generated the end token.
    """
    length = len(model.content(sample))
    return {"text": model.text(sample), "length": length, "finished": sample.finished}


def write(file: str, records: Iterable[dict[str, Any]]) -> None:
    """Write records to a file as JSON lines.

    Raises:
        UsageError: the file cannot be written.
    """
    lines = (json.dumps(values, ensure_ascii=False) for values in records)
    try:
        files.write(file, "".join(f"{line}\n" for line in lines))
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}. Use another path.") from error
