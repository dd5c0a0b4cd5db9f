"""A rank of test_replicas.py. Usage: replicas_worker.py WHAT COMMAND...

WHAT is ``weight`` or ``gradient``: in rank 1 a bit of the first one is flipped at the second comparison.
COMMAND is one of `megatron-npu`; without any, tensors are compared and that is all.
"""

from __future__ import annotations

import itertools
import sys

import torch
import torch.distributed as dist

from megatron_npu.checkpoint_files import replicas
from megatron_npu.commands import cli

number = itertools.count(1)


def flip(tensor: torch.Tensor) -> None:
    if dist.get_rank() == 1:
        tensor.detach().view(-1)[:1].view(torch.uint8)[0] ^= 1


def in_megatron(what: str) -> None:
    compare = replicas.check_megatron_gradients

    def harmed(chunks: list[torch.nn.Module]) -> None:
        parameter = next(chunks[0].parameters())
        if next(number) == 2:
            flip(parameter.data if what == "weight" else parameter.main_grad)
        compare(chunks)

    replicas.check_megatron_gradients = harmed


def in_torch(what: str) -> None:
    compare = replicas.require_equal

    def harmed(kind: str, named: replicas.Named, group: dist.ProcessGroup | None = None) -> None:
        named = list(named)
        if kind.startswith(what) and next(number) == 2:
            flip(named[0][1])
        compare(kind, named, group)

    replicas.require_equal = harmed


def tensors() -> None:
    """Compare what rank 1 has otherwise with what the others have; print what is said."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    bits = torch.tensor([1.0, float("nan")])
    same = {
        "flag": torch.tensor(True),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "turned": torch.arange(6.0).view(2, 3).t(),
        "nothing": torch.empty(0),
        "bad": bits,
    }
    replicas.require_equal("weight", same.items())
    for name, value in (
        ("half", torch.tensor([1, 1, 1.0078125], dtype=torch.bfloat16)),
        ("bad", bits.view(torch.int32).bitwise_xor(1).view(torch.float32)),
        ("flag", torch.tensor(False)),
    ):
        held = {**same, "also": torch.tensor(float(rank == 1)), name: value if rank == 1 else same[name]}
        try:
            replicas.require_equal("weight", held.items())
        except replicas.ReplicasDifferError as error:
            if rank == 0:
                print(error, flush=True)
    dist.destroy_process_group()


def main(what: str, *command: str) -> int:
    if not command:
        tensors()
        return 0
    (in_torch if command[0] == "train" else in_megatron)(what)
    return cli.main(list(command))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
