"""Collect small values from many steps in a single tensor."""

from __future__ import annotations

from torch import Tensor


class Rows:
    """A collection of rows ``[b]`` or ``[b, n]`` in one tensor, whose size doubles when it is full.

    On a CPU, one small tensor per step would stay between the freed activations of that step, in a heap that
    keeps freed memory (``malloc.keep_freed_memory``): the next step's activations would not fit into the
    gaps, and the memory of the process would grow by their size in each step.

    Args:
        filling: the value for missing elements of narrower rows.
    """

    def __init__(self, filling: float = 0) -> None:
        self._filling, self._count = filling, 0
        self._held: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._count

    def add(self, rows: Tensor) -> None:
        """Append rows, after converting them to the device and dtype of the first rows.

        Gradients are not tracked.
        """
        before, self._count = self._count, self._count + len(rows)
        rows, width = rows.detach(), rows.shape[1:]
        if self._held is None:
            self._held = self._unfilled(width, rows)
        held = self._held
        if self._count > len(held) or width > held.shape[1:]:
            self._held = self._unfilled(max(width, held.shape[1:]), held)
            self._held[(slice(before), *map(slice, held.shape[1:]))] = held[:before]
        self._held[(slice(before, self._count), *map(slice, width))] = rows

    def all(self) -> Tensor:
        """Return a view of all rows, ``[rows]`` or ``[rows, width]``, in the order in which they were added.

        Raises:
            ValueError: there are no rows.
        """
        if self._held is None:
            raise ValueError("at least one row is required, but no rows have been added")
        return self._held[: self._count]

    def _unfilled(self, width: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_full((2 * self._count, *width), self._filling)
