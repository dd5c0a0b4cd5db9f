"""Two processes that reduce and exchange a tensor over the device's backend.

    python -m megatron_npu.doctor.collectives STORE RANK

Runs in processes of their own: what is to be found here hangs.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_npu import devices

TIMEOUT = 60  # seconds


def main(store: str, rank: int) -> None:
    """Join the other process, all-reduce, send and receive; a wrong result is an AssertionError."""
    device = devices.current()
    device.set_current(rank % device.count())
    dist.init_process_group(
        device.backend,
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=TIMEOUT),
    )
    tensor = torch.full((1024,), float(rank + 1), device=device.torch_device())
    dist.all_reduce(tensor)
    assert bool((tensor == 3.0).all()), f"all_reduce of 1 and 2 gave {tensor[0].item()}"
    if rank == 0:
        dist.send(tensor, 1)
    else:
        received = torch.empty_like(tensor)
        dist.recv(received, 0)
        assert bool((received == 3.0).all()), f"recv of 3 gave {received[0].item()}"
    device.synchronize()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
