"""Run every kind of collective that Megatron uses, in two processes with the device's backend.

    python -m megatron_npu.doctor.collectives STORE RANK WORLD_SIZE

The check runs in separate processes, because the faults that it detects cause hangs. With a world size of 1,
it only shows that the backend starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices

TIMEOUT = 60  # seconds
SIZE = 1024  # elements of a rank's tensor


def _expect(tensor: Tensor, value: float, told: str) -> None:
    wrong = tensor[tensor != value]
    assert not wrong.numel(), f"{told} returned {wrong[0].item()}, but the result must be {value}"


def all_reduce(own: Tensor, rank: int, size: int) -> None:
    """Check the result of an all-reduce.

    The sum of 1 and 2 must be 3 on both ranks.
    """
    tensor = own.clone()
    dist.all_reduce(tensor)
    _expect(tensor, size * (size + 1) / 2, "all_reduce")


def all_gather(own: Tensor, rank: int, size: int) -> None:
    """Check the result of an all-gather.

    Each rank must receive every rank's number.
    """
    gathered = torch.empty(size * SIZE, device=own.device)
    dist.all_gather_into_tensor(gathered, own)
    for other in range(size):
        _expect(gathered[other * SIZE : (other + 1) * SIZE], other + 1.0, f"all_gather, part {other}")


def reduce_scatter(own: Tensor, rank: int, size: int) -> None:
    """Check the result of a reduce-scatter.

    Each rank must receive its part of the sum.
    """
    part = torch.empty(SIZE // size, device=own.device)
    dist.reduce_scatter_tensor(part, own.clone())
    _expect(part, size * (size + 1) / 2, "reduce_scatter")


def all_to_all(own: Tensor, rank: int, size: int) -> None:
    """Check the result of an all-to-all.

    Each rank must receive one part from every rank, in rank order.
    """
    received = torch.empty_like(own)
    dist.all_to_all_single(received, own.clone())
    for other, part in enumerate(received.chunk(size)):
        _expect(part, other + 1.0, f"all_to_all, part {other}")


def broadcast(own: Tensor, rank: int, size: int) -> None:
    """Check the result of a broadcast.

    Every rank must receive the last rank's number.
    """
    tensor = own.clone()
    dist.broadcast(tensor, size - 1)
    _expect(tensor, float(size), "broadcast")


def send_and_receive(own: Tensor, rank: int, size: int) -> None:
    """Check that a tensor can be sent and received.

    The last rank must receive the first rank's number.
    """
    if size == 1:
        return
    if rank == 0:
        dist.send(own, size - 1)
    elif rank == size - 1:
        received = torch.empty_like(own)
        dist.recv(received, 0)
        _expect(received, 1.0, "recv")


CHECKS: tuple[Callable[[Tensor, int, int], None], ...] = (
    all_reduce,
    all_gather,
    reduce_scatter,
    all_to_all,
    broadcast,
    send_and_receive,
)


def main(store: str, rank: int, size: int) -> None:
    """Join the other processes, and run every check.

    Raise an AssertionError if a result is wrong.
    """
    device = devices.current()
    device.set_current(rank % device.count())
    dist.init_process_group(
        device.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=TIMEOUT),
    )
    own = torch.full((SIZE,), rank + 1.0, device=device.torch_device())
    for check in CHECKS:
        check(own, rank, size)
    device.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
