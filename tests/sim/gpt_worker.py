"""Trains a tiny megatron-core GPT on the device that the plug-in selects; prints one JSON line.

Run as a program, once under the simulator and once on the CPU: the plug-in selects one device per process.
"""

from __future__ import annotations

import json
import sys

import torch

import megatron_npu

STEPS, VOCABULARY, LENGTH = 5, 512, 32


def main() -> None:
    """Train and print {"device", "losses", "norms", "applied"}."""
    from megatron.core import parallel_state, tensor_parallel

    torch.cuda.set_device(0)
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    model, optimizer = build(torch.bfloat16 if "bf16" in sys.argv else torch.float32)
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator).to("cuda")
    losses, norms = [], []
    for _ in range(STEPS):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        positions = torch.arange(LENGTH, device="cuda")[None].expand(2, -1)
        loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        model.finish_grad_sync()
        _, norm, _ = optimizer.step()
        losses.append(loss.item())
        norms.append(float(norm))
    applied = [row.target for row in megatron_npu.ledger().rows if row.state == "applied"]
    print(json.dumps({"device": str(loss.device), "losses": losses, "norms": norms, "applied": applied}))
    torch.distributed.destroy_process_group()


def build(dtype: torch.dtype) -> tuple[torch.nn.Module, object]:
    """Return model and optimizer; the weights are the same everywhere."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module
    from megatron.core.transformer.transformer_config import TransformerConfig

    bf16 = dtype == torch.bfloat16
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bf16=bf16,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, share_embeddings_and_output_weights=True
    )
    # Which generator initialises weights is the device's business: the CPU has two
    # (docs/contributing/architecture.md).
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02, generator=generator)
    model = model.to("cuda")
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(config, ddp, Float16Module(config, model) if bf16 else model)
    settings = OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=1.0,
        bf16=bf16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    return model, get_megatron_optimizer(settings, [model])


if __name__ == "__main__":
    main()
