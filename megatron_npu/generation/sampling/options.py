"""Sampling options, and their valid ranges."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Options:
    """How a continuation is drawn.

    With both limits, ``top_p`` counts what ``top_k`` has left.

    Attributes:
        num_tokens: tokens to add at most.
        longest: tokens of prompt and continuation together at most; None: as many as the model has positions.
        temperature: logits are divided by it; 0 takes the likeliest token, as ``top_k`` 1 does.
        top_k: draw among so many likeliest tokens; 0: all.
        top_p: draw among the fewest tokens whose probabilities sum to it, from 0 to 1; 0: all.
        seed: of the draws. The prompt at place i draws with seed + i, so that a text does not depend on what
            else is in its batch.
        recompute: read the whole text for every token instead of keeping keys and values of the past.
        alternatives: for each token keep its log probability and those of so many likeliest ones; None: none.

    Raises:
        UsageError: a number out of range.
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
            ("--top-p", self.top_p, 0 <= self.top_p <= 1, "from 0 to 1"),
            ("--seed", self.seed, 0 <= self.seed < 1 << 62, "from 0 to 2^62"),
        ):
            if not fits:
                raise UsageError(f"{flag} {value}", expected, "Change it.")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken and nothing drawn."""
        return self.temperature == 0 or self.top_k == 1
