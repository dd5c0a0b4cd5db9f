"""Train a linear layer with ``--optimizer muon`` of megatron-core; print its losses and its first update.

Its bias is Adam's.

Newton-Schulz is done again here, in fp64 and by plain products, after Jordan et al. 2024 with the package's
table of coefficients. argv: a file for the store; and the number of this process of two that see the same
data, where the optimizer is to be shared out, as that of 0.16's ``dist_muon`` is, and goes on from a
checkpoint.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import megatron_npu

STEPS, RATE = 5, 0.05


def newton_schulz(gradient: torch.Tensor) -> torch.Tensor:
    """Return the matrix of ``gradient`` [rows, columns] with its singular values near one, in fp64."""
    from emerging_optimizers.orthogonalized_optimizers import muon_utils

    tall = gradient.size(0) > gradient.size(1)
    x = (gradient.t() if tall else gradient).double()
    x = x / x.norm()
    for a, b, c in muon_utils._COEFFICIENT_SETS["quintic"]:
        gram = x @ x.t()
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.t() if tall else x


def restored(optimizer, fresh, layer, folder: Path):
    """Return ``fresh`` with the state of ``optimizer`` of ``layer``, by a checkpoint in ``folder``."""
    from megatron.core import dist_checkpointing, parallel_state

    def weights():
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return layer.sharded_state_dict(metadata={"dp_cp_group": group})

    folder.mkdir(exist_ok=True)
    dist.barrier()
    dist_checkpointing.save(optimizer.sharded_state_dict(weights()), str(folder))
    asked = fresh.sharded_state_dict(weights(), is_loading=True)
    fresh.load_state_dict(dist_checkpointing.load(asked, str(folder)))
    return fresh


def main() -> None:
    megatron_npu.install()
    from megatron.core import optimizer as optimizers
    from megatron.core import package_info, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    if (package_info.MAJOR, package_info.MINOR) < (0, 18):  # where Muon has a function of its own
        from megatron.core.optimizer.muon import get_megatron_muon_optimizer as make
    else:
        make = optimizers.get_megatron_optimizer
    shared = len(sys.argv) > 2
    rank, size = (int(sys.argv[2]), 2) if shared else (0, 1)
    dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=size)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    torch.manual_seed(2)
    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=1)
    layer = tensor_parallel.ColumnParallelLinear(
        16, 12, config=config, init_method=torch.nn.init.xavier_normal_, gather_output=False
    )
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(), layer)
    options = optimizers.OptimizerConfig(
        optimizer="muon",
        lr=RATE,
        min_lr=0.0,
        weight_decay=0.0,
        clip_grad=0.0,
        muon_fp32_matmul_prec="highest",  # the default, medium, lets a CPU multiply in bf16
    )
    layer_wise: dict = {}
    if shared and hasattr(options, "use_layer_wise_distributed_optimizer"):  # since 0.18
        options.use_layer_wise_distributed_optimizer = True
    elif shared:
        layer_wise = {"layer_wise_distributed_optimizer": True}
    optimizer = make(options, [ddp], **layer_wise)
    data, target = torch.randn(8, 1, 16), torch.randn(8, 1, 12)
    losses, before = [], layer.weight.detach().clone()
    for step in range(STEPS):
        ddp.zero_grad_buffer()
        optimizer.zero_grad()
        loss = (ddp(data)[0] - target).pow(2).mean()
        loss.backward()
        ddp.finish_grad_sync()
        losses.append(loss.item())
        expected = newton_schulz(layer.weight.main_grad) if step == 0 else None
        optimizer.step()
        if step == 1 and shared:
            optimizer = restored(
                optimizer, make(options, [ddp], **layer_wise), layer, Path(f"{sys.argv[1]}s")
            )
        if expected is not None:  # Megatron scales a "spectral" update by the root of the longer side
            update = (before - layer.weight.detach()).double() / RATE / 16**0.5
            error = (update - expected).norm() / expected.norm()
    print(json.dumps({"losses": losses, "error": error.item()}))


if __name__ == "__main__":
    main()
