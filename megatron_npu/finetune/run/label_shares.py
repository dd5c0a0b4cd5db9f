"""Weight the loss of each micro-batch by its share of the labels in the global batch.

A loss is the mean over the labels of a micro-batch, and micro-batches have different numbers of labels
(targets, masked tokens, words). So that the loss of a global batch is the mean over all its labels, for any
micro-batch size and number of ranks, all labels are counted before the first backward pass.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import math
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.labels import IGNORED

Counts = tuple[int, ...]  # of the labels of each loss of a batch


class Held(NamedTuple):
    """A batch in host memory.

    Attributes:
        batch: this rank's batch.
        counts: whether the samples of the batch are counted; padding for a rank without samples is not.
    """

    batch: Any
    counts: bool = True


def labels_in(batch: Any, *, shifted: bool = False) -> int:
    """Return the number of labels over which a batch's loss is averaged.

    Without ``labels``, it is one per sample.

    Args:
        batch: a mapping whose integer ``labels``, [b] or [b, s], are ``IGNORED`` where there is none; or
            another object.
        shifted: whether the model compares each label with the preceding output, in which case the first
            label is not counted.
    """
    labels = batch.get("labels") if isinstance(batch, Mapping) else None
    if not isinstance(labels, Tensor) or labels.is_floating_point() or not labels.dim():
        return _samples_in(batch)
    return int((labels[..., 1:] if shifted and labels.dim() > 1 else labels).ne(IGNORED).sum())


def shifts_labels(model: nn.Module) -> bool:
    """Return True if a model shifts the labels by one position, like causal Transformers models."""
    auto = sys.modules.get("transformers.models.auto.modeling_auto")
    if auto is None:
        return False
    own: Any = model
    if hasattr(own, "get_base_model"):  # of peft's adapters
        own = own.get_base_model()
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    if not any(kind.__name__ in causal for kind in type(own).__mro__):
        return False
    forward = inspect.unwrap(type(own).forward)
    # decoders of translation models compute a loss of their own, which does not
    return "loss_function" in forward.__code__.co_names


def _samples_in(batch: Any) -> int:
    """Return the number of samples in a batch: the size of its first tensor, or 1 if it has no tensors."""
    if isinstance(batch, Tensor):
        return batch.size(0) if batch.dim() else 1
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    parts = batch if isinstance(batch, list | tuple) else []
    return next((_samples_in(part) for part in parts if isinstance(part, Tensor | Mapping | list | tuple)), 1)


class MicroBatches:
    """The micro-batches of a rank on its device, with the weight of each loss.

    Args:
        held: iterator of batches.
        labels_of: returns the number of labels of each loss of a batch (``Template.label_counts``).
        move: moves a batch to the device.
        ranks: number of ranks that share the global batch.
        note: called with each batch.
    """

    def __init__(
        self,
        held: Iterable[Held],
        labels_of: Callable[[Any], int | Counts],
        *,
        move: Callable[[Any], Any],
        ranks: int,
        note: Callable[[Any], None] | None = None,
    ) -> None:
        self._held, self._labels_of, self._move = iter(held), labels_of, move
        self._ranks, self._note = ranks, note
        self._ahead: deque[tuple[Any, Counts]] = deque()
        self._taken: list[Counts] = []  # since the last loss
        self._rehearsed: list[tuple[Any, Counts]] | None = None  # None: what is taken is taken
        self._several = False
        self._micro_batches, self._each = 1, 0
        self._totals: Counts | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch, counts = self._ahead.popleft() if self._ahead else self._next()
        self._taken.append(counts)
        if self._rehearsed is not None:
            self._rehearsed.append((batch, counts))
        elif self._note is not None:
            self._note(batch)
        return self._move(batch)

    @property
    def losses(self) -> int | None:
        """The number of losses of the last batches, or None for a single loss that is not in a tuple."""
        return len(self._taken[0]) if self._several and self._taken else None

    def begin(self, micro_batches: int) -> None:
        """Start an iteration with the given number of micro-batches per rank."""
        self._micro_batches, self._totals = micro_batches, None

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Make the batches that are read inside the ``with`` block available again afterwards."""
        self._rehearsed = []
        try:
            yield
        finally:
            self._ahead.extendleft(reversed(self._rehearsed))
            self._rehearsed, self._taken = None, []

    def read_ahead(self) -> None:
        """Load the micro-batches of this iteration in advance, so that loading does not use random
        numbers later.
        """
        while len(self._ahead) < self._micro_batches * (self._each or 1):
            self._ahead.append(self._next())

    def divisors(self) -> list[float]:
        """Return the numbers by which the losses of the last micro-batch are divided.

        The divisor is inf for a loss without labels.

        The sum of the divided losses over micro-batches, averaged over the ranks, is the mean over all labels
        of the global batch. All ranks call this method after each forward pass. If all micro-batches have the
        same number of labels, the divisor is the number of micro-batches.

        Raises:
            UsageError: a template used a different number of batches for this loss than before.
        """
        found = self.coming_divisors()
        self._taken = []
        return found

    def coming_divisors(self) -> list[float]:
        """Return the next result of ``divisors`` while the model is still processing the micro-batch."""
        number, counts = len(self._taken), _sums(self._taken)
        if self._totals is None:
            self._totals = self._all_labels(number, counts)
        elif self._each != number:
            raise UsageError(
                "run_forward_step must use the same number of batches for each loss, because the labels of "
                f"a global batch are counted in advance, but it used {self._each} for one loss and {number} "
                "for the next. Use one batch per loss."
            )
        shares = zip(self._totals, counts, strict=True)
        return [total / (count * self._ranks) if count else math.inf for total, count in shares]

    def counted(self) -> Counts:
        """Return the number of labels in the batches read since the last call, or 1 if no batches were
        read.
        """
        counts, self._taken = _sums(self._taken), []
        return counts

    def _all_labels(self, number: int, first: Counts) -> Counts:
        """Count the labels of the whole global batch: those in the first micro-batch and in all later ones.

        Args:
            number: number of batches in the first micro-batch.
            first: its label counts.
        """
        self._each = number
        coming = (self._micro_batches - 1) * self._each
        while len(self._ahead) < coming:
            self._ahead.append(self._next())
        if self._each:
            own = _sums([first, *(counts for _, counts in itertools.islice(self._ahead, coming))])
        else:
            own = tuple(self._micro_batches * count for count in first)
        if self._ranks == 1:
            return own
        together = torch.tensor(own)  # on the host, where no device has to be waited for
        dist.all_reduce(together)
        return tuple(together.tolist())

    def _next(self) -> tuple[Any, Counts]:
        batch, counts = next(self._held)
        labels = self._labels_of(batch)
        self._several = isinstance(labels, tuple)
        found = labels if isinstance(labels, tuple) else (labels,)
        return batch, found if counts else (0,) * len(found)


def _sums(counts: list[Counts]) -> Counts:
    return tuple(map(sum, zip(*counts, strict=True))) or (1,)
