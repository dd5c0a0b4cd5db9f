"""Implement ``--task question_answering``, which finds the part of a text that answers a question."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from megatron_npu.base.arg_parser import positive
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import columns, texts
from megatron_npu.finetune.run import metrics
from megatron_npu.finetune.tasks.declaration import Flag
from megatron_npu.finetune.tasks.task import EXAMPLE, Batch, Task, inputs

_POSITIONS = ("start_positions", "end_positions")
_ASIDE = (
    "row",
    "offsets",
    "unanswered",
)  # columns that answers are found with, and a model is not called with
_NOWHERE = (-1, -1)  # the offsets of a token that is not of the context


class QuestionAnswering(Task):
    """Task that fine-tunes an ``AutoModelForQuestionAnswering``.

    The columns are a question, a context and the answers. The answers are given either in the format of SQuAD
    (texts and their start positions in the context, where an empty list means that there is no answer), or as
    one text, which is searched for in the context. A context that is too long is split into several
    overlapping windows. The metrics are exact match and F1 in percent, as in SQuAD's evaluation.
    """

    name = "question_answering"
    head = "AutoModelForQuestionAnswering"
    pipeline = "question-answering"
    roles: ClassVar = {
        "question": ("question",),
        "context": ("context", "passage"),
        "answers": ("answers", "answer"),
    }
    flags = (
        Flag(
            "--doc-stride",
            type=positive,
            default=128,
            help="number of tokens that two consecutive windows of a context share",
        ),
        Flag("--max-answer-length", type=positive, default=30, help="maximum number of tokens in an answer"),
    )

    def tokenizer_options(self) -> dict[str, Any]:
        """Return tokenizer options that pad windows on the right, so that token positions do not change."""
        return {"padding_side": "right"}

    @functools.cached_property
    def examples(self) -> dict[str, Any]:
        """The windows of each split."""
        self._windows = super().examples
        return {part: windows.remove_columns(list(_ASIDE)) for part, windows in self._windows.items()}

    def require_columns(self) -> None:
        """Check that every row has a question and a context."""
        texts.require(self.parts, {role: self.columns[role] for role in ("question", "context")})

    def needed_columns(self, there: Mapping[str, Sequence[str]]) -> list[str]:
        """Return the names of the question column and the context column.

        The answers may be missing.
        """
        found = columns.find(there, self.roles, self.args.columns)
        return [found["question"], found["context"]]

    def encoded(self, rows: Any, part: str) -> Any:
        """Return the windows of each row, and the position of the answer in each window."""
        self.require_places()
        encode = functools.partial(
            _encode,
            tokenizer=self.tokenizer,
            columns=self.columns,
            longest=self.longest,
            stride=self._stride(rows, part),
        )
        return rows.map(
            encode,
            batched=True,
            with_indices=True,
            remove_columns=rows.column_names,
            desc=f"tokenize {part}",
        )

    def _stride(self, rows: Any, part: str) -> int:
        """Return how many tokens adjacent windows have in common: --doc-stride, or fewer if questions are
        long.
        """
        questions = self.tokenizer(list(rows[self.columns["question"]]))["input_ids"]
        own = max(map(len, questions)) - self.tokenizer.num_special_tokens_to_add(pair=False)
        free = self.longest - own - self.tokenizer.num_special_tokens_to_add(pair=True)
        if free < 2:
            raise UsageError(
                f"a question in the split {part!r} has {own} tokens, but it must have fewer than the "
                f"{self.longest} tokens of --seq-length, to leave space for the context. Remove the "
                "question, or pass a larger --seq-length."
            )
        return min(self.args.doc_stride, free // 2)

    def collate(self, examples: list[dict[str, Any]]) -> Batch:
        """Return a batch padded to the length of its longest window."""
        return self.padded(examples, numbers=_POSITIONS)

    def run_forward_step(self, batch: Batch, model: torch.nn.Module) -> Tensor:
        """Return the mean loss over the windows of a batch, which does not depend on padding."""
        outputs = model(**inputs(batch))
        return position_losses(outputs.start_logits, outputs.end_logits, batch).mean()

    def run_compute_metrics(self, model: Any, eval_dataloader: Any) -> dict[str, float]:
        """Return the loss over the windows, and the metrics of the predicted answers."""
        found = self.evaluated(model, eval_dataloader, self._read)
        part = self._part(found[EXAMPLE][0])
        rows, windows = self.parts[part], self._windows[part].select_columns(list(_ASIDE))
        first = self.examples[part][0][EXAMPLE]
        given: dict[int, tuple[float, str]] = {}  # by row, the score and text of its best window
        nothing: dict[int, float] = {}
        for index, number in enumerate(found[EXAMPLE]):
            window = windows[int(number - first)]
            row, score = window["row"], float(found["score"][index])
            nothing[row] = min(nothing.get(row, np.inf), float(found["nothing"][index]))
            if row not in given or score > given[row][0]:
                begin, end = (window["offsets"][found[name][index]] for name in ("first", "last"))
                given[row] = score, rows[row][self.columns["context"]][begin[0] : end[1]]
        written = [
            "" if self._may_have_none and nothing[row] > score else text
            for row, (score, text) in given.items()
        ]
        true = [_answers(rows[row], self.columns)[0] for row in given]
        return {"loss": float(found["loss"].mean(dtype="float64")), **metrics.answers(written, true)}

    @functools.cached_property
    def _may_have_none(self) -> bool:
        """True if the data contains questions without an answer, as in SQuAD 2.0."""
        return any(not _answers(row, self.columns)[0] for rows in self.parts.values() for row in rows)

    def _part(self, number: int) -> str:
        """Return the split to which an example belongs."""
        firsts = {part: windows[0][EXAMPLE] for part, windows in self.examples.items() if part != "train"}
        return max((first, part) for part, first in firsts.items() if first <= number)[1]

    def _read(self, batch: Batch, outputs: Any) -> Mapping[str, Tensor]:
        start, end = outputs.start_logits.float(), outputs.end_logits.float()
        part = self._part(int(batch[EXAMPLE][0]))
        first = self.examples[part][0][EXAMPLE]
        offsets = self._windows[part].select_columns("offsets")[(batch[EXAMPLE] - first).tolist()]["offsets"]
        inside = torch.zeros(start.shape, dtype=torch.bool)
        for row, own in enumerate(offsets):
            inside[row, : len(own)] = torch.tensor(own)[:, 0] >= 0
        spans, scores = best_spans(start, end, inside.to(start.device), self.args.max_answer_length)
        nowhere = _nowhere(batch["input_ids"], self.tokenizer)[:, None]
        return {
            "first": spans[:, 0],
            "last": spans[:, 1],
            "score": scores,
            "nothing": (start.gather(1, nowhere) + end.gather(1, nowhere))[:, 0],
            "loss": position_losses(start, end, batch),
        }


def position_losses(start: Tensor, end: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of each window, ``[b]``: the mean of the losses of the answer's first and last token.

    Transformers models include padding in the softmax, so a window's loss would depend on the longest window
    of its batch. Here only a window's own tokens are included.

    Args:
        start: logits of the first token [b, s].
        end: logits of the last token [b, s].
        batch: has the true positions, [b], and possibly ``attention_mask`` [b, s], 0 for padding.
    """
    filled = batch.get("attention_mask")
    losses = []
    for logits, name in zip((start.float(), end.float()), _POSITIONS, strict=True):
        own = logits if filled is None else logits.masked_fill(filled == 0, -torch.inf)
        losses.append(torch.nn.functional.cross_entropy(own, batch[name], reduction="none"))
    return (losses[0] + losses[1]) / 2


def best_spans(start: Tensor, end: Tensor, inside: Tensor, longest: int) -> tuple[Tensor, Tensor]:
    """Return the first and last tokens of the most likely answer in each window, ``[b, 2]``, and the scores
    ``[b]``.

    Args:
        start: the logits of the answer's first token, [b, s].
        end: the logits of the answer's last token, [b, s].
        inside: True for the tokens that belong to the context, [b, s].
        longest: the maximum number of tokens in an answer.
    """
    size = start.shape[1]
    scores = start[:, :, None] + end[:, None, :]
    allowed = torch.ones(size, size, dtype=torch.bool, device=start.device).triu().tril(longest - 1)
    allowed = allowed & inside[:, :, None] & inside[:, None, :]
    best, place = scores.masked_fill(~allowed, -torch.inf).flatten(1).max(1)
    return torch.stack([place // size, place % size], 1), best


def _nowhere(tokens: Tensor, tokenizer: Any) -> Tensor:
    """Return the position of the token that means "no answer" in each window, ``[b]``.

    This is CLS or the first token.
    """
    if tokenizer.cls_token_id is None:
        return torch.zeros_like(tokens[:, 0])
    return (tokens == tokenizer.cls_token_id).int().argmax(1)


def _encode(
    rows: Mapping[str, list[Any]],
    indices: list[int],
    *,
    tokenizer: Any,
    columns: Mapping[str, str],
    longest: int,
    stride: int,
) -> dict[str, Any]:
    tokens = tokenizer(
        [text.lstrip() for text in rows[columns["question"]]],  # blanks would fill SQuAD's windows
        rows[columns["context"]],
        truncation="only_second",
        max_length=longest,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    of_rows = tokens.pop("overflow_to_sample_mapping")
    offsets = [_of_context(tokens, window, own) for window, own in enumerate(tokens.pop("offset_mapping"))]
    answers = [
        _answers({name: column[row] for name, column in rows.items()}, columns) for row in range(len(indices))
    ]
    nowhere = _nowhere_in(tokens["input_ids"], tokenizer)
    places = [_place(offsets[window], answers[row], nowhere[window]) for window, row in enumerate(of_rows)]
    first, last = _columns(places)
    return {
        **tokens,
        "start_positions": first,
        "end_positions": last,
        "row": [indices[row] for row in of_rows],
        "unanswered": [not answers[row][0] for row in of_rows],
        "offsets": [[list(place) for place in own] for own in offsets],
    }


def _columns(pairs: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    return [first for first, _ in pairs], [second for _, second in pairs]


def _of_context(tokens: Any, window: int, offsets: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the position in the context of each token of a window.

    Tokens outside the context get ``_NOWHERE``.
    """
    kinds = tokens.sequence_ids(window)
    return [place if kind == 1 else _NOWHERE for place, kind in zip(offsets, kinds, strict=True)]


def _nowhere_in(windows: list[list[int]], tokenizer: Any) -> list[int]:
    mark = tokenizer.cls_token_id
    return [own.index(mark) if mark in own else 0 for own in windows]


def _place(
    offsets: list[tuple[int, int]], answers: tuple[list[str], list[int]], nowhere: int
) -> tuple[int, int]:
    """Return the first and last tokens of the first true answer, if the window contains all of this
    answer.
    """
    found, begins = answers
    if not found:
        return nowhere, nowhere
    begin, end = begins[0], begins[0] + len(found[0])
    inside = [token for token, place in enumerate(offsets) if place != _NOWHERE]
    if not inside or offsets[inside[0]][0] > begin or offsets[inside[-1]][1] < end:
        return nowhere, nowhere
    first = max(token for token in inside if offsets[token][0] <= begin)
    return first, min(token for token in inside if offsets[token][1] >= end)


def _answers(row: Mapping[str, Any], columns: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the true answers for a row, and their start positions in the context.

    Raises:
        UsageError: an answer is not at its position in the context, or the answers have an unknown format.
    """
    context, given = row[columns["context"]], row[columns["answers"]]
    if isinstance(given, list) and all(isinstance(one, dict) for one in given):
        given = {name: [one.get(name) for one in given] for name in ("text", "answer_start")}
    found, begins = _as_written(given, context)
    question = row[columns["question"]]
    if not _are(str, found) or not _are(int, begins) or len(found) != len(begins):
        raise _unreadable(given, question)
    for text, begin in zip(found, begins, strict=True):
        _require_place(text, begin, context, question)
    return found, begins


def _require_place(text: str, begin: int, context: str, question: str) -> None:
    if begin < 0 or context[begin : begin + len(text)] != text:
        at = context.find(text)
        there = f"but it begins at {at}" if at >= 0 else "and nowhere else"
        raise UsageError(
            f"the answer {text!r} to {question!r} does not occur at its given position in the context, "
            f"{begin}, {there}",
            remedy="Correct the row.",
        )


def _as_written(given: Any, context: str) -> tuple[Any, Any]:
    """Return the answers and their positions from a row, which contains a table or a single text.

    Return None for other formats.
    """
    if isinstance(given, dict):
        return given.get("text") or [], given.get("answer_start") or []
    if isinstance(given, str) or given is None:
        found = [given] if given else []
        return found, [context.find(text) for text in found]
    return None, None


def _are(kind: type, given: Any) -> bool:
    return isinstance(given, list) and all(isinstance(one, kind) for one in given)


def _unreadable(given: Any, question: str) -> UsageError:
    return UsageError(
        f"the answers {given!r} to {question!r} must have the SQuAD form, "
        '{"text": ["Rome"], "answer_start": [17]}, or be a single string. Correct the row.'
    )
