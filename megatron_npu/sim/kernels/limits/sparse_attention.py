"""Define the limits on the arguments of DeepSeek's sparse attention."""

from __future__ import annotations

import torch

from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    dimensions,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
    required,
    shape_of,
)
from megatron_npu.sim.kernels.limits.common import HALVES

LATENT, ROTATED = 512, 64
HEADS = (1, 2, 4, 8, 16, 32, 64, 128)

_COMMON = (
    dtype("query", *HALVES),
    *(dtype_of(name, "query") for name in ("key", "query_rope", "key_rope")),
    *(required(name) for name in ("value", "query_rope", "key_rope")),
    dtype_of("value", "query"),
    *(dimensions(name, 4) for name in ("query", "key", "query_rope", "key_rope")),
    Limit("query", f"[b, s, n, {LATENT}]", lambda a: a.query.size(3) == LATENT),
    Limit("query", f"n of {', '.join(map(str, HEADS))}", lambda a: a.query.size(2) in HEADS),
    Limit("key", f"[b, t, 1, {LATENT}]", lambda a: a.key.size(2) == 1 and a.key.size(3) == LATENT),
    shape_of("value", "key"),
    Limit(
        "query_rope",
        f"[b, s, n, {ROTATED}] for query [b, s, n, {LATENT}]",
        lambda a: a.query_rope.shape == (*a.query.shape[:3], ROTATED),
    ),
    Limit(
        "key_rope",
        f"[b, t, 1, {ROTATED}] for key [b, t, 1, {LATENT}]",
        lambda a: a.key_rope.shape == (*a.key.shape[:3], ROTATED),
    ),
    dtype("sparse_indices", torch.int32),
    dimensions("sparse_indices", 4),
    Limit(
        "sparse_indices",
        "[b, s, 1, k] for query [b, s, n, d]",
        lambda a: a.sparse_indices.shape[:3] == (*a.query.shape[:2], 1),
    ),
    Limit(
        "sparse_indices",
        "row numbers of key, with unused entries (negative) at the end of each row",
        lambda a: (
            bool((a.sparse_indices < a.key.size(1)).all())
            and bool(((a.sparse_indices < 0).int().diff(dim=-1) >= 0).all())
        ),
    ),
    Limit("sparse_block_size", "1", lambda a: a.sparse_block_size == 1, simulated=False),
    one_of("sparse_mode", 0, 3),
    one_of("attention_mode", 2),
)

_NOTES = (
    "The wheel names the arguments but no sizes; the sizes are from MindSpore's documentation of the "
    "same operation (mindspore.ops.sparse_flash_attention, its constraints and its formula). Neither "
    "states how unused indices are written; the wheel's example of "
    "npu_sparse_lightning_indexer_grad_kl_loss writes -1."
)

SPARSE_FLASH_ATTENTION = Limits(
    "wheel, npu_sparse_flash_attention; MindSpore, ops.sparse_flash_attention",
    (
        *_COMMON,
        not_simulated("block_table"),
        not_simulated("actual_seq_lengths_query"),
        not_simulated("actual_seq_lengths_kv"),
        not_simulated("layout_query", "BSND"),
        not_simulated("layout_kv", "BSND"),
        not_simulated("sinks"),
    ),
    _NOTES,
)

SPARSE_FLASH_ATTENTION_GRAD = Limits(
    "aclnnSparseFlashAttentionGrad",
    (
        *_COMMON,
        shape_of("d_out", "query"),
        shape_of("out", "query"),
        *(dtype(name, torch.float32) for name in ("softmax_max", "softmax_sum")),
        Limit(
            "softmax_max",
            "[b, 1, s, n] for query [b, s, n, d]",
            lambda a: a.softmax_max.shape == (a.query.size(0), 1, a.query.size(1), a.query.size(2)),
        ),
        shape_of("softmax_sum", "softmax_max"),
        not_simulated("actual_seq_qlen"),
        not_simulated("actual_seq_kvlen"),
        not_simulated("layout", "BSND"),
    ),
)

LIMITS = {
    "npu_sparse_flash_attention": SPARSE_FLASH_ATTENTION,
    "npu_sparse_flash_attention_grad": SPARSE_FLASH_ATTENTION_GRAD,
}
