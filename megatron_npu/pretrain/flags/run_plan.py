"""The plan of a run, derived from its flags: ranks, length, batches, where to resume."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.pretrain.flags.batch_ramp import Ramp


@dataclass(frozen=True)
class RunPlan:
    """A run, as its resolved flags have it.

    Attributes:
        rank, world_size: which of how many processes this one is.
        data_parallel_size: how many of them have the same part of the model.
        iterations: the last one of the whole run; of samples or epochs, as many as they are.
        global_batch_size: sequences of one iteration on all ranks.
        micro_batch_size, micro_batches: sequences of one forward pass, and passes of one iteration.
        seq_length: tokens of a sequence.
        has_data: whether there are any; a model can be saved without.
        load_from: the checkpoint that the run resumes from; None: it begins again.
        ramp: of the global batch, which then has its size at the end; None: there is none.
        fully_sharded: what shards the weights: ``megatron``, ``torch`` or None.
        vocabulary, padded_vocabulary: tokens, and rows of the embedding.
    """

    rank: int
    world_size: int
    data_parallel_size: int
    iterations: int
    global_batch_size: int
    micro_batch_size: int
    micro_batches: int
    seq_length: int
    has_data: bool
    load_from: Path | None
    fully_sharded: str | None
    vocabulary: int
    padded_vocabulary: int
    ramp: Ramp | None = None

    @staticmethod
    def of(args: Namespace) -> RunPlan:
        """Return the plan of resolved flags: what ``validation.check`` returned."""
        return RunPlan(
            rank=args.rank,
            world_size=args.world_size,
            data_parallel_size=args.data_parallel_size,
            iterations=args.train_iters,
            global_batch_size=args.global_batch_size,
            micro_batch_size=args.micro_batch_size,
            micro_batches=args.num_microbatches,
            seq_length=args.seq_length,
            has_data=args.has_data,
            load_from=None if args.load_from is None else Path(args.load_from),
            fully_sharded=args.fully_sharded,
            vocabulary=args.tokenizer_vocab_size,
            padded_vocabulary=args.padded_vocab_size,
            ramp=Ramp.of(args),
        )

    def batch_behind(self, samples: int) -> int:
        """Return the sequences of the iteration that comes when so many have been used."""
        return self.global_batch_size if self.ramp is None else self.ramp.size(samples)

    def micro_batches_of(self, samples: int) -> int:
        """Return the forward passes of a rank that so many sequences of all ranks take."""
        return samples // (self.micro_batch_size * self.data_parallel_size)

    @property
    def tokens(self) -> int:
        """Tokens of one iteration on all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def only_saves(self) -> bool:
        """Whether no iteration is asked for: the model is made, or loaded, and saved."""
        return self.iterations == 0
