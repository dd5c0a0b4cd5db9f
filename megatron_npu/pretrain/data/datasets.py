"""Build training, validation and test samples from megatron-core's datasets, starting at the run's position.

Each process reads its own samples (the files are memory-mapped), so tensor-parallel ranks need no broadcast,
and middle pipeline stages read nothing.
"""

from __future__ import annotations

import contextlib
import logging
import sys
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
from megatron_npu.pretrain.flags.plan_parts import BatchFlags, DatasetFlags

Batch = dict[str, torch.Tensor]
Batches = list[Iterator[Batch]] | None  # of each chunk of the model


class Datasets(NamedTuple):
    """The training, validation and test datasets of a run.

    A dataset is None if its split is empty or not needed.

    Attributes:
        train, valid, test: the dataset of each split.
        valid_sets: with --multiple-validation-sets, the dataset of each prefix, used instead of ``valid``.
    """

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None
    valid_sets: tuple[tuple[str, Dataset], ...] = ()


def datasets(flags: DatasetFlags) -> Datasets:
    """Build the sample indices on rank 0, then open them on every rank.

    All ranks must call this.

    As in Megatron, data is split by documents, and a split that is too short is repeated.

    Raises:
        UsageError: the indices cannot be written.
    """
    from megatron.core.datasets.gpt_dataset import GPTDataset, MockGPTDataset

    validates = bool(flags.eval_iters or flags.full_validation)
    prefixes = (validates and flags.multiple_validation_sets and flags.valid_data_path) or ()
    read = {
        "train": True,
        "valid": validates and not prefixes,
        "test": bool(flags.eval_iters and flags.test_data_path),
    }
    all_or_some = None if flags.full_validation else evaluation_count(flags) * flags.global_batch_size
    sizes = _sizes(flags, read, all_or_some)
    kind = MockGPTDataset if flags.mock_data else GPTDataset
    found = build(kind, sizes, _config(flags, _source(flags, read)))
    if flags.rank == 0 and found.train is not None and not flags.mock_data:
        _warn_of_unknown_tokens(flags, found.train)
    alone = [(prefix, _alone(flags, kind, prefix, all_or_some)) for prefix in prefixes]
    return found._replace(valid_sets=tuple(alone))


def _sizes(flags: DatasetFlags, read: Mapping[str, bool], validation: int | None) -> list[int | None]:
    """Return the numbers of training, validation and test samples that a run needs.

    None stands for all samples of a split.
    """
    batch = flags.global_batch_size
    train = flags.epoch_samples or flags.train_samples or flags.train_iters * batch
    return [train, validation if read["valid"] else 0, flags.eval_iters * batch * read["test"]]


def _alone(flags: DatasetFlags, kind: Any, prefix: str, samples: int | None) -> Any:
    """Return a validation dataset of ``samples`` samples that is built from a single dataset prefix.

    If ``samples`` is None, it has all samples.
    """
    source = {"blend_per_split": [None, ([prefix], None), None]}
    return build(kind, [0, samples, 0], _config(flags, source)).valid


def _config(flags: DatasetFlags, source: Mapping[str, Any]) -> Any:
    """Return the configuration of megatron-core's datasets."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    return GPTDatasetConfig(
        random_seed=flags.seed,
        sequence_length=flags.seq_length,
        **source,
        path_to_cache=flags.data_cache_path,
        tokenizer=tokenizers.DatasetTokenizer(tokenizers.build(flags.tokenizer)),
        reset_position_ids=flags.reset_position_ids,
        reset_attention_mask=flags.reset_attention_mask,
        eod_mask_loss=flags.eod_mask_loss,
        create_attention_mask=flags.reset_attention_mask,  # else causal, which needs none
    )


def _warn_of_unknown_tokens(flags: DatasetFlags, dataset: Any) -> None:
    """Warn if most tokens of the first samples are unknown to the model's vocabulary."""
    unknown = tokenizers.build(flags.tokenizer).unknown
    if unknown is None:
        return
    tokens = torch.stack([dataset[i]["tokens"] for i in range(min(len(dataset), unknown_tokens.SAMPLES))])
    count = int((tokens == unknown).sum())
    named = f"--tokenizer-model {flags.tokenizer.tokenizer_model}"
    if told := unknown_tokens.warning(count, tokens.numel(), "the training data", named):
        print(f"megatron-npu pretrain: {told}", file=sys.stderr, flush=True)


def build(kind: Any, sizes: Sequence[int | None], config: Any) -> Datasets:
    """Build datasets of the given megatron-core class.

    All ranks must call this.

    Args:
        kind: a dataset class.
        sizes: the numbers of samples for training, validation and test. A split of size 0 is not read; for
            None, the whole split is used once.
        config: the configuration of the datasets; its split is changed in place.

    Raises:
        UsageError: the indices cannot be written, or are not visible on a rank that reads them.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    if config.split is not None:
        _leave_out_unread_parts(config, sizes)
    builder = BlendedMegatronDatasetBuilder(kind, list(sizes), lambda: True, config)
    try:
        with _mock_indices_unmentioned():
            return Datasets(*builder.build())
    except Exception as error:  # megatron-core raises a bare one (0.12 to 0.16)
        if isinstance(error, UsageError) or not isinstance(error.__cause__, OSError):
            raise
        raise UsageError(
            f"the index files of the dataset cannot be written: {error.__cause__}",
            remedy="Pass --data-cache-path DIR with a writable directory; by default they are next to "
            "the data.",
        ) from error


@contextlib.contextmanager
def _mock_indices_unmentioned() -> Iterator[None]:
    """Suppress upstream's warning that the indices of mock data are not saved."""
    upstream, beginning = (
        logging.getLogger("megatron.core.datasets.gpt_dataset"),
        "Unable to save MockGPTDataset",
    )

    def keep(record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(beginning)

    upstream.addFilter(keep)
    try:
        yield
    finally:
        upstream.removeFilter(keep)


def _source(flags: DatasetFlags, read: Mapping[str, bool]) -> dict[str, Any]:
    """Return the options that tell megatron-core from which files each split is built.

    Mock data has no source.
    """
    if flags.train_data_path:
        words = {part: flags.of_part(part) if read[part] else None for part in PARTS}
        return {"blend_per_split": [_blend(words[part], f"--{part}-data-path") for part in PARTS]}
    return {"blend": _blend(flags.data_path, "--data-path"), "split": split_text(flags.split)}


def _blend(words: Sequence[str] | None, flag: str) -> tuple[list[str], list[float] | None] | None:
    if not words:
        return None
    weights, prefixes = blend(words, flag)
    return prefixes, weights


def _leave_out_unread_parts(config: Any, sizes: Sequence[int | None]) -> None:
    """Exclude splits that are not used, without changing the documents of the other splits.

    megatron-core (0.12 to 0.16) searches endlessly for the first token of a split without documents.
    """
    config.split_matrix = [
        None if size == 0 else bounds for size, bounds in zip(sizes, config.split_matrix, strict=True)
    ]


def evaluation_count(flags: DatasetFlags) -> int:
    """Return the number of batches for all evaluations of a run, including the final one."""
    between = flags.train_iters // flags.eval_interval if flags.eval_interval else 0
    return (between + 1) * flags.eval_iters


class ResumableBatchSampler:
    """Yield sample indices for the micro-batches of one data-parallel rank, starting after ``consumed``
    samples.

    Args:
        order: maps a position, counted from 0 since the start of the run, to a sample of the dataset.
        consumed: the number of samples that all ranks have used.
        micro_batch: the number of samples per micro batch.
        rank, size: the rank in the data-parallel group, and the size of that group.
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


def training_batches(flags: BatchFlags, dataset: Dataset | None, consumed: int) -> Batches:
    """Return the ``batches`` of the training samples, organized in epochs if the flags request it."""
    order = None if flags.epoch_samples is None else Passes(flags.epoch_samples, flags.seed)
    return batches(flags, dataset, consumed, order)


def batches(
    flags: BatchFlags, dataset: Dataset | None, consumed: int, order: Callable[[int], int] | None = None
) -> Batches:
    """Return an endless iterator over micro-batches for each model chunk.

    The iterator is None for chunks that need no data.

    Args:
        consumed: the number of samples that all ranks have used.
        order: the order of the samples. If None, the order of the dataset.
    """
    from megatron.core import parallel_state

    at_an_end = parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if dataset is None or not at_an_end:
        return None
    order = order or RoundAndRound(len(dataset))  # type: ignore[arg-type]  # torch leaves __len__ to each
    chunks = flags.virtual_pipeline_model_parallel_size or 1
    return [micro_batches(flags, dataset, consumed, order) for _ in range(chunks)]


def micro_batches(
    flags: BatchFlags,
    dataset: Any,
    consumed: int,
    order: Callable[[int], int],
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Iterator[Batch]:
    """Yield this process's micro-batches on its device, endlessly.

    Args:
        consumed: the number of samples that all ranks have used.
        order: the order of the samples.
        collate_fn: creates a batch from a list of samples. If None, torch's default collate function is used.
    """
    from megatron.core import parallel_state

    rank = parallel_state.get_data_parallel_rank()
    sampler = ResumableBatchSampler(
        order, consumed, flags.micro_batch_size, rank, parallel_state.get_data_parallel_world_size()
    )
    device = devices.current()
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        collate_fn=collate_fn,
        num_workers=flags.num_workers,
        pin_memory=not device.is_host,
        persistent_workers=flags.num_workers > 0,
        generator=torch.Generator(),  # the loader's own draws must not move the run's generators
    )
    for batch in loader:
        moved = {name: value.to(device.torch_device(), non_blocking=True) for name, value in batch.items()}
        yield part_of_this_rank(moved)
