"""One rank of a run of a library on Megatron, as its users write it: nothing here names megatron_npu.

worker.py LIBRARY MODEL OUT [--lora] [--stages] [--bf16]: load a Transformers model, compare logits, train,
export, compare again. Rank 0 writes what it found into OUT/report.json.
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


def run(models: list[Any], *, labels: torch.Tensor | None, forward_only: bool) -> torch.Tensor | None:
    """Run the fixed batch through Megatron's schedule of one or several pipeline stages.

    Returns:
        What the last stage makes of it, None on the others: without ``labels`` this rank's part of the
        logits, with them the mean loss.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    tokens, positions, _ = (tensor.cuda() for tensor in batch())

    def step(_: Any, model: Any) -> Any:
        return model(tokens, positions, None, labels=labels), lambda output, **_: finish(output)

    def finish(output: torch.Tensor) -> Any:
        if labels is None:
            return output
        loss = output.float().mean()
        return loss, {"loss": loss.detach()}

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[None] * len(models) if len(models) > 1 else None,
        model=models,
        num_microbatches=1,
        seq_length=LENGTH,
        micro_batch_size=BATCH,
        forward_only=forward_only,
        collect_non_loss_data=labels is None,
    )
    return (found[0] if labels is None else found[0]["loss"]) if found else None


def from_last_stage(value: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor:
    """Return on every rank, in fp32, what the last pipeline stage has."""
    from megatron.core import parallel_state

    if parallel_state.get_pipeline_model_parallel_world_size() == 1:
        assert value is not None
        return value.float()
    value = torch.empty(shape).cuda() if value is None else value.float().contiguous()
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(value, last, group=parallel_state.get_pipeline_model_parallel_group())
    return value


def megatron_logits(models: list[Any], vocabulary: int) -> torch.Tensor:
    """Return ``[b, s, v]`` on the CPU, fp32: the models', gathered from all ranks."""
    from megatron.core import tensor_parallel

    for model in models:
        model.eval()
    with torch.no_grad():
        part = run(models, labels=None, forward_only=True)
        whole = None if part is None else tensor_parallel.gather_from_tensor_model_parallel_region(part)
        whole = from_last_stage(whole, (BATCH, LENGTH, vocabulary))
    for model in models:
        model.train()
    return whole.cpu()


def train(models: list[Any], config: Any, dtype: torch.dtype) -> list[float]:
    """Train with Megatron's own optimizer and data parallelism; return the losses."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    bf16 = dtype == torch.bfloat16
    reduction = DistributedDataParallelConfig(grad_reduce_in_fp32=bf16)
    sharded = [
        model
        if isinstance(model, DistributedDataParallel)
        else DistributedDataParallel(config, reduction, model)
        for model in models
    ]
    options = OptimizerConfig(optimizer="adam", lr=3e-3, weight_decay=0.0, bf16=bf16, params_dtype=dtype)
    optimizer = get_megatron_optimizer(options, sharded)
    labels = batch()[2].cuda()
    losses = []
    for _ in range(STEPS):
        for model in sharded:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        loss = run(sharded, labels=labels, forward_only=False)
        finalize_model_grads(sharded)
        optimizer.step()
        losses.append(from_last_stage(loss, ()).item())
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
    parser.add_argument("--stages", action="store_true", help="ranks are pipeline stages")
    parser.add_argument("--bf16", action="store_true")
    given = parser.parse_args()
    dtype = torch.bfloat16 if given.bf16 else torch.float32
    library = importlib.import_module(f"{given.library}_steps")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    library.start(**({"tensor": 1, "pipeline": 2} if given.stages else {"tensor": 2, "pipeline": 1}))
    tokens = batch()[0]
    models, config = library.load(given.model, lora=given.lora, dtype=dtype)
    expected = transformers_logits(given.model, tokens)
    vocabulary = expected.size(-1)
    report: dict[str, Any] = {
        "device": torch.tensor(0).cuda().device.type,
        "loaded": furthest(megatron_logits(models, vocabulary), expected),
        "losses": train(models, config, dtype),
    }
    trained = megatron_logits(models, vocabulary)
    is_adapter = library.export(given.out / "exported", given.model)
    dist.barrier()
    if dist.get_rank() == 0:
        exported = given.out / "exported"
        whole, adapter = (given.model, exported) if is_adapter else (exported, None)
        report["exported"] = furthest(trained, transformers_logits(whole, tokens, adapter))
        report["moved"] = furthest(trained, expected)
        (given.out / "report.json").write_text(json.dumps(report), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
