"""Training, validation and test samples: megatron-core's datasets, read from where a run stands.

Each process reads what it needs by itself (the files are mapped into memory), so no broadcast is needed
between tensor-parallel ranks; stages in the middle of a pipeline read nothing.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_npu import devices
from megatron_npu.errors import UsageError
from megatron_npu.training import tokenizers

Batch = dict[str, torch.Tensor]


class Datasets(NamedTuple):
    """The datasets of a run; None where the split leaves nothing or nothing is needed."""

    train: Dataset | None
    valid: Dataset | None
    test: Dataset | None


def datasets(args: Namespace) -> Datasets:
    """Build the indices on rank 0, then open them on every rank; all ranks must call this.

    As in Megatron the split is by documents, and a split that is too short is gone through again.

    Raises:
        UsageError: the indices cannot be written.
    """
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset

    weights, prefixes = blend(args.data_path or [])
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=(prefixes, weights) if prefixes else None,
        split=args.split,
        path_to_cache=args.data_cache_path,
        tokenizer=tokenizers.DatasetTokenizer(tokenizers.build(args)),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.reset_attention_mask,  # else causal, which needs none
    )
    _leave_out_unread_parts(args, config)
    evaluations = evaluation_count(args)
    sizes = [batches * args.global_batch_size for batches in (args.train_iters, evaluations, 0)]
    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config)
    try:
        return Datasets(*builder.build())
    except Exception as error:  # megatron-core raises a bare one (0.12 to 0.16)
        if not isinstance(error.__cause__, OSError):
            raise
        raise UsageError(
            f"the indices of the data cannot be written: {error.__cause__}",
            "a directory for them (default: one beside the data, with their name)",
            "Give --data-cache-path DIR.",
        ) from error


def blend(words: Sequence[str]) -> tuple[list[float] | None, list[str]]:
    """Read ``--data-path``: prefixes alone, or a weight before each; return weights (or None) and prefixes.

    Raises:
        UsageError: weights before some prefixes only, or one that is not above 0.
    """
    weights = [_number(word) for word in words[::2]]
    if all(weight is None for weight in weights):
        return None, list(words)
    known = [weight for weight in weights if weight is not None]
    if len(words) % 2 or len(known) < len(weights) or min(known) <= 0:
        raise UsageError(
            f"--data-path {' '.join(words)}",
            "prefixes, or a weight above 0 before each prefix",
            "Write for example --data-path 0.7 first 0.3 second.",
        )
    return known, list(words[1::2])


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _leave_out_unread_parts(args: Namespace, config: Any) -> None:
    """Take the parts that no one reads out of the split; the others stay the documents they are.

    megatron-core (0.12 to 0.16) looks for the first token of a part without documents for ever.
    """
    read = (True, args.eval_iters > 0, False)
    config.split_matrix = [
        part if needed else None for part, needed in zip(config.split_matrix, read, strict=True)
    ]


def evaluation_count(args: Namespace) -> int:
    """Return the batches that all evaluations of a run need: one at the end, the others in between."""
    between = args.train_iters // args.eval_interval if args.eval_interval else 0
    return (between + 1) * args.eval_iters


class ResumableBatchSampler:
    """Sample numbers of the micro batches of one data-parallel rank, from ``consumed`` on, in order.

    Args:
        total: number of samples in the dataset; after the last one comes the first again.
        consumed: samples that all ranks together have used before.
        micro_batch: samples of one micro batch.
        rank, size: of the data-parallel group.
    """

    def __init__(self, total: int, consumed: int, micro_batch: int, rank: int, size: int) -> None:
        self.total, self.consumed, self.micro_batch = total, consumed, micro_batch
        self.rank, self.size = rank, size

    def __iter__(self) -> Iterator[list[int]]:
        at = self.consumed
        while True:
            begin = at + self.rank * self.micro_batch
            yield [number % self.total for number in range(begin, begin + self.micro_batch)]
            at += self.micro_batch * self.size


def batches(args: Namespace, dataset: Dataset | None, consumed: int) -> list[Iterator[Batch]] | None:
    """Return one endless iterator of micro batches for each chunk of the model; None if none is needed."""
    from megatron.core import parallel_state

    at_an_end = parallel_state.is_pipeline_first_stage(
        ignore_virtual=True
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    if dataset is None or not at_an_end:
        return None
    return [_batches(args, dataset, consumed) for _ in range(args.virtual_pipeline_model_parallel_size or 1)]


def _batches(args: Namespace, dataset: Any, consumed: int) -> Iterator[Batch]:
    from megatron.core import parallel_state
    from megatron.core.utils import get_batch_on_this_cp_rank

    rank = parallel_state.get_data_parallel_rank()
    sampler = ResumableBatchSampler(
        len(dataset), consumed, args.micro_batch_size, rank, parallel_state.get_data_parallel_world_size()
    )
    device = devices.current()
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=args.num_workers,
        pin_memory=not device.is_host,
        persistent_workers=args.num_workers > 0,
        generator=torch.Generator(),  # the loader's own draws must not move the run's generators
    )
    for batch in loader:
        moved = {name: value.to(device.torch_device(), non_blocking=True) for name, value in batch.items()}
        yield get_batch_on_this_cp_rank(moved)
