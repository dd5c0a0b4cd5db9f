"""Sampling options, and their valid ranges."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Options:
    """Sampling options.

    With both limits, ``top_p`` applies to the tokens that ``top_k`` keeps.

    Attributes:
        num_tokens: maximum number of tokens to generate.
        longest: maximum number of tokens in prompt and continuation; None: the model's positions.
        temperature: divisor of the logits; 0 selects the most likely token, like ``top_k`` 1.
        top_k: sample from this many most likely tokens; 0: all.
        top_p: sample from the smallest set of tokens with this total probability, from 0 to 1; 0: all.
        seed: random seed. Prompt i uses seed + i, so a text does not depend on the rest of its batch.
        recompute: recompute the whole text for every token instead of using a KV cache.
        alternatives: number of most likely tokens to return with log-probabilities for each position; None:
            no log-probabilities.

    Raises:
        UsageError: a value is out of range.
    """

    num_tokens: int = 64
    longest: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 0.0
    seed: int = 1234
    recompute: bool = False
    alternatives: int | None = None

    def __post_init__(self) -> None:
        for flag, value, fits, expected in (
            ("--num-tokens", self.num_tokens, self.num_tokens > 0, "at least 1"),
            ("--out-seq-length", self.longest, self.longest is None or self.longest > 1, "at least 2"),
            ("--temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("--top-k", self.top_k, self.top_k >= 0, "at least 0"),
            ("--top-p", self.top_p, 0 <= self.top_p <= 1, "a number from 0 to 1"),
            ("--seed", self.seed, 0 <= self.seed < 1 << 62, "an integer from 0 to 2^62"),
        ):
            if not fits:
                raise UsageError(f"{flag} {value}", expected, "Change it.")

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0 or self.top_k == 1
