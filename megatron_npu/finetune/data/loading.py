"""Load batches whose contents depend only on the seed, the epoch and the batch number.

Batches are moved to the device of their rank. Micro-batch ``m`` of an epoch contains the samples ``m * size``
to ``(m + 1) * size`` in the epoch's order, and rank ``r`` of ``n`` gets the micro-batches ``r``, ``r + n``,
``r + 2n``, … Therefore, an iteration uses the same samples on any number of ranks, and a run that resumes
within an epoch gets the remaining samples. Random numbers in a collate function depend only on the
micro-batch's number, not on the number of workers, and drawing them does not affect the generators used by
dropout. With ``sample_seeds``, the random numbers depend on the sample instead; ``--task masked_lm`` uses
this for its masks.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.run.label_shares import Held
from megatron_npu.finetune.run.ranks import Ranks

Collate = Callable[[list[Any]], Any]
_OF_SAMPLES = 1  # in a key: behind it come places of samples, not numbers of micro-batches
_seeds: ContextVar[list[int] | None] = ContextVar("seeds of the samples that are collated", default=None)


@dataclass(frozen=True)
class Sampling:
    """The assignment of a dataset's samples to the batches of a rank.

    Attributes:
        size: number of samples per batch on a rank.
        place: the position of this rank among the ranks that share the data.
        shuffle: whether to use a new order in each epoch rather than the dataset's order.
        whole: the number of ranks times the number of batches in a complete step; incomplete steps are
            dropped. If 0, each sample occurs once: ranks may have smaller batches in the last step, and if
            the samples cannot be distributed evenly, the last sample is repeated (``Loader.remainder``).
        seed: random seed for the order and for ``collate_fn``.
        repeats: whether to reuse the same random numbers in each pass, as evaluation does.
    """

    size: int
    place: Ranks
    shuffle: bool = False
    whole: int = 0
    seed: int = 0
    repeats: bool = False


class Loader:
    """Iterable over the batches of a dataset that belong to one rank.

    Each iteration is one epoch.

    Args:
        dataset: a dataset with ``__len__`` and ``__getitem__``; not a stream.
        collate_fn: creates a batch from a list of samples.
        sampling: the assignment of samples to batches.
        device: the device to which batches are moved.
        workers: number of worker processes.
        look: a function that is called with each batch before the batch is moved, and raises an error if the
            batch is invalid.

    Raises:
        UsageError: the dataset has no length.
    """

    def __init__(
        self,
        dataset: Any,
        collate_fn: Collate | None = None,
        *,
        sampling: Sampling,
        device: torch.device,
        workers: int = 0,
        look: Callable[[Any], None] | None = None,
    ) -> None:
        require_length(dataset, "the dataset")
        self.dataset, self.collate_fn = dataset, collate_fn or default_collate
        self.sampling, self.device, self.workers = sampling, device, workers
        self.remainder = 0
        """Samples of all ranks in the last step, while it is being used and is not full; else 0."""
        self._epoch, self._look = 0, look

    def __len__(self) -> int:
        """Return the number of batches in an epoch."""
        asked, ranks = self.sampling, self.sampling.place.world_size
        samples, together = len(self.dataset), asked.size * ranks
        if asked.whole:
            return samples // (asked.size * asked.whole) * (asked.whole // ranks)
        return -(-samples // together)

    def __iter__(self) -> Iterator[Any]:
        batches = self.batches(self._epoch)
        self._epoch += not self.sampling.repeats
        return batches

    def batches(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Yield the batches of an epoch, starting with batch number ``start``."""
        for held in self.held(epoch, start):
            yield on_device(held.batch, self.device)

    def held(self, epoch: int, start: int = 0, *, once: bool = False) -> Iterator[Held]:
        """Yield the batches of an epoch in host memory, starting with batch number ``start``.

        Args:
            epoch, start: see ``batches``.
            once: whether to omit repeated samples. A rank that has no samples of its own then gets one sample
                that is not counted.
        """
        of_epoch = _Batches(self, self._order(epoch), epoch, once)
        loader = DataLoader(
            of_epoch,
            batch_size=None,
            sampler=range(start, len(self)),
            num_workers=self.workers,
            collate_fn=_as_it_is,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else it draws a seed from the generator that dropout draws from
        )
        full = self.sampling.size * self.sampling.place.world_size
        left = len(self.dataset) - (len(self) - 1) * full
        try:
            for number, batch in enumerate(loader, start):
                if not self.sampling.whole and number == len(self) - 1 and left < full:
                    self.remainder = left
                if self._look is not None:
                    self._look(batch)
                yield Held(batch, not once or of_epoch.first_of(number) < len(self.dataset))
        finally:
            self.remainder = 0

    def forever(self, start: int = 0) -> Iterator[Any]:
        """Yield batches endlessly, starting with batch number ``start``, counted over all epochs."""
        for held in self.held_forever(start):
            yield on_device(held.batch, self.device)

    def held_forever(self, start: int = 0, *, once: bool = False) -> Iterator[Held]:
        """Yield batches in host memory, endlessly.

        ``once`` has the same meaning as in ``held``.
        """
        epoch, first = divmod(start, len(self))
        while True:
            yield from self.held(epoch, first, once=once)
            epoch, first = epoch + 1, 0

    def _order(self, epoch: int) -> Sequence[int]:
        samples = len(self.dataset)
        if not self.sampling.shuffle:
            return range(samples)
        generator = torch.Generator().manual_seed(_seed(self.sampling.seed, epoch))
        return torch.randperm(samples, generator=generator).tolist()


class _Batches(Dataset):
    """The batches of a rank in one epoch, accessed by their numbers.

    With ``once``, repeated samples are omitted.
    """

    def __init__(self, loader: Loader, order: Sequence[int], epoch: int, once: bool) -> None:
        self._dataset, self._collate, self._order = loader.dataset, loader.collate_fn, order
        self._size, self._place, self._once = loader.sampling.size, loader.sampling.place, once
        self._key = (loader.sampling.seed, epoch)

    def first_of(self, number: int) -> int:
        """Return the position of the first sample of a batch in the order of the epoch.

        The position may be past the end.
        """
        return number * self._place.world_size * self._size + self._place.rank * self._size_of(number)

    def _size_of(self, number: int) -> int:
        left = len(self._order) - number * self._place.world_size * self._size
        return min(self._size, -(-left // self._place.world_size))

    def __getitem__(self, number: int) -> Any:
        first, last = self.first_of(number), len(self._order) - 1
        places = [min(index, last) for index in range(first, first + self._size_of(number))]
        if self._once:
            places = sorted(set(places))
        chosen = [int(self._order[place]) for place in places]
        several = getattr(self._dataset, "__getitems__", None)
        world_size, rank = self._place.world_size, self._place.rank
        seeds = [_seed(*self._key, _OF_SAMPLES, place) for place in places]
        with _drawing(*self._key, number * world_size + rank), _known(seeds):
            rows = several(chosen) if several else [self._dataset[index] for index in chosen]
            return self._collate(rows) if self._collate is not default_collate else _stacked(rows)


def sample_seeds(count: int) -> list[int]:
    """Return a seed for each sample of the current batch, determined by the sample's position in the epoch.

    Random numbers from these seeds do not depend on how a global batch is split into micro-batches. Outside a
    ``Loader``, the seeds are drawn from torch's generator.
    """
    seeds = _seeds.get()
    if seeds is None or len(seeds) != count:
        seeds = torch.randint(2**31, (count,), device="cpu").tolist()
    return seeds


@contextlib.contextmanager
def _known(seeds: list[int]) -> Iterator[None]:
    token = _seeds.set(seeds)
    try:
        yield
    finally:
        _seeds.reset(token)


def require_length(dataset: Any, what: str) -> None:
    """Check that a dataset has a length and supports indexing.

    Raises:
        UsageError: the dataset has no length or cannot be indexed.
    """
    indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    reason = ""
    if indexed and not isinstance(dataset, IterableDataset | Mapping):
        try:
            len(dataset)
            return
        except (TypeError, ValueError) as error:  # of a length that is not one
            reason = f" whose length is invalid ({error})"
    raise UsageError(
        f"{what} must have a length and indexable samples (torch.utils.data.Dataset), but it is a "
        f"{type(dataset).__name__}{reason}. Return such a dataset from the provider; write streamed data to "
        "a file first."
    )


class Batch(dict[Any, Any]):
    """A batch with a ``to`` method, which users' training loops call on batches from Transformers."""

    def to(self, device: Any) -> Batch:
        """Move the values to a device in place.

        A move to "cuda" has no effect on a machine without a GPU.
        """
        if not _is_here(device):
            self.update({name: on_device(value, device) for name, value in self.items()})
        return self


def _is_here(device: Any) -> bool:
    """Return True if a script that was written for GPUs requests "cuda" on a machine without a GPU."""
    return torch.device(device).type == "cuda" and not torch.cuda.is_available()


@functools.cache
def _staying(kind: type) -> type:
    """Return a subclass of a batch class that ignores requests to move to a GPU on a machine without one."""

    def to(self: Any, device: Any, *args: Any, **kwargs: Any) -> Any:
        return self if _is_here(device) else kind.to(self, device, *args, **kwargs)  # type: ignore[attr-defined]

    return type(kind.__name__, (kind,), {"to": to, "__doc__": kind.__doc__})


def _stays(batch: Any) -> Any:
    """Make a Transformers batch ignore requests to move to a GPU on a machine without one."""
    if isinstance(batch, UserDict):
        batch.__class__ = _staying(type(batch))
    return batch


def on_device(batch: Any, device: torch.device) -> Any:
    """Move the tensors of a batch to a device.

    A batch is a mapping, a sequence, or an object with ``to``.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):  # BatchEncoding of Transformers
        return _stays(batch.to(device))
    if isinstance(batch, Mapping):
        return Batch((name, on_device(value, device)) for name, value in batch.items())
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(on_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(on_device(value, device) for value in batch)
    return batch


def _stacked(rows: list[Any]) -> Any:
    """Combine samples into a batch with torch's default collate function.

    Raises:
        UsageError: torch cannot collate the samples.
    """
    try:
        return default_collate(rows)
    except (TypeError, RuntimeError, ValueError) as error:
        raise UsageError(
            f"the samples cannot be collated into a batch: {str(error).strip().splitlines()[0]}. Samples "
            "must be tensors of equal shape, numbers, or dictionaries and tuples of them. Otherwise, return "
            "a collate_fn that builds a batch from a list of samples."
        ) from error


def _as_it_is(batch: Any) -> Any:
    return batch


def _seed(*key: int) -> int:
    return int(np.random.SeedSequence([number % 2**32 for number in key]).generate_state(1)[0])


@contextlib.contextmanager
def _drawing(*key: int) -> Iterator[None]:
    """Seed the host's random generators from a key inside the ``with`` block, and restore their states
    afterwards.
    """
    seed, before, of_numpy = _seed(*key), random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            random.setstate(before)
            np.random.set_state(of_numpy)


def tokens_in(batch: Any) -> int:
    """Return the number of tokens in a batch, including padding, or 0 for a batch without text."""
    for name in ("input_ids", "text", "tokens"):
        tokens = batch.get(name) if isinstance(batch, Mapping) else None
        if isinstance(tokens, torch.Tensor):
            return tokens.numel()
    return 0
