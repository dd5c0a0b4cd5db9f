"""Define the Sampler, which generates text with a GPT model that is in memory."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.data.tokenization.tokenizer import Tokenizer
from megatron_npu.generation.sampling import choice
from megatron_npu.generation.sampling.forward import Forward, forward_of
from megatron_npu.generation.sampling.options import Options
from megatron_npu.generation.sampling.scores import Score, Scoring
from megatron_npu.generation.sampling.stages import from_last_stage, not_numbers
from megatron_npu.generation.sampling.without_prediction import without_prediction


@dataclass
class Sample:
    """A prompt and its continuation.

    Attributes:
        prompt: the ids of the prompt. For unconditional text, this is only the end token.
        tokens: the ids that were generated, without the end token.
        finished: whether generation ended because the end token was generated or because ``watch`` stopped
            it.
        logprobs: the model's own log-probability of each generated token, if requested, followed by that of
            the end token if this token ended the text.
        alternatives: for each entry of ``logprobs``, the most likely tokens with their log-probabilities, if
            requested.
    """

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    finished: bool = False
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[dict[int, float]] = field(default_factory=list)

    def ids(self) -> list[int]:
        """Return the token ids of the whole text, including the prompt."""
        return [*self.prompt, *self.tokens]


# Called for each new token with the prompt's place and its sample so far; True ends that text.
Watch = Callable[[int, Sample], bool]


class Sampler:
    """Generates texts with a model that is in the memory of one or several processes.

    All layouts are supported: tensor, sequence, context and pipeline parallelism, interleaved or not. Every
    rank must create a Sampler and call ``sample`` with the same arguments. All ranks, including data-parallel
    replicas, get the same texts.

    Args:
        model: this process's GPTModel, or its chunks in order, wrapped or not.
        tokenizer: the tokenizer, which defines the end token.
        vocabulary: the number of token ids; higher ids only pad the model's vocabulary. If None, the size of
            the tokenizer is used.
    """

    def __init__(
        self,
        model: torch.nn.Module | Sequence[torch.nn.Module],
        tokenizer: Tokenizer,
        vocabulary: int | None = None,
    ) -> None:
        modules = [model] if isinstance(model, torch.nn.Module) else list(model)
        self.chunks: list[Any] = [_unwrapped(module) for module in modules]
        self.end = tokenizer.eod
        self.vocabulary = tokenizer.vocab_size if vocabulary is None else vocabulary
        self.positions: int = self.chunks[0].max_sequence_length

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        options: Options | None = None,
        watch: Watch | None = None,
        batch: int | None = None,
    ) -> list[Sample]:
        """Return one sample for each prompt, in the order of the prompts.

        All ranks of the model must call this.

        The model is put into evaluation mode temporarily. No global random number generator is used.

        Args:
            prompts: the ids of each prompt, at least one token each, of any length. Use ``[sampler.end]`` for
                unconditional text.
            options: the sampling options.
            watch: a function that is called with each new token, and may stop a text. It must be passed
                either on all ranks or on none. The result on the model's first rank is used.
            batch: the maximum number of texts that are generated together; None means all. Prompts of similar
                length are batched.

        Raises:
            UsageError: a prompt is empty, has unknown ids or leaves no position free, or the logits are NaN
                or infinite.
        """
        options = options or Options()
        samples = [Sample(list(prompt)) for prompt in prompts]
        for sample in samples:
            self.check(sample.prompt)
        rows = sorted(range(len(samples)), key=lambda row: len(samples[row].prompt))
        size = batch or max(len(rows), 1)
        with torch.no_grad(), _evaluating(self.chunks):
            for start in range(0, len(rows), size):
                some = rows[start : start + size]
                _Batch(self, {row: samples[row] for row in some}, options, watch).run()
        return samples

    def score(
        self,
        texts: Sequence[Sequence[int]],
        firsts: Sequence[int] | None = None,
        alternatives: int = 0,
        batch: int | None = None,
    ) -> list[Score]:
        """Return the log-likelihoods of the tokens in the given texts.

        All ranks of the model must call this.

        Texts that differ only in their last token are computed once. Models whose sequence is partitioned
        over ranks are not supported.

        Args:
            texts: the ids of each text, from one token to one more than the number of positions of the model.
            firsts: for each text, the position of the first token to score, at least 1. If None, the position
                is 1 for all texts.
            alternatives: the number of most likely tokens to return for each position.
            batch: the maximum number of texts that are computed together. If None, as many texts as fit into
                1 GiB of logits.

        Raises:
            UsageError: a text is empty, too long or has unknown ids, or the logits are NaN or infinite.
        """
        for text in texts:
            self.check_text(text)
        scoring = Scoring(self.chunks, self.vocabulary, self.end, min(alternatives, self.vocabulary))
        with torch.no_grad(), _evaluating(self.chunks):
            return scoring.run(texts, firsts or [1] * len(texts), batch)

    def check_text(self, text: Sequence[int]) -> None:
        """Check that the model is able to score the tokens of a text.

        Raises:
            UsageError: the text is empty, too long, or has unknown ids.
        """
        self._require_known(text)
        if len(text) > self.positions + 1:
            raise UsageError(
                f"the text has {len(text)} tokens, but it must have at most {self.positions + 1}, because "
                f"the model has {self.positions} positions",
                remedy="Shorten the text.",
            )

    def _require_known(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise UsageError(
                "the prompt is empty, but it must have at least one token",
                remedy="To generate unconditional text, start with the end-of-text token.",
            )
        if not 0 <= min(prompt) <= max(prompt) < self.vocabulary:
            raise UsageError(
                f"the prompt has token ids from {min(prompt)} to {max(prompt)}, but ids must be from 0 to "
                f"{self.vocabulary - 1}, the last id of the model's vocabulary",
                remedy="Use the tokenizer that the model was trained with.",
            )

    def check(self, prompt: Sequence[int]) -> None:
        """Check that the model is able to continue a prompt.

        Raises:
            UsageError: the prompt is empty, has unknown ids, or leaves no position free.
        """
        self._require_known(prompt)
        if len(prompt) >= self.positions:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens, but it must have at most {self.positions - 1}, "
                f"because the model has {self.positions} positions",
                remedy="Shorten the prompt.",
            )


class _Batch:
    """A batch of texts that are being generated together.

    The texts are left-aligned in one tensor. A prefix with the length of the shortest prompt is processed in
    one step. The rest is processed one token at a time, using the tokens of a longer prompt in place of
    generated tokens until that prompt ends.

    Args:
        sampler: the sampler whose model is used.
        samples: the samples by prompt index.
        options, watch: see ``Sampler.sample``.
    """

    def __init__(
        self, sampler: Sampler, samples: dict[int, Sample], options: Options, watch: Watch | None
    ) -> None:
        self.sampler, self.options, self.watch = sampler, options, watch
        self.places, self.samples = list(samples), list(samples.values())
        most = min(options.longest or sampler.positions, sampler.positions)
        self.limits = [min(len(s.prompt) + options.num_tokens, most) for s in self.samples]
        self.tokens = torch.full((len(self.samples), max(self.limits)), sampler.end, dtype=torch.int64)
        for row, sample in zip(self.tokens, self.samples, strict=True):
            row[: len(sample.prompt)] = torch.tensor(sample.prompt)[: len(row)]
        self.open = [len(s.prompt) < limit for s, limit in zip(self.samples, self.limits, strict=True)]
        self.generators = [torch.Generator().manual_seed(options.seed + place) for place in self.places]

    def run(self) -> None:
        """Generate the tokens of all samples."""
        forward = self._forward()
        for length in range(min(len(s.prompt) for s in self.samples), self.tokens.size(1)):
            if not any(self.open):
                break
            self._take(length, forward.logits(self.tokens[:, :length]))

    def _forward(self) -> Forward:
        return forward_of(self.sampler.chunks, len(self.samples), self.tokens.size(1), self.options.recompute)

    def _take(self, length: int, logits: torch.Tensor | None) -> None:
        """Select the tokens at position ``length``, and record them.

        The tokens are the same on all ranks.
        """
        due = [row for row, s in enumerate(self.samples) if self.open[row] and len(s.prompt) <= length]
        if not due:  # the short ones have ended, and the long ones are still read
            return
        tokens = torch.zeros(len(due), dtype=torch.int64)
        details = torch.zeros(len(due), self._details, dtype=torch.float32)
        if logits is not None:
            logits = logits[due, : self.sampler.vocabulary]
            tokens = choice.choose(logits, self.options, self._draws(due))
            if self._details:
                details = choice.log_probabilities(logits, tokens, self._details // 2)
        tokens = from_last_stage(tokens)
        if choice.NO_NUMBER in tokens:
            raise not_numbers()
        details = from_last_stage(details) if self._details else details
        for row, token, detail in zip(due, tokens.tolist(), details.tolist(), strict=True):
            self._note(row, length, token, detail)
        self._ask(due)

    @property
    def _details(self) -> int:
        """The number of values per token that ``choice.log_probabilities`` returns, or 0 if none are
        requested.
        """
        count = self.options.alternatives
        return 0 if count is None else 1 + 2 * min(count, self.sampler.vocabulary)

    def _draws(self, due: Sequence[int]) -> torch.Tensor:
        """Return a random number between 0 and 1 for each row, ``[b]``, drawn from the row's own
        generator.
        """
        draws = [torch.rand((), generator=self.generators[row], dtype=torch.float64) for row in due]
        return torch.stack(draws)

    def _note(self, row: int, length: int, token: int, details: list[float]) -> None:
        """Record a row's token at position ``length``, or mark the row's text as finished."""
        sample = self.samples[row]
        if details:
            logprob, *rest = details
            ids, logprobs = map(int, rest[: len(rest) // 2]), rest[len(rest) // 2 :]
            sample.logprobs.append(logprob)
            sample.alternatives.append(dict(zip(ids, logprobs, strict=True)))
        if token == self.sampler.end:
            sample.finished, self.open[row] = True, False
            return
        self.tokens[row, length] = token
        self.open[row] = length + 1 < self.limits[row]
        sample.tokens.append(token)

    def _ask(self, rows: Sequence[int]) -> None:
        """Pass the new token of each row to ``watch``, and end the texts that ``watch`` stops."""
        if self.watch is None:
            return
        some = [row for row in rows if not self.samples[row].finished]
        ended = [self.watch(self.places[row], self.samples[row]) for row in some]
        for row, end in zip(some, _from_first_rank(ended), strict=True):
            if end:
                self.samples[row].finished, self.open[row] = True, False


def _unwrapped(module: Any) -> Any:
    """Return the GPTModel inside its wrappers for data parallelism and half precision."""
    while hasattr(module, "module"):
        module = module.module
    return module


@contextlib.contextmanager
def _evaluating(chunks: Sequence[Any]) -> Iterator[None]:
    """Put the model chunks into evaluation mode inside the ``with`` block, and restore their mode
    afterwards.
    """
    training = [chunk.training for chunk in chunks]
    for chunk in chunks:
        chunk.eval()
    try:
        with without_prediction(chunks):
            yield
    finally:
        for chunk, before in zip(chunks, training, strict=True):
            chunk.train(before)


def _from_first_rank(answers: list[bool]) -> list[bool]:
    """Return rank 0's answers on all ranks."""
    if dist.get_world_size() == 1 or not answers:
        return answers
    shared = torch.tensor(answers, dtype=torch.int32, device=devices.current().torch_device())
    dist.broadcast(shared, 0)
    return shared.bool().tolist()
