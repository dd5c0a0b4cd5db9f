"""Declare the flags of multi-latent attention and multi-token prediction, with Megatron's names and
defaults.
"""

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
    """Add to a parser the flags of multi-latent attention.

    All except the first have an effect only with the first, or with yarn.
    """
    add_attention(add)
    add(
        "--rotary-scaling-factor", type=number, default=1.0, help="factor by which yarn extends the positions"
    )
    add("--mscale", type=number, default=1.0, help="coefficient of yarn's scale for the rotated vectors")
    add(
        "--mscale-all-dim",
        type=number,
        default=0.0,
        help="coefficient of yarn's scale for the softmax; 0: no scale",
    )


def add_attention(add: Add) -> None:
    """Add to a parser the attention flags, except those that yarn also uses without multi-latent
    attention.
    """
    add(
        "--multi-latent-attention",
        action="store_true",
        help="use multi-latent attention: compress the keys and values of all heads into one latent vector "
        "(DeepSeek-V2, arXiv:2405.04434)",
    )
    add(
        "--q-lora-rank",
        type=positive,
        help="size of the latent vector for queries (default: queries are not compressed)",
    )
    add("--kv-lora-rank", type=positive, default=32, help="size of the latent vector for keys and values")
    add(
        "--qk-head-dim",
        type=positive,
        default=128,
        help="size of the part of a query or key head that is not rotated",
    )
    add(
        "--qk-pos-emb-head-dim",
        type=positive,
        default=64,
        help="size of the part of a query or key head that is rotated",
    )
    add("--v-head-dim", type=positive, default=128, help="size of a value head")
    add(
        "--rope-type",
        choices=["rope", "yarn"],
        help="type of rotary embedding with --multi-latent-attention (default: yarn)",
    )


def add_prediction(add: Add) -> None:
    """Add to a parser the flags of multi-token prediction."""
    add(
        "--mtp-num-layers",
        type=positive,
        help="number of extra multi-token prediction layers, each of which predicts one token "
        "further ahead (DeepSeek-V3, arXiv:2412.19437)",
    )
    add(
        "--mtp-loss-scaling-factor",
        type=number,
        default=0.1,
        help="weight of the multi-token prediction loss, averaged over its layers",
    )
