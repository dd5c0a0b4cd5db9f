"""Parallel linear layers of megatron-core with --tp-comm-overlap beside those without, on simulated NPUs.

One rank of two, four or eight, bf16, hidden size 256: outputs and gradients must have the same bits, with
fewer launches and messages and the same bytes. HCCL's buffers of their group are as
--nccl-communicator-config-path says.
"""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import megatron_npu
from megatron_npu.adaptors.megatron_core.layers.tensor_parallel_overlap import refuse_arguments
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch
from megatron_npu.options import hccl_buffers

RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
PRODUCTS = ("npu::npu_all_gather_base_mm", "npu::npu_mm_reduce_scatter_base")
BUFFER = 32  # MiB
HIDDEN, LENGTH, BATCH = 256, 16, 2


def config_of(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    common = {
        "num_layers": 1,
        "hidden_size": HIDDEN,
        "num_attention_heads": RANKS,
        "tensor_model_parallel_size": RANKS,
        "sequence_parallel": True,
        "bf16": True,
        "params_dtype": torch.bfloat16,
        "use_cpu_initialization": True,
    }
    return TransformerConfig(**{**common, **options})


def layers_of(config: Any, width: int) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return a column- and a row-parallel layer as an MLP has them, with the weights of their seed."""
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    torch.manual_seed(1 + RANK)

    def draw(weight: torch.Tensor) -> None:
        torch.nn.init.normal_(weight, std=0.05)

    common = {"config": config, "init_method": draw, "is_expert": False}
    column = ColumnParallelLinear(HIDDEN, width, bias=False, gather_output=False, **common)
    row = RowParallelLinear(width, HIDDEN, bias=True, input_is_parallel=True, skip_bias_add=False, **common)
    for layer in (column, row):
        layer.cuda()
        if config.gradient_accumulation_fusion:
            layer.weight.main_grad = torch.zeros_like(layer.weight, dtype=torch.float32)
            layer.weight.grad_added_to_main_grad = False
    return column, row


def step(config: Any, width: int = RANKS * HIDDEN) -> tuple[list[torch.Tensor], Any]:
    """Return output and gradients of both layers, and what the second pass costs."""
    from megatron_npu.sim import counting

    column, row = layers_of(config, width)
    generator = torch.Generator().manual_seed(3 + RANK)
    values = torch.randn(LENGTH // RANKS, BATCH, HIDDEN, generator=generator).bfloat16().cuda()
    input = values.requires_grad_()
    for _ in range(2):
        for tensor in (input, column.weight, row.weight, row.bias):
            tensor.grad = None
        with counting() as counts:
            output, _ = row(torch.nn.functional.gelu(column(input)[0]))
            output.backward(torch.ones_like(output))
    weights = [getattr(layer.weight, "main_grad", layer.weight.grad) for layer in (column, row)]
    return [output, input.grad, row.bias.grad, *weights], counts


def compare(**options: Any) -> None:
    """Compare with and without overlap."""
    plain, apart = step(config_of(**options))
    ours, fused = step(config_of(tp_comm_overlap=True, **options))
    for number, (found, expected) in enumerate(zip(ours, plain, strict=True)):
        assert torch.equal(found, expected), (number, options)
    inside = sum(fused.launches[name].calls for name in PRODUCTS)
    steps = [counts.total_launches + counts.total_communication.calls for counts in (apart, fused)]
    assert steps[1] - inside == steps[0] - 4, steps  # two a layer, one forward and one backward
    assert fused.communication == apart.communication, (fused.communication, apart.communication)
    assert [fused.launches[name].calls for name in PRODUCTS] == [2, 2], fused.launches


def narrow() -> None:
    """Leave a layer of too few rows to upstream, and say so."""
    dispatch.fallbacks.clear()
    expected, _ = step(config_of(), width=HIDDEN)
    found, counts = step(config_of(tp_comm_overlap=True), width=HIDDEN)
    assert all(map(torch.equal, found, expected))
    assert "npu::npu_all_gather_base_mm" not in counts.launches
    reasons = [reason for name, reason in dispatch.fallbacks if name == "tp-comm-overlap"]
    assert any(f"{HIDDEN // RANKS} x {HIDDEN}" in reason for reason in reasons), dispatch.fallbacks


def refused() -> None:
    """Refuse by name what no layer could overlap."""
    for options, said in (
        ({"sequence_parallel": False}, "--tp-comm-overlap requires --sequence-parallel"),
        ({"tensor_model_parallel_size": 3}, "--tensor-model-parallel-size 2, 4 or 8 on an NPU"),
        (
            {"params_dtype": torch.float32, "bf16": False},
            "--tp-comm-overlap requires --bf16 or --fp16 on an NPU",
        ),
    ):
        with pytest.raises(UsageError, match=said):
            config_of(tp_comm_overlap=True, **options)
    given = {"tp_comm_overlap": True, "sequence_parallel": False, "tensor_model_parallel_size": RANKS}
    with pytest.raises(UsageError, match="--tp-comm-overlap requires --sequence-parallel"):
        refuse_arguments(Namespace(bf16=True, fp16=False, **given))


def buffers() -> None:
    """Those of ``tp`` are as the file says, of ``mp`` as the arguments tell, the world's as ever."""
    from megatron.core import parallel_state

    from megatron_npu.sim import counting

    dist.all_reduce(torch.ones(1, device="npu"), group=parallel_state.get_model_parallel_group())
    with counting() as counts:
        dist.barrier()
    assert counts.groups["TENSOR_MODEL_PARALLEL_GROUP"].buffer == 2 * BUFFER << 20, counts.groups
    assert counts.groups["MODEL_PARALLEL_GROUP"].buffer == 2 << 20, counts.groups
    assert counts.groups["default_pg"].buffer == 2 * 200 << 20, counts.groups


def main() -> None:
    megatron_npu.install()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.cuda.set_device(RANK)
    dist.init_process_group(
        "nccl", init_method=f"file://{os.environ['RENDEZVOUS']}", rank=RANK, world_size=RANKS
    )
    groups = Path(os.environ["RENDEZVOUS"]).with_name(f"groups{RANK}.yaml")
    groups.write_text(f"tp: {{hccl_buffer_size: {BUFFER}}}\n")
    sizes = {"seq_length": LENGTH, "micro_batch_size": BATCH, "hidden_size": HIDDEN, "num_layers": 1}
    layout = {
        "tensor_model_parallel_size": RANKS,
        "pipeline_model_parallel_size": 1,
        "sequence_parallel": True,
    }
    heads = {"num_attention_heads": RANKS, "kv_channels": 64, "max_position_embeddings": LENGTH}
    others = {"bf16": True, "fp16": False, "hccl_group_buffer_adaptive": True}
    hccl_buffers.choose(Namespace(**sizes, **layout, **heads, **others))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=RANKS, nccl_communicator_config_path=str(groups)
    )
    model_parallel_cuda_manual_seed(1)
    compare()
    compare(gradient_accumulation_fusion=True)
    narrow()
    refused()
    buffers()
    print(f"rank {RANK}: done", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
