"""Implement collectives between ranks on one machine with shared memory instead of gloo's sockets.

gloo sends data through the kernel's loopback network even to a process on the same machine, which copies each
byte into and out of the kernel and adds the overhead of TCP. Here, every rank writes the parts that others
reduce to a shared segment, reduces its own part, and reads the results of the others. gloo still synchronizes
the ranks, so a dead or late rank ends the wait as before. Sums over two ranks are bitwise identical to
gloo's; with more ranks, the order of additions differs.

The segment is an anonymous file in memory (``memfd_create``), opened through the first rank's ``/proc``. The
segment has no name in ``/dev/shm``, so nothing is left behind if a process dies, and a small ``/dev/shm``
does not limit its size.
"""

from __future__ import annotations

import mmap
import os
import secrets
import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

_CHUNK = 8 << 20  # bytes of a tensor that go through the segment at once
_ALIGNMENT = 64


class Segment:
    """Memory that the ranks of a group share, with the collectives that use it.

    A collective works in stages. Each stage uses one of two inboxes, ``[ranks, ranks, part]`` by reader and
    writer, and one of two result buffers ``[ranks, part]``, alternately: data read in one stage is
    overwritten in the stage after the next at the earliest, and all ranks synchronize in between.

    Args:
        group: a gloo group whose ranks are all on one machine; all of them create their segment at the same
            time.
        chunk: the number of bytes of a tensor per stage.

    Raises:
        OSError: a rank cannot map the memory; the error is raised on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, chunk: int = _CHUNK) -> None:
        # weakly: the group is the key by which this is found
        self._group, self._rank, self._ranks = weakref.ref(group), group.rank(), group.size()
        self._part = max(chunk // self._ranks // _ALIGNMENT, 1) * _ALIGNMENT
        self._flag = torch.zeros(1)
        self._stage = 0
        memory = _map(group, 2 * self._ranks * (self._ranks + 1) * self._part)
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)

    def all_reduce(self, tensor: Tensor) -> None:
        """Replace the flat tensor ``tensor`` with its sum over the ranks.

        The result is bitwise identical on all ranks.
        """
        chunks = tensor.split(self._elements(tensor) * self._ranks)
        stages = [self._parts(chunk, -(-chunk.numel() // self._ranks)) for chunk in chunks]
        self._give(stages[0])
        self._wait()
        for number, parts in enumerate(stages):
            if number + 1 < len(stages):
                self._give(stages[number + 1], self._stage + 1)
            self._add(parts[self._rank])
            self._shelf(parts[self._rank], self._rank).copy_(parts[self._rank])
            self._wait()
            self._take(parts)
            self._stage += 1

    def reduce_scatter(self, output: Tensor, given: Tensor) -> None:
        """Write this rank's part of the sum of ``given`` over the ranks to ``output``.

        Both tensors are flat and may overlap.
        """
        shards = given.view(self._ranks, -1)
        output.copy_(shards[self._rank])  # nothing happens where it is that part
        stages = list(zip(*(shard.split(self._elements(given)) for shard in shards), strict=True))
        self._give(stages[0])
        self._wait()
        for number, own in enumerate(output.split(self._elements(given))):
            if number + 1 < len(stages):
                self._give(stages[number + 1], self._stage + 1)
            self._add(own)
            if number + 1 < len(stages):
                self._wait()
            self._stage += 1

    def all_gather(self, output: Tensor, given: Tensor) -> None:
        """Gather the flat tensors ``given`` of all ranks into the flat tensor ``output``.

        ``given`` may be part of ``output``.
        """
        shards = output.view(self._ranks, -1)
        shards[self._rank].copy_(given)
        for parts in zip(*(shard.split(self._elements(given)) for shard in shards), strict=True):
            self._shelf(parts[self._rank], self._rank).copy_(parts[self._rank])
            self._wait()
            self._take(parts)
            self._stage += 1

    def _elements(self, tensor: Tensor) -> int:
        """Return how many elements of the tensor's dtype fit into one part of the segment."""
        return self._part // tensor.element_size()

    def _parts(self, chunk: Tensor, size: int) -> list[Tensor]:
        """Split ``chunk`` into one part of ``size`` elements per rank.

        The last part may be shorter or empty.
        """
        return [chunk[rank * size : (rank + 1) * size] for rank in range(self._ranks)]

    def _give(self, parts: Sequence[Tensor], stage: int | None = None) -> None:
        """Write each part to the inbox of the rank that reduces that part."""
        for reader in self._others():
            self._inbox(parts[reader], reader, self._rank, stage).copy_(parts[reader])

    def _add(self, own: Tensor) -> None:
        """Add the other ranks' values from this rank's inbox to this rank's part."""
        for writer in self._others():
            own.add_(self._inbox(own, self._rank, writer))

    def _take(self, parts: Sequence[Tensor]) -> None:
        """Replace the parts of the other ranks with the results from their result buffers."""
        for writer in self._others():
            parts[writer].copy_(self._shelf(parts[writer], writer))

    def _others(self) -> list[int]:
        return [rank for rank in range(self._ranks) if rank != self._rank]

    def _inbox(self, like: Tensor, reader: int, writer: int, stage: int | None = None) -> Tensor:
        turn = (self._stage if stage is None else stage) % 2
        return self._slot((turn * self._ranks + reader) * self._ranks + writer, like)

    def _shelf(self, like: Tensor, writer: int) -> Tensor:
        return self._slot((2 * self._ranks + self._stage % 2) * self._ranks + writer, like)

    def _slot(self, number: int, like: Tensor) -> Tensor:
        """Return a slot of the shared memory as a tensor with the size and dtype of ``like``."""
        begin = number * self._part
        return self._bytes[begin : begin + like.numel() * like.element_size()].view(like.dtype)

    def _wait(self) -> None:
        """Wait until all ranks of the group have reached this point.

        gloo raises an error if a rank has died.
        """
        group = self._group()
        assert group is not None
        group.allreduce([self._flag]).wait()


def _map(group: dist.ProcessGroup, size: int) -> mmap.mmap:
    """Return ``size`` zeroed bytes of memory that all ranks of ``group`` share.

    The first rank creates an unnamed file and sends its process id and descriptor to the other ranks, which
    open the file through /proc.

    Raises:
        OSError: a rank cannot map the memory; the error is raised on all ranks.
    """
    where, reason, memory, descriptor = (
        torch.zeros(3, dtype=torch.int64),
        "another rank cannot map it",
        None,
        -1,
    )
    try:
        try:
            if group.rank() == 0:
                token = secrets.randbits(62)
                descriptor = _make(token, size)
                where = torch.tensor([os.getpid(), descriptor, token])
        finally:  # the others wait for it, come what may
            group.broadcast([where]).wait()
        if group.rank() > 0:
            descriptor = _open(*where.tolist())
        memory = mmap.mmap(descriptor, size)
    except OSError as error:
        reason = str(error)
    able = torch.tensor([float(memory is not None)])
    group.allreduce([able]).wait()
    if descriptor >= 0:  # by now all have mapped it
        os.close(descriptor)
    if memory is None or able.item() < group.size():
        raise OSError(f"only {int(able.item())} of {group.size()} ranks mapped the shared memory: {reason}")
    return memory


def _make(token: int, size: int) -> int:
    """Create an anonymous file in memory, and return its descriptor."""
    if not hasattr(os, "memfd_create"):
        raise OSError("only Linux has memfd_create")
    descriptor = os.memfd_create(_name(token))
    os.truncate(descriptor, size)
    return descriptor


def _name(token: int) -> str:
    return f"megatron_npu-{token:x}"


def _open(process: int, descriptor: int, token: int) -> int:
    """Open the anonymous file that another process has created, and return a descriptor of it.

    The name of the file must contain the token: in another container or on another machine, the same process
    id belongs to an unrelated process.
    """
    path = f"/proc/{process}/fd/{descriptor}"
    if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":
        raise OSError(f"{path} is not the shared memory of this group")
    return os.open(path, os.O_RDWR)
