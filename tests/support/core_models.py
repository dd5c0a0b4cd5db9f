"""Small models of the installed megatron-core, in this process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from tests.support.comparison import here


@pytest.fixture(scope="module")
def single_process(tmp_path_factory) -> Iterator[None]:
    """Model-parallel groups of one process, and Megatron's RNG tracker."""
    import megatron_npu

    megatron_npu.install()
    from megatron.core import parallel_state, tensor_parallel

    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def make_config(kind=None, **changes):
    """Return a small TransformerConfig, or one of a class derived from it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    values = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    return (kind or TransformerConfig)(**{**values, **changes})


def make_ddp(layers=1, **options):
    """Return Megatron's DDP around layers of a weight and two vectors, bf16 all."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    torch.manual_seed(2)
    model = torch.nn.Sequential(
        *(m for _ in range(layers) for m in (torch.nn.Linear(8, 8), torch.nn.LayerNorm(8)))
    )
    for parameter in model.parameters():
        parameter.sequence_parallel = False
    ddp = DistributedDataParallelConfig(**options)
    return DistributedDataParallel(make_config(), ddp, model.to(here(), torch.bfloat16))
