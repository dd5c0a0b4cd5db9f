"""Verify and strict mode over a whole GPT: every operation is compared, in the layer where it is called."""

from __future__ import annotations

import os
import sys

import pytest

from tests.support import warm
from tests.support.simulated import run_simulated, unavailable

PROGRAM = """
import os, tempfile
import megatron_npu
megatron_npu.install()
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

store = os.path.join(tempfile.mkdtemp(), "store")
dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
tensor_parallel.model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True,
    attention_dropout=DROPOUT, hidden_dropout=DROPOUT, add_qkv_bias=True, bias_activation_fusion=True,
)
model = GPTModel(
    config, get_gpt_layer_local_spec(normalization="LayerNorm"), vocab_size=128, max_sequence_length=32,
    position_embedding_type="rope",
).train().cuda()
tokens = torch.randint(128, (2, 32), device="cuda")
position = torch.arange(32, device="cuda").expand(2, 32)
mask = torch.ones(1, 1, 32, 32, dtype=torch.bool, device="cuda").triu(1)
model(tokens, position, mask, labels=tokens).mean().backward()
"""


@pytest.fixture(params=["cpu", "npu"])
def device(request) -> str:
    if request.param == "npu" and unavailable():
        pytest.skip(unavailable())
    return request.param


def run(dropout, device="cpu", **variables):
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("DROPOUT", str(dropout))]
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", **variables}
    if device == "npu":
        done = run_simulated(*command, timeout=200, **variables)
        done.stderr = done.stdout  # it has both
        return done
    return warm.run(
        command,
        env={**os.environ, "MEGATRON_NPU_DEVICE": "cpu", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_operation_of_a_gpt_is_compared(device):
    done = run(0.0, device, MEGATRON_NPU_VERIFY="all")
    assert done.returncode == 0, done.stderr
    lines = {line.split(": ")[1]: line for line in done.stdout.splitlines() if line.startswith("verify")}
    expected = {"attention", "layer_norm", "bias_gelu", "rotary", "vocab_parallel_embedding"}
    assert expected <= set(lines)
    assert all(" 0 above the limit" in line for line in lines.values()), done.stdout
    assert "decoder.layers." in lines["attention"]
    assert "decoder." in lines["layer_norm"]
    assert ".mlp" in lines["bias_gelu"]
    assert "is beyond" not in done.stderr


def test_a_selection_compares_nothing_else(device):
    done = run(0.1, device, MEGATRON_NPU_VERIFY="norm,dropout,attention")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("verify")]
    names = ["layer_norm", "attention", "bias_dropout_add"]
    if device == "npu":
        del names[2]  # there it is what it would be compared with
    assert [line.split(": ")[1] for line in lines] == names
    assert "2 calls not compared, because they draw random numbers" in lines[1]
    assert all("4 calls not compared, because they draw random numbers" in line for line in lines[2:])


def test_an_unknown_name_is_an_error_in_one_line():
    done = run(0.0, MEGATRON_NPU_VERIFY="nrom")
    assert done.returncode
    assert "MEGATRON_NPU_VERIFY contains unknown operations: nrom. Correct or remove them. " in done.stderr


def test_a_gpt_leaves_no_fused_path(device):
    done = run(0.1, device, MEGATRON_NPU_STRICT="1")
    assert done.returncode == 0, done.stderr
