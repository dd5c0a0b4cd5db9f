"""Define the parts of the flags of ``train``, each of which contains the flags of one subject.

Each part is a frozen class with typed fields named like the flags. ``of`` fills it from parsed flags. A part
is created where its subject begins, because a user's script may change flags until then.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from typing import Any

from megatron_npu.pretrain.flags.frozen_flags import Flags
from megatron_npu.pretrain.flags.plan_parts import Part, SinkFlags, TokenizerFlags


@dataclass(frozen=True)
class MeetingFlags(Part):
    """Flags that determine how the ranks connect, and where they save together."""

    rank: int
    world_size: int
    distributed_timeout_minutes: float
    save: str | None
    save_per_machine: bool
    object_storage: str | None


@dataclass(frozen=True)
class DataFlags(Part):
    """Flags that name a task's data set, and that split it if it has no validation data.

    ``data_path`` is a list if several paths were given.
    """

    data_path: str | list[str]
    data_name: str | None
    validation_fraction: float
    seed: int


@dataclass(frozen=True)
class SkipFlags(Part):
    """Flags that determine how many malformed rows may be skipped, and where they are listed."""

    skip_bad_rows: int
    save: str | None
    rank: int


@dataclass(frozen=True)
class PieceFlags(TokenizerFlags):
    """Flags that specify a tokenizer, which by default is that of the model."""

    pretrained_model_name_or_path: str | None = None


@dataclass(frozen=True)
class LengthFlags(Part):
    """Flags that determine the length of a training run."""

    epochs: int | None
    train_iters: int | None
    num_microbatches: int


@dataclass(frozen=True)
class RateFlags(Part):
    """Flags that define the schedule of the learning rate of a run with ``train_iters`` iterations."""

    lr: float
    min_lr: float
    lr_decay_style: str
    lr_decay_iters: int | None
    lr_warmup_iters: int
    lr_warmup_fraction: float | None
    train_iters: int


@dataclass(frozen=True)
class LoopFlags(Part):
    """Flags that set what happens between two iterations, and what can end the run."""

    log_interval: int
    eval_interval: int | None
    exit_interval: int | None
    exit_signal_handler: bool
    check_weight_hash_across_dp_replicas_interval: int | None
    world_size: int


@dataclass(frozen=True)
class ReportFlags(SinkFlags):
    """Flags whose values appear in the log."""

    task: str | None = None
    world_size: int = 1
    data_parallel_size: int = 1
    global_batch_size: int = 1
    micro_batch_size: int = 1
    num_microbatches: int = 1
    epoch_iters: int = 1
    seq_length: int | None = None


@dataclass(frozen=True)
class BeginFlags(Part):
    """Flags that name the checkpoint to resume from, or the model to start from."""

    load: str | None
    load_last_good: bool
    save: str | None
    user_script: str | None
    pretrained_model_name_or_path: str | None


@dataclass(frozen=True)
class LoadFlags(Part):
    """Flags that select the checkpoint to resume from.

    ``all_flags`` are the flags of the whole run, which are compared with those of the checkpoint.
    """

    load: str
    load_last_good: bool
    rank: int
    world_size: int
    all_flags: Flags

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"all_flags": _frozen(args)}


@dataclass(frozen=True)
class SaveFlags(Part):
    """Flags that determine where and how often the run is saved, and what its model card says.

    ``all_flags`` are the flags of the whole run: a checkpoint stores them, and the card lists some of them.
    """

    save: str
    save_interval: int | None
    rank: int
    task: str | None
    pretrained_model_name_or_path: str | None
    data_path: str | list[str] | None
    data_name: str | None
    all_flags: Flags

    @classmethod
    def _derived(cls, args: Namespace) -> dict[str, Any]:
        return {"all_flags": _frozen(args)}


def _frozen(args: Namespace) -> Flags:
    if not isinstance(args, Flags):
        raise TypeError("the flags are not settled yet: pass the result of RunPlan.settled")
    return args
