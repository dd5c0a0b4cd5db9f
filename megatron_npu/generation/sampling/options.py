"""Define the sampling options and their valid ranges."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Options:
    """The options that control how tokens are sampled.

    If both ``top_k`` and ``top_p`` are set, ``top_p`` applies to the tokens that ``top_k`` keeps.

    Attributes:
        num_tokens: the maximum number of tokens to generate.
        longest: the maximum number of tokens in the prompt and its continuation. If None, the limit is the
            number of positions of the model.
        temperature: the divisor of the logits. The value 0 selects the most likely token, like a ``top_k`` of
            1.
        top_k: sample from this many most likely tokens; 0 means all tokens.
        top_p: sample from the smallest set of tokens with this total probability, from 0 to 1; 0 means all
            tokens.
        seed: the random seed. Prompt i uses seed + i, so that a text does not depend on the rest of its
            batch.
        recompute: whether to recompute the whole text for every token instead of using a KV cache.
        alternatives: the number of most likely tokens to return with their log-probabilities for each
            position. If None, no log-probabilities are returned.

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
                raise UsageError(f"{flag} must be {expected}, but got {value}. Correct the value.")

    @property
    def greedy(self) -> bool:
        """True if decoding is greedy, so that no random numbers are used."""
        return self.temperature == 0 or self.top_k == 1
