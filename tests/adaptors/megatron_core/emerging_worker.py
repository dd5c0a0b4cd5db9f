"""Train a linear layer with Lion, then with SOAP, of emerging_optimizers; compare the first updates.

Run as a module, in one process or in the two of a tensor-parallel group, each of which has half of the rows:

    python -m tests.adaptors.megatron_core.emerging_worker lion soap

What the first update has to be is computed again here, in fp64: Lion's is the sign of the gradient (Chen et
al. 2023). SOAP's (Vyas et al. 2024) is Adam's in the basis of the gradient's singular vectors, where it is
diagonal. Each rank knows its own rows alone, and so do its singular vectors. Gradients are small here: what
rounding leaves beside the diagonal is then less than Adam's epsilon, and is not blown up to its full size.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor

import megatron_npu

STEPS, RATE, SCALE, EPSILON = 6, 0.05, 1e-7, 1e-8


def expected(optimizer: str, gradient: Tensor) -> Tensor:
    """Return the first update of ``[rows, columns]`` by its gradient, in units of the learning rate, fp64."""
    if optimizer == "lion":
        return gradient.double().sign()
    left, values, right = torch.linalg.svd(gradient.double(), full_matrices=False)
    return left @ torch.diag(values / (values + EPSILON)) @ right


def train(name: str) -> None:
    """Train with an optimizer, and demand its first update and that it learns."""
    from megatron.core import optimizer as optimizers
    from megatron.core import tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    size, rank = dist.get_world_size(), dist.get_rank()
    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=2, tensor_model_parallel_size=size
    )
    layer = tensor_parallel.ColumnParallelLinear(
        8, 12, config=config, init_method=torch.nn.init.zeros_, gather_output=False, bias=False
    ).cuda()
    torch.manual_seed(2)
    whole, data, target = torch.randn(12, 8) / 4, torch.randn(16, 1, 8).cuda(), torch.randn(16, 1, 12).cuda()
    with torch.no_grad():
        layer.weight.copy_(whole.chunk(size)[rank])
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    options = optimizers.OptimizerConfig(optimizer=name, lr=RATE, min_lr=0.0, weight_decay=0.0, clip_grad=0.0)
    optimizer = optimizers.get_megatron_optimizer(options, [ddp])
    losses, before = [], layer.weight.detach().clone()
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = (ddp(data)[0] - target.chunk(size, -1)[rank]).pow(2).sum() * SCALE
        loss.backward()
        ddp.finish_grad_sync()
        gradient = layer.weight.main_grad.cpu()
        losses.append(loss.item())
        optimizer.step()
        if step == 0:
            wanted = expected(name, gradient)
            update = (before - layer.weight.detach()).cpu().double() / RATE
            error = ((update - wanted).norm() / wanted.norm()).item()
    assert error < 1e-2, (name, error)
    assert losses == sorted(losses, reverse=True), (name, losses)
    assert losses[-1] < 0.9 * losses[0], (name, losses)


def main() -> None:
    """Train with each, and demand that nothing was compiled and that all patches fit."""
    megatron_npu.install()
    from megatron.core import parallel_state, tensor_parallel

    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    for name in sys.argv[1:]:
        train(name)
    compiled = torch._dynamo.utils.counters["stats"].get("unique_graphs", 0)  # type: ignore[attr-defined]
    assert not compiled, compiled
    bad = [row for row in megatron_npu.ledger().rows if row.state in ("failed", "drifted")]
    assert not bad, bad
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
