"""Gated delta nets and DeepSeek's sparse attention, of the megatron-core on the path, without Triton.

Run as a module with ``MEGATRON_NPU_TE=local``, in one process or in the two of a tensor-parallel group:

    python -m tests.adaptors.megatron_core.variants_worker FOLDER

One process compares the delta rule with upstream's own in plain torch, and leaves checkpoints and losses in
FOLDER; two processes load them and compare theirs.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.adaptors.megatron_core import te_layers_worker as worker
from tests.adaptors.megatron_core.mamba_worker import losses

LATENT = {
    **{"multi_latent_attention": True, "rope_type": "rope", "q_lora_rank": 16, "kv_lora_rank": 16},
    **{"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "qk_layernorm": True},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "gated_delta_net": {
        **{"linear_attention_freq": 2, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 8},
        **{"linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    },
    # its indexer computes in bf16 alone
    "dsa": LATENT
    | {
        **{"dsa_indexer_n_heads": 2, "dsa_indexer_head_dim": 16, "dsa_indexer_topk": 4},
        **{"dsa_indexer_loss_coeff": 0.1, "bf16": True, "params_dtype": torch.bfloat16},
    },
}


def model(variant: str) -> Any:
    """Return a GPT of two layers: the variant's, and for gated delta nets one of attention."""
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as specs
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    values = {
        **{"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "normalization": "RMSNorm"},
        **{"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False},
        **{"attention_dropout": 0.0, "hidden_dropout": 0.0, "experimental_attention_variant": variant},
        **{"transformer_impl": "transformer_engine", "tensor_model_parallel_size": dist.get_world_size()},
        "sequence_parallel": dist.get_world_size() > 1,  # sparse attention demands it
        **VARIANTS[variant],
    }
    latent = values.get("multi_latent_attention", False)
    config = (MLATransformerConfig if latent else TransformerConfig)(**values)
    torch.manual_seed(5)
    return GPTModel(
        config,
        specs.get_transformer_block_with_experimental_attention_variant_spec(config),
        vocab_size=worker.VOCABULARY,
        max_sequence_length=worker.LENGTH,
        position_embedding_type="rope",
    ).cuda()


def compare_with_upstreams_rule() -> None:
    """Demand of the rule what upstream's own gives, which it keeps for deterministic runs."""
    from megatron.core.ssm import gated_delta_net

    device = torch.device("cuda")
    q, k, v = (torch.randn(2, 70, 3, 8, device=device) for _ in range(3))
    q, k = (torch.nn.functional.normalize(part, dim=-1) for part in (q, k))
    decay, beta = -torch.rand(2, 70, 3, device=device), torch.rand(2, 70, 3, device=device)
    given = q, k, v, decay, beta
    names = list(inspect.signature(gated_delta_net.torch_chunk_gated_delta_rule).parameters)[:5]
    wanted, _ = gated_delta_net.torch_chunk_gated_delta_rule(**dict(zip(names, given, strict=True)))
    found, state = gated_delta_net.chunk_gated_delta_rule(*given)
    assert state is None
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def run(folder: Path) -> None:
    """Compare what the number of processes is for."""
    from megatron.core import package_info

    together = dist.get_world_size() > 1
    if not together:
        compare_with_upstreams_rule()
    for variant in VARIANTS if package_info.MINOR >= 18 else ["gated_delta_net"]:  # no spec before
        built, kept = model(variant), folder / f"{variant}.pt"
        if together:
            near = 1e-4 if variant == "gated_delta_net" else 2e-3
            found = losses(worker.load(built, folder / variant))
            torch.testing.assert_close(found, torch.load(kept), rtol=near, atol=0.0)
            continue
        worker.disturb(built)
        worker.checkpoint(built, folder / variant)
        found = losses(built)
        assert found[1] < found[0] - 0.01, (variant, found)
        torch.save(found, kept)


if __name__ == "__main__":
    worker.main(run)
