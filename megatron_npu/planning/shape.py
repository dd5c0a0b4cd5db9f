"""Describe the model of a job as far as the command line determines its size and its computation."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_npu.base.errors import UsageError
from megatron_npu.planning.job import TRAIN, Job

_NEEDED = ("--num-layers", "--hidden-size", "--num-attention-heads", "--seq-length", "--global-batch-size")
_VOCABULARY = 50257  # GPT-2's, where the command line names none


@dataclass(frozen=True)
class Shape:
    """The sizes of a GPT model, with or without experts.

    Attributes:
        heads, groups, channels: the number of query heads, the number of key and value heads, and the size of
            a head.
        ffn, matrices: the inner size of the MLP (of one expert), and its number of matrices.
        experts, chosen: the number of experts, and the number of experts per token; 0 and 1 without experts.
    """

    layers: int
    hidden: int
    heads: int
    groups: int
    channels: int
    ffn: int
    matrices: int
    vocabulary: int
    tied: bool
    length: int
    experts: int
    chosen: int

    @classmethod
    def of(cls, job: Job) -> Shape:
        """Read the sizes of the model from a command line.

        Raises:
            UsageError: a size is missing.
        """
        if job.family == TRAIN:
            raise UsageError(
                "--search does not support train; it requires a Megatron GPT (pretrain, or a stock script)",
                remedy="Remove --search.",
            )
        if absent := [flag for flag in _NEEDED if not job.number(flag, 0)]:
            raise UsageError(
                f"--search requires the model's sizes after --, but {', '.join(absent)} is missing",
                remedy="Add these flags after --.",
            )
        hidden, heads = job.number("--hidden-size", 0), job.number("--num-attention-heads", 0)
        gated = job.has("--swiglu")
        default = hidden * 4 * 2 // 3 // 64 * 64 if gated else 4 * hidden
        experts = job.number("--num-experts", 0)
        ffn = job.number("--ffn-hidden-size", default)
        vocabulary = job.number("--padded-vocab-size", job.number("--vocab-size", _VOCABULARY))
        return cls(
            layers=job.number("--num-layers", 0),
            hidden=hidden,
            heads=heads,
            groups=job.number("--num-query-groups", heads),
            channels=job.number("--kv-channels", hidden // heads),
            ffn=job.number("--moe-ffn-hidden-size", ffn) if experts else ffn,
            matrices=2 + gated,
            vocabulary=vocabulary,
            tied=not job.has("--untie-embeddings-and-output-weights"),
            length=job.number("--seq-length", 0),
            experts=experts,
            chosen=job.number("--moe-router-topk", 2) if experts else 1,
        )

    @property
    def attention(self) -> int:
        """The number of weights per layer that belong to attention."""
        return self.hidden * self.channels * 2 * (self.heads + self.groups)

    @property
    def mlp(self) -> int:
        """The number of weights per layer, or per expert, that belong to the MLP."""
        return self.matrices * self.hidden * self.ffn

    @property
    def table(self) -> int:
        """The number of weights in the embedding table."""
        return self.vocabulary * self.hidden
