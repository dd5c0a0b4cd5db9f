"""Sizes of HCCL's buffers from arguments, by hand; against messages: tests/sim/test_hccl_buffers.py."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_npu import devices
from megatron_npu.base.errors import UsageError
from megatron_npu.options import hccl_buffers
from megatron_npu.options.hccl_messages import MessageSizes

LLAMA_8B = {
    "hccl_group_buffer_adaptive": True,
    "micro_batch_size": 1,
    "seq_length": 8192,
    "hidden_size": 4096,
    "num_layers": 32,
    "num_attention_heads": 32,
    "kv_channels": 128,
    "group_query_attention": True,
    "num_query_groups": 8,
    "max_position_embeddings": None,
    "padded_vocab_size": 128256,
    "bf16": True,
    "fp16": False,
    "sequence_parallel": True,
    "tensor_model_parallel_size": 4,
    "pipeline_model_parallel_size": 2,
    "context_parallel_size": 1,
}
EXPERTS = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "expert_model_parallel_size": 4,
    "expert_tensor_parallel_size": 1,
}
STATES = 8192 * 4096 * 2


@pytest.mark.parametrize(
    ("others", "group", "expected"),
    [
        ({}, "tp", STATES),
        ({"fp32_residual_connection": True}, "tp", 2 * STATES),
        ({"seq_length": 128}, "tp", 4 * (17 * 12 * 4096)),  # vectors' gradients; no positions are learned
        ({"create_attention_mask_in_dataloader": True}, "tp", 8192**2 + 64 * 8193),
        ({"optimizer": "muon"}, "tp", None),
        ({}, "pp", STATES // 4),
        ({"virtual_pipeline_model_parallel_size": 2}, "pp", STATES // 2),
        ({}, "mp", 1),
        ({}, "dp_cp", None),
        ({}, "dp", 1),
        ({"use_megatron_fsdp": True}, "dp", None),
        ({}, "embd", 128256 // 4 * 4096 * 4),
        ({"padded_vocab_size": None}, "embd", None),
        # two ranks: keys and values of two heads, and their gradients; here the swap for heads is larger
        ({"context_parallel_size": 2}, "cp", 4096 * (8 + 2 + 2) * 128 * 2),
        ({"hybrid_override_pattern": "M*"}, "cp", None),
        ({}, "ep", None),
        (EXPERTS, "ep", 4 * 2048 * 2 * 4096 * 2),  # two experts a rank: two copies of everyone's tokens
        (EXPERTS | {"moe_router_topk": 4}, "ep", 4 * 2048 * 2 * 4096 * 2),
        (EXPERTS | {"expert_tensor_parallel_size": 2}, "ep_tp", 2 * 4 * 2048 * 2 * 4096 * 2),
        (EXPERTS, "tp_ep_mp", 4 * 2048 * 4096 * 2),
    ],
)
def test_largest_message(others, group, expected):
    assert MessageSizes.of(Namespace(**(LLAMA_8B | others))).largest().get(group) == expected


@pytest.mark.parametrize(
    ("message", "usual", "expected"),
    [(0, "", 1), (1 << 20, "", 1), ((1 << 20) + 1, "", 2), (1 << 30, "", 200), (1 << 30, "120", 120)],
)
def test_a_buffer_is_never_larger_than_the_default(message, usual, expected, monkeypatch):
    monkeypatch.setenv("HCCL_BUFFSIZE", usual)
    assert hccl_buffers.size_of(message) == expected


def test_groups_are_sized_where_it_is_asked_for(monkeypatch):
    device = Namespace(name="npu", group_buffers=None)
    monkeypatch.setattr(devices, "current", lambda: device)
    args = Namespace(**LLAMA_8B)
    assert hccl_buffers.size_of_group("tp") is None
    hccl_buffers.choose(args)
    sizes = [hccl_buffers.size_of_group(name) for name in ("tp", "pp", "mp", "dp_cp")]
    assert sizes == [64, 16, 1, None]
    hccl_buffers.choose(Namespace())
    assert not hccl_buffers.asked()


def test_other_devices_refuse_it(monkeypatch):
    monkeypatch.setattr(devices, "current", lambda: Namespace(name="cuda"))
    with pytest.raises(
        UsageError,
        match="--hccl-group-buffer-adaptive applies only to HCCL on an Ascend NPU, but the device is cuda",
    ):
        hccl_buffers.choose(Namespace(hccl_group_buffer_adaptive=True))
