"""Verify and strict mode over a whole GPT: every operation is compared, in the layer where it is called."""

from __future__ import annotations

import os
import subprocess
import sys

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
).train()
tokens = torch.randint(128, (2, 32))
position = torch.arange(32).expand(2, 32)
mask = torch.ones(1, 1, 32, 32, dtype=torch.bool).triu(1)
model(tokens, position, mask, labels=tokens).mean().backward()
"""


def run(dropout, **variables):
    environment = {
        **os.environ,
        "MEGATRON_NPU_DEVICE": "cpu",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM.replace("DROPOUT", str(dropout))],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_every_operation_of_a_gpt_is_compared():
    done = run(0.0, MEGATRON_NPU_VERIFY="all")
    assert done.returncode == 0, done.stderr
    lines = {line.split(": ")[1]: line for line in done.stdout.splitlines() if line.startswith("verify")}
    expected = {"attention", "layer_norm", "bias_gelu", "rotary", "vocab_parallel_embedding"}
    assert expected <= set(lines)
    assert all(" 0 beyond the limit" in line for line in lines.values()), done.stdout
    assert "decoder.layers." in lines["attention"]
    assert "decoder." in lines["layer_norm"]
    assert ".mlp" in lines["bias_gelu"]
    assert "verify:" not in done.stderr  # nothing was beyond its limit


def test_a_selection_compares_nothing_else():
    done = run(0.1, MEGATRON_NPU_VERIFY="norm,dropout,attention")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("verify")]
    assert [line.split(": ")[1] for line in lines] == ["layer_norm", "attention", "bias_dropout_add"]
    assert "2 calls not compared: they draw random numbers" in lines[1]
    assert "4 calls not compared: they draw random numbers" in lines[2]


def test_an_unknown_name_is_an_error_in_one_line():
    done = run(0.0, MEGATRON_NPU_VERIFY="nrom")
    assert done.returncode
    assert "MEGATRON_NPU_VERIFY=nrom; expected all, or names among" in done.stderr


def test_a_gpt_on_the_cpu_leaves_no_fused_path():
    done = run(0.1, MEGATRON_NPU_STRICT="1")
    assert done.returncode == 0, done.stderr
