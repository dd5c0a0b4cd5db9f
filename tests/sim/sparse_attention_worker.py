"""DeepSeek's sparse attention in a GPT of megatron-core on a simulated NPU: fused (since 0.19), and not.

Prints one JSON line: of both ways the losses of three steps of gradient descent, and what the second costs;
before 0.19 of one way. And what was reported, and why the indexer's loss is upstream's.
"""

from __future__ import annotations

import json
from typing import Any

import torch

import megatron_npu
from megatron_npu.ops import dispatch

STEPS, LENGTH, VOCABULARY = 3, 256, 64
HEADS, LATENT, ROTATED = 4, 512, 64


def build() -> Any:
    """Return a GPT of two layers with DeepSeek-V3.2's latent sizes; the weights are the same each time."""
    from megatron.core import tensor_parallel
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    config = MLATransformerConfig(
        **{"num_layers": 2, "hidden_size": 128, "num_attention_heads": HEADS, "normalization": "RMSNorm"},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "experimental_attention_variant": "dsa"},
        **{"transformer_impl": "transformer_engine", "multi_latent_attention": True, "rope_type": "rope"},
        **{"q_lora_rank": 64, "kv_lora_rank": LATENT, "qk_head_dim": 32, "qk_pos_emb_head_dim": ROTATED},
        **{"v_head_dim": 32, "qk_layernorm": True, "bf16": True, "params_dtype": torch.bfloat16},
        **{"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 64},
        **{"dsa_indexer_loss_coeff": 0.1},
    )
    tensor_parallel.model_parallel_cuda_manual_seed(5)
    return GPTModel(
        config,
        specs.get_transformer_block_with_experimental_attention_variant_spec(config),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="rope",
    ).cuda()


def train(steps: int = STEPS) -> dict[str, Any]:
    """Return the losses of a fresh model, and what its second step costs."""
    from megatron_npu.sim import counting

    model = build()
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(0, VOCABULARY, (1, LENGTH + 1), generator=generator).cuda()
    positions = torch.arange(LENGTH, device="cuda")[None]
    result: dict[str, Any] = {"losses": []}
    for step in range(steps):
        with counting() as counts:
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
            loss.backward()
        if step == 1:
            names = ("npu::npu_sparse_flash_attention", "npu::npu_sparse_flash_attention_grad")
            calls = [counts.launches[name].calls if name in counts.launches else 0 for name in names]
            result |= {"launches": counts.total_launches, "peak": counts.peak, "calls": calls}
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                parameter.grad = None
        result["losses"].append(loss.item())
    return result


def main() -> None:
    """Train both ways; the second as if the operation did not take these sizes."""
    megatron_npu.install()
    from megatron.core import parallel_state

    torch.cuda.set_device(0)
    store = torch.distributed.TCPStore("localhost", 0, 1, is_master=True)
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    parallel_state.initialize_model_parallel()
    from megatron_npu.adaptors.megatron_core.attention import sparse_attention

    first = train()
    said = {
        "reported": [reason for name, reason in dispatch.fallbacks if name == "sparse attention"],
        "indexer": [
            (row.state, row.why)
            for row in megatron_npu.ledger().rows
            if row.target.endswith(":compute_dsa_indexer_loss")
        ],
    }
    if first["calls"] != [0, 0]:
        sparse_attention.beyond_npu = lambda *_: "left to Megatron to compare"
        said |= {"fused": first, "unfused": train()}
    print(json.dumps({"unfused": first} | said))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
