"""The driver's flags for multi-latent attention and multi-token prediction: Megatron's names and defaults."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron_npu.base.arg_parser import number, positive

Add = Callable[..., Any]


# What the attention takes beside the first flag: attributes of the arguments, here and upstream.
NAMES = """
    q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim rope_type rotary_scaling_factor
    mscale mscale_all_dim
""".split()


def add(add: Add) -> None:
    """Add the flags of the attention; all but the first mean something with it alone, or with yarn."""
    add_attention(add)
    add("--rotary-scaling-factor", type=number, default=1.0, help="by which yarn stretches its positions")
    add("--mscale", type=number, default=1.0, help="of yarn's scale of rotated vectors")
    add("--mscale-all-dim", type=number, default=0.0, help="of yarn's scale of the softmax; 0: none")


def add_attention(add: Add) -> None:
    """Add those of them that yarn without this attention does not have."""
    add(
        "--multi-latent-attention",
        action="store_true",
        help="keep keys and values of all heads as one short vector (DeepSeek-V2, arXiv:2405.04434)",
    )
    add("--q-lora-rank", type=positive, help="size of the vector for queries (default: they have none)")
    add("--kv-lora-rank", type=positive, default=32, help="size of the vector for keys and values")
    add("--qk-head-dim", type=positive, default=128, help="part of a query or key head without positions")
    add("--qk-pos-emb-head-dim", type=positive, default=64, help="part of it that is rotated")
    add("--v-head-dim", type=positive, default=128, help="size of a value head")
    add("--rope-type", choices=["rope", "yarn"], help="how that part is rotated (default: yarn)")


def add_prediction(add: Add) -> None:
    """Add the flags of multi-token prediction."""
    add(
        "--mtp-num-layers",
        type=positive,
        help="further layers, each of which learns to predict one token more (DeepSeek-V3, arXiv:2412.19437)",
    )
    add("--mtp-loss-scaling-factor", type=number, default=0.1, help="weight of the mean of their losses")
