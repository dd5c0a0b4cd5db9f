"""Training, validation and test samples: megatron-core's datasets, starting at the run's position.

Each process reads its own samples (the files are memory-mapped), so tensor-parallel ranks need no broadcast;
middle pipeline stages read nothing.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.data.sequence_parts import part_of_this_rank
from megatron_npu.data.tokenization import unknown as unknown_tokens
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.data.epochs import Passes, RoundAndRound
from megatron_npu.pretrain.data.sources import PARTS, blend, split_text

Batch = dict[str, torch.Tensor]
Batches = list[Iterator[Batch]] | None  # of each chunk of the model


class Datasets(NamedTuple):
    """The datasets of a run; None if a split is empty or not needed.

    Attributes:
        train, valid, test: the dataset of each split.
        valid_sets: with --multiple-validation-sets the dataset of each prefix, instead of ``valid``.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    valid_sets: tuple[tuple[str, Dataset], ...] = ()


def datasets(args: Namespace) -> Datasets:
    """Build the indices on rank 0, then open them on every rank; all ranks must call this.

    As in Megatron the split is by documents, and a split that is too short is repeated.

    Raises:
        UsageError: the indices cannot be written.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    validates = bool(args.eval_iters or args.full_validation)
    prefixes = args.valid_data_path if validates and args.multiple_validation_sets else ()
    read = {
        "train": True,
        "valid": validates and not prefixes,
        "test": bool(args.eval_iters and args.test_data_path),
    }
    all_or_some = None if args.full_validation else evaluation_count(args) * args.global_batch_size
    sizes = _sizes(args, read, all_or_some)
    kind = MockGPTDataset if args.mock_data else GPTDataset
    found = build(kind, sizes, _config(args, _source(args, read)))
    if args.rank == 0 and found.train is not None and not args.mock_data:
        _warn_of_unknown_tokens(args, found.train)
    alone = [(prefix, _alone(args, kind, prefix, all_or_some)) for prefix in prefixes]
    return found._replace(valid_sets=tuple(alone))


def _sizes(args: Namespace, read: Mapping[str, bool], validation: int | None) -> list[int | None]:
    """Return the samples of training, validation and test; None: all that are there."""
    batch = args.global_batch_size
    train = args.epoch_samples or args.train_samples or args.train_iters * batch
    return [train, validation if read["valid"] else 0, args.eval_iters * batch * read["test"]]


def _alone(args: Namespace, kind: Any, prefix: str, samples: int | None) -> Any:
    """Return the validation samples of one prefix; None: all that there are."""
    source = {"blend_per_split": [None, ([prefix], None), None]}
    return build(kind, [0, samples, 0], _config(args, source)).valid


def _config(args: Namespace, source: Mapping[str, Any]) -> Any:
    """Return the configuration of megatron-core's datasets."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        **source,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizers.DatasetTokenizer(tokenizers.build(args)),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,  # else causal, which needs none
    )


def _warn_of_unknown_tokens(args: Namespace, dataset: Any) -> None:
    """Say where most tokens of the first samples are the one of what the vocabulary does not have."""
    unknown = tokenizers.build(args).unknown
    if unknown is None:
        return
    tokens = torch.stack([dataset[i]["tokens"] for i in range(min(len(dataset), unknown_tokens.SAMPLES))])
    count = int((tokens == unknown).sum())
    named = f"--tokenizer-model {args.tokenizer_model}"
    if told := unknown_tokens.warning(count, tokens.numel(), "the training data", named):
        print(f"megatron-npu pretrain: {told}", file=sys.stderr, flush=True)


def build(kind: Any, sizes: Sequence[int | None], config: Any) -> Datasets:
    """Return megatron-core's datasets of a kind; all ranks must call this.

    Args:
        kind: a class of dataset.
        sizes: number of samples for training, validation and test; 0: not read; None: the whole split, once.
        config: configuration of the datasets; its split is changed in place.

    Raises:
        UsageError: the indices cannot be written, or are not visible on a rank that reads them.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if config.split is not None:
        _leave_out_unread_parts(config, sizes)
    builder = BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config)
    try:
        return Datasets(*builder.build())
    except Exception as error:  # megatron-core raises a bare one (0.12 to 0.16)
        if isinstance(error, UsageError) or not isinstance(error.__cause__, OSError):
            raise
        raise UsageError(
            f"the indices of the data cannot be written: {error.__cause__}",
            "a directory for them (default: beside the data, with their name)",
            "Pass --data-cache-path DIR.",
        ) from error


def _source(args: Namespace, read: Mapping[str, bool]) -> dict[str, Any]:
    """Return what tells megatron-core where the samples of each part come from: nothing for made-up ones."""
    if args.train_data_path:
        words = {part: getattr(args, f"{part}_data_path") if read[part] else None for part in PARTS}
        return {"blend_per_split": [_blend(words[part], f"--{part}-data-path") for part in PARTS]}
    return {"blend": _blend(args.data_path, "--data-path"), "split": split_text(args.split)}


def _blend(words: Sequence[str] | None, flag: str) -> tuple[list[str], list[float] | None] | None:
    if not words:
        return None
    weights, prefixes = blend(words, flag)
    return prefixes, weights


def _leave_out_unread_parts(config: Any, sizes: Sequence[int | None]) -> None:
    """Exclude unused splits; the documents of the other splits stay the same.

    megatron-core (0.12 to 0.16) searches endlessly for the first token of a split without documents.
    """
    config.split_matrix = [
        None if size == 0 else bounds for size, bounds in zip(sizes, config.split_matrix, strict=True)
    ]


def evaluation_count(args: Namespace) -> int:
    """Return the number of batches for all evaluations of a run, including the one at the end."""
    between = args.train_iters // args.eval_interval if args.eval_interval else 0
    return (between + 1) * args.eval_iters


class ResumableBatchSampler:
    """Sample numbers of the micro batches of one data-parallel rank, starting after ``consumed`` samples.

    Args:
        order: maps a position, counted from 0 since the start of the run, to a sample of the dataset.
        consumed: samples already used by all ranks.
        micro_batch: samples per micro batch.
        rank, size: rank in, and size of, the data-parallel group.
    """

    def __init__(
        self, order: Callable[[int], int], consumed: int, micro_batch: int, rank: int, size: int
    ) -> None:
        self.order, self.consumed, self.micro_batch = order, consumed, micro_batch
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[list[int]]:
        at = self.consumed
        while True:
            begin = at + self.rank * self.micro_batch
            yield [self.order(number) for number in range(begin, begin + self.micro_batch)]
            at += self.micro_batch * self.size


def training_batches(args: Namespace, dataset: Dataset | None, consumed: int) -> Batches:
    """Return ``batches`` of the training samples, in epochs if the flags request them."""
    order = None if args.epochs is None else Passes(args.epoch_samples, args.seed)
    return batches(args, dataset, consumed, order)


def batches(
    args: Namespace, dataset: Dataset | None, consumed: int, order: Callable[[int], int] | None = None
) -> Batches:
    """Return an endless iterator of micro batches for each model chunk; None for chunks that need no data.

    Args:
        consumed: samples already used by all ranks.
        order: order of the samples; None: the dataset's.
    """
    from megatron.core import parallel_state

    at_an_end = parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if dataset is None or not at_an_end:
        return None
    order = order or RoundAndRound(len(dataset))  # type: ignore[arg-type]  # torch leaves __len__ to each
    chunks = args.virtual_pipeline_model_parallel_size or 1
    return [micro_batches(args, dataset, consumed, order) for _ in range(chunks)]


def micro_batches(
    args: Namespace,
    dataset: Any,
    consumed: int,
    order: Callable[[int], int],
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Batch]:
    """Yield this process's micro batches on its device, endlessly.

    Args:
        consumed: samples already used by all ranks.
        order: order of the samples.
        collate_fn: creates a batch from a list of samples; None: torch's default.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    sampler = ResumableBatchSampler(
        order, consumed, args.micro_batch_size, rank, parallel_state.get_data_parallel_world_size()
    )
    device = devices.current()
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=args.num_workers,
        pin_memory=not device.is_host,
        persistent_workers=args.num_workers > 0,
        generator=torch.Generator(),  # the loader's own draws must not move the run's generators
    )
    for batch in loader:
        moved = {name: value.to(device.torch_device(), non_blocking=True) for name, value in batch.items()}
        yield part_of_this_rank(moved)
