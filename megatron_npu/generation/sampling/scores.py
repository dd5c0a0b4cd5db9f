"""Compute the log-likelihoods of the tokens in given texts, without sampling."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_npu.generation.sampling.forward import whole_logits
from megatron_npu.generation.sampling.stages import from_last_stage, not_numbers

_MOST_LOGITS = 1 << 28  # numbers that one batch may have: 1 GiB in fp32


@dataclass
class Score:
    """The log-likelihoods of the tokens of a text, starting at a given position.

    Attributes:
        first: the position of the first scored token.
        logprobs: the log-probability of each token from this position on, given the tokens before it.
        greedy: for each token, whether it is the most likely token at its position.
        alternatives: for each position, the requested number of most likely tokens with their
            log-probabilities.
    """

    first: int = 1
    logprobs: list[float] = field(default_factory=list)
    greedy: list[bool] = field(default_factory=list)
    alternatives: list[dict[int, float]] = field(default_factory=list)


@dataclass(frozen=True)
class _Row:
    """An input of the model, with the texts that consist of this input and one more token.

    Attributes:
        inputs: the ids of the input.
        texts: the indices of the texts.
        first: the position of the first token that is scored in any of these texts.
    """

    inputs: tuple[int, ...]
    texts: list[int]
    first: int


class Scoring:
    """Scores texts in batches, starting with the longest texts.

    Texts are padded on the right, which is valid for causal attention.

    Args:
        chunks: this process's GPTModels, unwrapped and in order.
        vocabulary: the number of token ids; higher ids only pad the model's vocabulary.
        padding: the token id that is used as padding.
        alternatives: the number of most likely tokens to return for each position.
    """

    def __init__(self, chunks: Sequence[Any], vocabulary: int, padding: int, alternatives: int) -> None:
        self.chunks, self.vocabulary = chunks, vocabulary
        self.padding, self.alternatives = padding, alternatives

    def run(self, texts: Sequence[Sequence[int]], firsts: Sequence[int], batch: int | None) -> list[Score]:
        """Return the scores of the texts; see ``Sampler.score``."""
        scores = [Score(first) for first in firsts]
        for rows in self._batches(_rows(texts, firsts), batch):
            details = from_last_stage(self._details(rows, texts, firsts))
            if not bool(torch.isfinite(details[:, 0]).all()):
                raise not_numbers()
            told = iter(details.tolist())
            for place in (place for row in rows for place in row.texts):
                for _ in range(len(texts[place]) - firsts[place]):
                    _note(scores[place], next(told))
        return scores

    def _batches(self, rows: list[_Row], batch: int | None) -> Iterator[list[_Row]]:
        padded = self.chunks[0].vocab_size
        while rows:
            most = max(_MOST_LOGITS // (len(rows[0].inputs) * padded), 1)
            size = min(most, batch or most)
            yield rows[:size]
            rows = rows[size:]

    def _details(self, rows: list[_Row], texts: Sequence[Sequence[int]], firsts: Sequence[int]) -> Tensor:
        """Return the scores of all requested tokens, ``[n, 2 + 2 alternatives]``, fp32 on the host.

        Each row has the token's log-probability, whether it is the most likely one, the ids of the most
        likely tokens, and their log-probabilities.
        """
        longest = len(rows[0].inputs)
        tokens = torch.tensor([[*row.inputs, *[self.padding] * (longest - len(row.inputs))] for row in rows])
        logits = whole_logits(self.chunks, tokens)  # [b, s, padded vocabulary]
        if logits is None:
            count = sum(len(texts[place]) - firsts[place] for row in rows for place in row.texts)
            return torch.zeros(count, 2 + 2 * self.alternatives)
        found = []
        for number, row in enumerate(rows):
            some = logits[number, row.first - 1 : len(row.inputs), : self.vocabulary]
            values = some.float().log_softmax(-1)  # [s, vocabulary]
            likeliest, ids = values.topk(self.alternatives)
            best = values.argmax(-1)
            for place in row.texts:
                begin = firsts[place] - row.first
                wanted = torch.tensor(texts[place][firsts[place] :], device=values.device)
                own = values[begin:].gather(-1, wanted[:, None])
                greedy = (best[begin:] == wanted)[:, None]
                found.append(torch.cat([own, greedy.float(), ids[begin:].float(), likeliest[begin:]], -1))
        return torch.cat(found).cpu()


def _rows(texts: Sequence[Sequence[int]], firsts: Sequence[int]) -> list[_Row]:
    """Return the inputs of the model, longest first.

    Texts that differ only in their last token share an input.
    """
    same: dict[tuple[int, ...], list[int]] = {}
    for place, text in enumerate(texts):
        if firsts[place] < len(text):
            same.setdefault(tuple(text[:-1]), []).append(place)
    rows = [_Row(inputs, some, min(firsts[place] for place in some)) for inputs, some in same.items()]
    return sorted(rows, key=lambda row: -len(row.inputs))


def _note(score: Score, details: list[float]) -> None:
    logprob, greedy, *rest = details
    ids, logprobs = map(int, rest[: len(rest) // 2]), rest[len(rest) // 2 :]
    score.logprobs.append(logprob)
    score.greedy.append(bool(greedy))
    score.alternatives.append(dict(zip(ids, logprobs, strict=True)))
