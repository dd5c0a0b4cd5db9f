"""Simulate torch's CUDA caching allocator on a sequence of allocations and frees.

The simulation follows c10/cuda/CUDACachingAllocator.cpp of torch 2 with default settings and one stream.
Sizes are rounded to 512 bytes. Requests of up to 1 MiB come from segments of 2 MiB (the small pool), below 10
MiB from segments of 20 MiB, and larger ones from segments that are multiples of 2 MiB. The smallest free
block that is large enough is used, and split if enough remains; adjacent free blocks are merged. Workspaces
inside kernels and libraries are included only if a caller adds them.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ROUND = 512
_SMALL = 1 << 20  # the largest size of the small pool
_SMALL_SEGMENT = 2 << 20
_MIN_LARGE = 10 << 20  # from here on a segment is as large as what it is for
_LARGE_SEGMENT = 20 << 20
_ROUND_LARGE = 2 << 20


class DeviceFullError(RuntimeError):
    """Raised when the simulated device has no more memory."""


@dataclass(eq=False)
class Block:
    """A part of a memory segment, either used or free.

    Attributes:
        address: its start address.
        size: its size in bytes.
        small: whether it belongs to the small pool.
        free: whether it is free.
        before, after: its neighbors in the segment.
    """

    address: int
    size: int
    small: bool
    free: bool = False
    before: Block | None = None
    after: Block | None = None


class Allocator:
    """The simulated allocator of one device.

    Args:
        limit: the maximum number of bytes of all segments. If None, memory is unlimited.

    Attributes:
        allocated, reserved: the current bytes, like ``torch.cuda.memory_allocated`` and ``memory_reserved``.
        peak, peak_reserved: their maxima.
        count: the number of allocations.
        events: the history in the format of torch's snapshots. If None, it is not recorded.
        frames: returns the calling lines that an allocation's event names. If None, it names none.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.limit = limit
        self.allocated = self.reserved = self.peak = self.peak_reserved = self.count = 0
        self._next = 1 << 30  # addresses of segments
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}  # (size, address), sorted
        self._blocks: dict[int, Block] = {}  # the free ones, by address
        self._taken: dict[int, Block] = {}
        self._segments: dict[int, int] = {}  # address -> bytes
        self.events: list[dict[str, Any]] | None = None
        self.frames: Callable[[], list[dict[str, Any]]] | None = None

    def allocate(self, asked: int) -> Block:
        """Return a block of at least the given number of bytes.

        Raises:
            DeviceFullError: the limit is exceeded even after unused segments are released.
        """
        size = max(_ROUND, -(-asked // _ROUND) * _ROUND)
        small = size <= _SMALL
        block = self._take(size, small) or self._segment(size, small)
        left = block.size - size
        if left >= (_ROUND if small else _SMALL + 1):
            self._split(block, size)
        self.count += 1
        self.allocated += block.size
        self.peak = max(self.peak, self.allocated)
        self._taken[block.address] = block
        self._note("alloc", block.address, block.size)
        return block

    def free(self, block: Block) -> None:
        """Free a block, so that it can be used again."""
        self.allocated -= block.size
        del self._taken[block.address]
        self._note("free_requested", block.address, block.size)
        self._note("free_completed", block.address, block.size)
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._remove(other)
                self._merge(block, other)
        self._add(block)

    def empty_cache(self) -> None:
        """Release the segments in which no block is used."""
        for block in [each for each in self._blocks.values() if each.before is None and each.after is None]:
            self._remove(block)
            self.reserved -= block.size
            del self._segments[block.address]
            self._note("segment_free", block.address, block.size)

    def segments(self) -> list[dict[str, Any]]:
        """Return the segments and their blocks in the format of torch's memory snapshot."""
        found: dict[int, dict[str, Any]] = {
            address: {"device": 0, "address": address, "total_size": size, "stream": 0, "blocks": []}
            for address, size in sorted(self._segments.items())
        }
        starts = list(found)
        for block in sorted([*self._taken.values(), *self._blocks.values()], key=lambda each: each.address):
            segment = found[starts[bisect.bisect_right(starts, block.address) - 1]]
            state = "inactive" if block.free else "active_allocated"
            told = {"address": block.address, "size": block.size, "requested_size": block.size}
            segment["blocks"].append(told | {"state": state, "frames": []})
            segment["segment_type"] = "small" if block.small else "large"
        for segment in found.values():
            used = sum(block["size"] for block in segment["blocks"] if block["state"] != "inactive")
            segment |= {"allocated_size": used, "active_size": used, "requested_size": used}
            segment |= {"segment_pool_id": (0, 0), "is_expandable": False, "frames": []}
        return list(found.values())

    def _note(self, action: str, address: int, size: int) -> None:
        if self.events is not None:
            frames = self.frames() if self.frames is not None and action == "alloc" else []
            told = {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames}
            self.events.append(told | {"time_us": len(self.events)})

    def _take(self, size: int, small: bool) -> Block | None:
        listed = self._free[small]
        at = bisect.bisect_left(listed, (size, 0))
        if at == len(listed):
            return None
        block = self._blocks[listed[at][1]]
        self._remove(block)
        return block

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            bytes_ = _SMALL_SEGMENT
        elif size < _MIN_LARGE:
            bytes_ = _LARGE_SEGMENT
        else:
            bytes_ = -(-size // _ROUND_LARGE) * _ROUND_LARGE
        if self.limit is not None and self.reserved + bytes_ > self.limit:
            self.empty_cache()
            if self.reserved + bytes_ > self.limit:
                raise DeviceFullError(
                    f"Tried to allocate {size / (1 << 30):.2f} GiB. A segment of {bytes_} bytes in "
                    f"addition to the {self.reserved} reserved ones exceeds the limit of {self.limit}."
                )
        block = Block(self._next, bytes_, small)
        self._next += bytes_
        self.reserved += bytes_
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        self._segments[block.address] = bytes_
        self._note("segment_alloc", block.address, bytes_)
        return block

    def _split(self, block: Block, size: int) -> None:
        rest = Block(block.address + size, block.size - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        self._add(rest)

    def _merge(self, block: Block, other: Block) -> None:
        if other is block.before:
            block.address, block.before = other.address, other.before
            if block.before is not None:
                block.before.after = block
        else:
            block.after = other.after
            if block.after is not None:
                block.after.before = block
        block.size += other.size

    def _add(self, block: Block) -> None:
        block.free = True
        bisect.insort(self._free[block.small], (block.size, block.address))
        self._blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        block.free = False
        listed = self._free[block.small]
        del listed[bisect.bisect_left(listed, (block.size, block.address))]
        del self._blocks[block.address]
