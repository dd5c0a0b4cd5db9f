"""Small values of many steps, held in one tensor."""

from __future__ import annotations

from torch import Tensor


class Rows:
    """Rows ``[b]`` or ``[b, n]`` that come one after the other, in one tensor that doubles where it is full.

    On a CPU a small tensor for each step would stay where the step's activations were, in a heap that keeps
    what is freed (``malloc.keep_freed_memory``): those of the next step no longer fit into the gaps, and the
    process grows by their size with each step.

    Args:
        filling: for rows that are narrower than others.
    """

    def __init__(self, filling: float = 0) -> None:
        self._filling, self._count = filling, 0
        self._held: Tensor | None = None

    def __len__(self) -> int:
        """Return how many there are."""
        return self._count

    def add(self, rows: Tensor) -> None:
        """Add rows, of the device and dtype of the first ones; they have no gradient here."""
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
        """Return the values in the order they were added: a view ``[all]`` or ``[all, most]``.

        Raises:
            ValueError: nothing has come.
        """
        if self._held is None:
            raise ValueError("no rows have been added")
        return self._held[: self._count]

    def _unfilled(self, width: tuple[int, ...], like: Tensor) -> Tensor:
        return like.new_full((2 * self._count, *width), self._filling)
