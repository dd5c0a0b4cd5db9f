"""One rank of a run of a library on Megatron, as its users write it: nothing here names megatron_npu.

worker.py LIBRARY MODEL OUT [--lora]: load a Transformers model, compare logits, train, export, compare again.
Rank 0 writes what it found into OUT/report.json.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

STEPS, BATCH, LENGTH = 20, 2, 16


def transformers_logits(path: Path, tokens: torch.Tensor, adapter: Path | None = None) -> torch.Tensor:
    """Return ``[b, s, v]``, fp32 on the CPU: what Transformers makes of ``tokens`` ``[b, s]``."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter))
    with torch.no_grad():
        return model.eval()(tokens).logits


def batch() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and labels ``[b, s]`` on the CPU, the same on each rank."""
    tokens = torch.randint(0, 128, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    return tokens[:, :-1].contiguous(), positions.contiguous(), tokens[:, 1:].contiguous()


def megatron_logits(model: Any) -> torch.Tensor:
    """Return ``[b, s, v]`` on the CPU: the model's, gathered from its tensor-parallel ranks."""
    from megatron.core import tensor_parallel

    tokens, positions, _ = (tensor.cuda() for tensor in batch())
    model.eval()
    with torch.no_grad():
        part = model(tokens, positions, None)
        logits = tensor_parallel.gather_from_tensor_model_parallel_region(part)
    model.train()
    return logits.float().cpu()


def train(models: list[Any], config: Any) -> list[float]:
    """Train with Megatron's own optimizer and data parallelism; return the losses."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    sharded = [
        model
        if isinstance(model, DistributedDataParallel)
        else DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        for model in models
    ]
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0), sharded)
    tokens, positions, labels = (tensor.cuda() for tensor in batch())
    losses = []
    for _ in range(STEPS):
        for model in sharded:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = sharded[0](tokens, positions, None, labels=labels).float().mean()
        loss.backward()
        finalize_model_grads(sharded)
        optimizer.step()
        losses.append(loss.item())
    return losses


def furthest(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference; the vocabulary may be padded in the first."""
    return (found[..., : expected.shape[-1]] - expected).abs().max().item()


def main() -> None:
    """Run one library and write the report."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--lora", action="store_true")
    given = parser.parse_args()
    library = importlib.import_module(f"{given.library}_steps")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    library.start(tensor=2)
    tokens = batch()[0]
    models, config = library.load(given.model, lora=given.lora)
    report: dict[str, Any] = {
        "device": torch.tensor(0).cuda().device.type,
        "loaded": furthest(megatron_logits(models[0]), transformers_logits(given.model, tokens)),
        "losses": train(models, config),
    }
    trained = megatron_logits(models[0])
    is_adapter = library.export(given.out / "exported", given.model)
    dist.barrier()
    if dist.get_rank() == 0:
        exported = given.out / "exported"
        whole, adapter = (given.model, exported) if is_adapter else (exported, None)
        report["exported"] = furthest(trained, transformers_logits(whole, tokens, adapter))
        report["moved"] = furthest(trained, transformers_logits(given.model, tokens))
        (given.out / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
