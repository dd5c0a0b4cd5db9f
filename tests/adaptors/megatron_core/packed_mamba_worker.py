"""Packed sequences in a hybrid of Mamba-2, attention and dense layers, in ranks that share each of them.

Run as a module with ``MEGATRON_NPU_TE=local``, in one process or in the two of a context-parallel group:

    python -m tests.adaptors.megatron_core.packed_mamba_worker FOLDER

One process demands of the pack what its sequences give one after the other, and leaves a checkpoint, the
loss, that after a step of gradient descent, and the gradients in FOLDER; two processes load it, take their
tokens of each sequence as upstream deals them out, and compare theirs.
"""

from __future__ import annotations

import inspect
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_npu
from tests.adaptors.megatron_core import mamba_worker
from tests.adaptors.megatron_core import te_layers_worker as worker

LENGTHS = (8, 4, 12, 8)  # each can be dealt out to two ranks in four parts
RATE, NEAR = 0.1, {"rtol": 1e-4, "atol": 1e-5}


def batch(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, positions within their sequences, and labels: ``[1, t]`` each, on the host."""
    tokens = torch.randint(worker.VOCABULARY, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    return tokens, positions, (tokens * 3 + 1) % worker.VOCABULARY


def bounds(lengths: tuple[int, ...]) -> Tensor:
    """Return where the sequences begin, and the end: ``[n + 1]``, int32."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).int()


def packed(lengths: tuple[int, ...]) -> Any:
    """Return what Megatron calls packed sequences; those of 0.18 and newer are told how many tokens."""
    from megatron.core.packed_seq_params import PackedSeqParams

    starts = bounds(lengths).cuda()
    values = {"qkv_format": "thd", "cu_seqlens_q": starts, "cu_seqlens_kv": starts}
    values |= {"max_seqlen_q": max(lengths), "max_seqlen_kv": max(lengths), "total_tokens": sum(lengths)}
    known = inspect.signature(PackedSeqParams).parameters
    return PackedSeqParams(**{name: value for name, value in values.items() if name in known})


def losses(built: Any, lengths: tuple[int, ...], begin: int = 0, end: int | None = None) -> Tensor:
    """Return the losses ``[1, s]`` of this rank's tokens of a pack, or of a part of the whole batch."""
    from transformer_engine_torch import thd_get_partitioned_indices

    whole = [tensor[:, begin:end] for tensor in batch(LENGTHS)]
    index = thd_get_partitioned_indices(bounds(lengths), sum(lengths), dist.get_world_size(), dist.get_rank())
    tokens, positions, labels = (tensor.index_select(1, index.long().cpu()).cuda() for tensor in whole)
    return built(tokens, positions, None, labels=labels, packed_seq_params=packed(lengths))


def step(built: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the mean loss over all ranks' tokens and its gradients, and descend along these."""
    built.zero_grad()
    loss = losses(built, LENGTHS).sum() / sum(LENGTHS)
    loss.backward()
    loss = loss.detach()
    dist.all_reduce(loss)
    gradients = {}
    with torch.no_grad():
        for name, parameter in built.named_parameters():
            dist.all_reduce(parameter.grad)
            gradients[name] = parameter.grad.cpu()
            parameter -= RATE * parameter.grad
    return loss.cpu(), gradients


def main() -> None:
    """Compare what the number of processes is for."""
    megatron_npu.install()
    from megatron.core import parallel_state, tensor_parallel

    folder = Path(sys.argv[1])
    dist.init_process_group("nccl")
    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=ranks)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    built = mamba_worker.model(context=ranks, position_embedding_type="rope")
    if ranks == 1:
        worker.disturb(built)
        for parameter in built.parameters():
            parameter.data.mul_(4.0 if parameter.dim() == 2 else 1.0)  # so that neighbours matter
        worker.checkpoint(built, folder / "packed")
        ends = bounds(LENGTHS).tolist()
        with torch.no_grad():
            each = [losses(built, (end - begin,), begin, end) for begin, end in pairwise(ends)]
            torch.testing.assert_close(losses(built, LENGTHS), torch.cat(each, 1), **NEAR)
            one = losses(built, (sum(LENGTHS),))
            assert not torch.allclose(one, torch.cat(each, 1), rtol=1e-2), "neighbours must matter"
    else:
        worker.load(built, folder / "packed")
    first, gradients = step(built)
    found = {"losses": torch.stack([first, step(built)[0]]), **gradients}
    if ranks == 1:
        assert found["losses"][1] < found["losses"][0] - 0.01, found["losses"]
        torch.save(found, folder / "found.pt")
    else:
        torch.testing.assert_close(found, torch.load(folder / "found.pt"), **NEAR)
    bad = [row for row in megatron_npu.ledger().rows if row.state in ("failed", "drifted")]
    assert not bad, bad
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
