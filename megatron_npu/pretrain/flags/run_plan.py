"""Derive the plan of a run from its flags: the ranks, the length, the batches and the position to resume
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron_npu.pretrain.flags.batch_ramp import Ramp
from megatron_npu.pretrain.flags.checkpoint_parts import LoadFlags, StoreFlags
from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import (
    BatchFlags,
    DatasetFlags,
    EndFlags,
    EvaluationFlags,
    ExpertFlags,
    GuardFlags,
    LogFlags,
    LoopFlags,
    ModelSizes,
    SaveFlags,
    ScheduleFlags,
)


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run, which follows from the run's resolved flags.

    Attributes:
        rank, world_size: the number of this process, and the number of processes.
        data_parallel_size: the number of processes with the same part of the model.
        iterations: the last iteration of the whole run, even if its length is given in samples or epochs.
        global_batch_size: sequences per iteration on all ranks.
        micro_batch_size, micro_batches: sequences per forward pass, and forward passes per iteration.
        seq_length: tokens per sequence.
        has_data: whether there is data; a model can be saved without data.
        load_from: the checkpoint to resume from. If None, the run starts from scratch.
        ramp: the batch size ramp, or None.
        fully_sharded: the FSDP that shards the weights: ``megatron``, ``torch`` or None.
        vocabulary, padded_vocabulary: the number of tokens, and the number of embedding rows.
        overlap_grad_reduce, overlap_param_gather: which communication overlaps with computation.
        captures_steps: whether a step is captured as one CUDA graph.
        takes_over: whether only the weights of ``load_from`` are loaded (--finetune).
        sums_over_context: whether megatron-core divides a loss by the tokens of all context-parallel ranks.
        sizes, data, batches, log, loop, ends, saves, stored, guard, evaluation, experts, schedule: the flags
            of one subject each; ``saves`` says when checkpoints are written, ``stored`` what they contain.
        loads: what is loaded from ``load_from``. If None, nothing is loaded.
        flags: all flags, frozen; checkpoints store them, and upstream's configs read fields by name.
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
    overlap_grad_reduce: bool
    overlap_param_gather: bool
    captures_steps: bool
    takes_over: bool
    sums_over_context: bool
    sizes: ModelSizes
    data: DatasetFlags
    batches: BatchFlags
    log: LogFlags
    loop: LoopFlags
    ends: EndFlags
    saves: SaveFlags
    stored: StoreFlags
    loads: LoadFlags | None
    guard: GuardFlags
    evaluation: EvaluationFlags
    experts: ExpertFlags
    schedule: ScheduleFlags
    flags: Flags
    ramp: Ramp | None = None

    @staticmethod
    def of(args: Flags) -> RunPlan:
        """Create the plan from resolved flags, which ``validation.check`` returns."""
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
            overlap_grad_reduce=args.overlap_grad_reduce,
            overlap_param_gather=args.overlap_param_gather,
            captures_steps=args.cuda_graph_impl != "none",
            takes_over=args.finetune,
            sums_over_context=_sums_over_context(args),
            sizes=ModelSizes.of(args),
            data=DatasetFlags.of(args),
            batches=BatchFlags.of(args),
            log=LogFlags.of(args),
            loop=LoopFlags.of(args),
            ends=EndFlags.of(args),
            saves=SaveFlags.of(args),
            stored=StoreFlags.of(args),
            loads=None if args.load_from is None else LoadFlags.of(args),
            guard=GuardFlags.of(args),
            evaluation=EvaluationFlags.of(args),
            experts=ExpertFlags.of(args),
            schedule=ScheduleFlags.of(args),
            flags=args,
            ramp=Ramp.of(args),
        )

    def batch_behind(self, samples: int) -> int:
        """Return the size of the global batch that follows the given number of sequences."""
        return self.global_batch_size if self.ramp is None else self.ramp.size(samples)

    def micro_batches_of(self, samples: int) -> int:
        """Return how many forward passes each rank needs for the given number of sequences on all ranks."""
        return samples // (self.micro_batch_size * self.data_parallel_size)

    @property
    def tokens(self) -> int:
        """The number of tokens per iteration on all ranks."""
        return self.global_batch_size * self.seq_length

    @property
    def only_saves(self) -> bool:
        """True if the run has no iterations, and only initializes or loads the model in order to save it."""
        return self.iterations == 0


def _sums_over_context(args: Flags) -> bool:
    """Return True if megatron-core divides by the token count of all context-parallel ranks.

    Up to 0.12 it multiplies each micro batch's mean loss by the number of context-parallel ranks.
    """
    version = tuple(map(int, args.megatron_version.split(".")[:2]))
    return args.context_parallel_size > 1 and not args.calculate_per_token_loss and version < (0, 13)
