"""A mask's buffer that a collective fills again says what was sent, not what it held before."""

from __future__ import annotations

import datetime
import json
import multiprocessing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_npu import devices
from megatron_npu.devices.redirect import Redirection
from megatron_npu.ops.attention.packed_mask import sequence_lengths
from tests.conftest import LONGEST


def mask_of(*lengths: int) -> Tensor:
    """Return ``[1, 1, s, s]``: causal within documents of these lengths."""
    document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    seen = (document[:, None] == document) & torch.ones(sum(lengths), sum(lengths)).tril().bool()
    return ~seen[None, None]


def _broadcast(buffer: Tensor, sent: Tensor, rank: int) -> None:
    if rank == 0:
        buffer.copy_(sent)
    dist.broadcast(buffer, src=0)


def _receive(buffer: Tensor, sent: Tensor, rank: int) -> None:
    dist.recv(tensor=buffer, src=0) if rank else dist.send(sent, 1)


def _scatter(buffer: Tensor, sent: Tensor, rank: int) -> None:
    dist.scatter(buffer, None if rank else [sent, sent], src=0)


def _exchange(buffer: Tensor, sent: Tensor, rank: int) -> None:
    half = sent.flatten().chunk(2)[rank]
    dist.all_to_all_single(buffer.view(-1), torch.cat([half, half]))


def _gather(buffer: Tensor, sent: Tensor, rank: int) -> None:
    half = sent.flatten().chunk(2)[rank]  # torch counts these writes itself
    dist.all_gather_into_tensor(buffer.view(-1), half.contiguous())


WAYS = (_broadcast, _receive, _scatter, _exchange, _gather)


def receive_twice(rank: int, store: Path, result: Path) -> None:
    """Fill one buffer in every way; write down what rank 1 reads from it."""
    Redirection(devices.CpuDevice()).on()
    timeout = datetime.timedelta(seconds=LONGEST)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
    read = {}
    for way in WAYS:
        buffer = mask_of(8)
        assert sequence_lengths(buffer) == (8,)
        way(buffer.view(torch.uint8), mask_of(3, 5).view(torch.uint8), rank)
        read[way.__name__] = sequence_lengths(buffer)
    weight = torch.ones(2, requires_grad=True)
    square = (weight * 2).square()
    version = square._version
    dist.broadcast(square.detach(), 0)
    assert square._version == version  # autograd lets go on who has sent it
    if rank == 1:
        result.write_text(json.dumps(read))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.usefixtures("warm_children")
def test_a_buffer_that_is_received_again_is_read_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    result = tmp_path / "result"
    ranks = [
        context.Process(target=receive_twice, args=(rank, tmp_path / "store", result)) for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(LONGEST)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert json.loads(result.read_text()) == {way.__name__: [3, 5] for way in WAYS}
