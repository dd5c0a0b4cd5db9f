"""Define the limits on the arguments of operations that sort tokens by expert, restore their order, or
select experts.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    absent,
    dimensions,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
    shape_of,
)
from megatron_npu.sim.kernels.limits.common import FLOATS

LAST_EXACT_COUNT = 16777215  # 2^24 - 1, up to where fp32 counts exactly: the device sorts floats
TOPK = 512

PERMUTED_INDICES = (
    dtype("sorted_indices", torch.int32),
    dimensions("sorted_indices", 1),
    one_of("padded_mode", False),
)

MOE_TOKEN_PERMUTE = Limits(
    "wheel, npu_moe_token_permute",
    (
        dtype("tokens", *FLOATS),
        dimensions("tokens", 2),
        dtype("indices", torch.int32, torch.int64),
        dimensions("indices", 1, 2),
        Limit("indices", "one row per token", lambda a: a.indices.size(0) == a.tokens.size(0)),
        Limit(
            "indices",
            f"at most {TOPK} experts per token",
            lambda a: a.indices.dim() == 1 or a.indices.size(1) <= TOPK,
        ),
        Limit(
            "indices",
            f"fewer than {LAST_EXACT_COUNT} elements, from 0 to below {LAST_EXACT_COUNT}",
            lambda a: (
                a.indices.numel() < LAST_EXACT_COUNT
                and bool(((a.indices >= 0) & (a.indices < LAST_EXACT_COUNT)).all())
            ),
        ),
        Limit(
            "num_out_tokens",
            "at least minus the number of copies",
            lambda a: a.num_out_tokens >= -a.indices.numel(),
        ),
        one_of("padded_mode", False),
    ),
)

MOE_TOKEN_PERMUTE_GRAD = Limits(
    MOE_TOKEN_PERMUTE.source,
    (dtype("grad_permuted_tokens", *FLOATS), dimensions("grad_permuted_tokens", 2), *PERMUTED_INDICES),
)

MOE_TOKEN_UNPERMUTE = Limits(
    "wheel, npu_moe_token_unpermute",
    (
        dtype("permuted_tokens", *FLOATS),
        dimensions("permuted_tokens", 2),
        *PERMUTED_INDICES,
        absent("restore_shape"),
        dtype("probs", *FLOATS),
        dimensions("probs", 2),
        Limit("probs", f"[tokens, topk] with topk up to {TOPK}", lambda a: 0 < a.probs.size(1) <= TOPK),
        Limit(
            "probs",
            "the same number of elements as sorted_indices",
            lambda a: a.probs.numel() == a.sorted_indices.numel(),
        ),
        Limit(
            "sorted_indices",
            "each position from 0 to their number - 1 at most once",
            lambda a: torch.equal(
                a.sorted_indices.sort().values, torch.arange(len(a.sorted_indices), dtype=torch.int32)
            ),
        ),
    ),
)

MOE_TOKEN_UNPERMUTE_GRAD = Limits(
    MOE_TOKEN_UNPERMUTE.source,
    (
        dtype("grad_unpermuted_tokens", *FLOATS),
        dimensions("grad_unpermuted_tokens", 2),
        *PERMUTED_INDICES,
        absent("restore_shape"),
        dtype("probs", *FLOATS),
        dimensions("probs", 2),
    ),
)


def _probabilities_dtype(tokens: str) -> Limit:
    return Limit(
        "probs",
        f"the dtype of {tokens}, or float32 with bfloat16",
        lambda a: (
            a.probs.dtype == getattr(a, tokens).dtype
            or (getattr(a, tokens).dtype, a.probs.dtype) == (torch.bfloat16, torch.float32)
        ),
    )


def _copies(a: SimpleNamespace) -> int:
    """Return the number of experts per token that follows from the number of output tokens."""
    tokens = a.tokens.size(0)
    return (tokens if a.num_out_tokens is None else a.num_out_tokens) // max(1, tokens)


ROUTING_MAP = (
    dtype("routing_map", torch.int8, torch.bool),
    dimensions("routing_map", 2),
    Limit(
        "routing_map",
        "only 0 and 1",
        lambda a: a.routing_map.dtype == torch.bool or bool(((a.routing_map | 1) == 1).all()),
    ),
)

MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP = Limits(
    "wheel, npu_moe_token_permute_with_routing_map",
    (
        dtype("tokens", *FLOATS),
        dimensions("tokens", 2),
        *ROUTING_MAP,
        Limit("routing_map", "one row per token", lambda a: a.routing_map.size(0) == a.tokens.size(0)),
        _probabilities_dtype("tokens"),
        Limit("probs", "the shape of routing_map", lambda a: a.probs.shape == a.routing_map.shape),
        not_simulated("drop_and_pad", False),
        Limit(
            "num_out_tokens",
            "0 to tokens · experts",
            lambda a: 0 <= a.num_out_tokens <= a.routing_map.numel(),
        ),
        Limit(
            "routing_map",
            f"num_out_tokens // tokens ones per row, fewer than {TOPK}",
            lambda a: _copies(a) < TOPK and bool((a.routing_map.bool().sum(1) == _copies(a)).all()),
        ),
    ),
)

MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP_GRAD = Limits(
    MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP.source,
    (
        dtype("permuted_token_out_grad", *FLOATS),
        dimensions("permuted_token_out_grad", 2),
        dtype("sorted_indices", torch.int32),
        *ROUTING_MAP,
        not_simulated("drop_and_pad", False),
    ),
)

MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP = Limits(
    "wheel, npu_moe_token_unpermute_with_routing_map",
    (
        dtype("permuted_tokens", *FLOATS),
        dimensions("permuted_tokens", 2),
        dtype("sorted_indices", torch.int32),
        dimensions("sorted_indices", 1),
        Limit(
            "restore_shape",
            "[tokens, hidden size]",
            lambda a: len(a.restore_shape) == 2 and a.restore_shape[1] == a.permuted_tokens.size(1),
        ),
        Limit(
            "sorted_indices",
            f"the same number for each token, at most {TOPK}",
            lambda a: (
                len(a.sorted_indices) % max(1, a.restore_shape[0]) == 0
                and len(a.sorted_indices) <= TOPK * a.restore_shape[0]
            ),
        ),
        _probabilities_dtype("permuted_tokens"),
        Limit(
            "routing_map",
            "a value exactly when probs is given",
            lambda a: (a.routing_map is None) == (a.probs is None),
            even_none=True,
        ),
        *ROUTING_MAP,
        Limit("probs", "the shape of routing_map", lambda a: a.probs.shape == a.routing_map.shape),
        not_simulated("drop_and_pad", False),
        Limit(
            "routing_map",
            "as many ones as sorted_indices has elements, with the same number in every row",
            lambda a: (
                int(a.routing_map.bool().sum()) == len(a.sorted_indices)
                and len(set(a.routing_map.bool().sum(1).tolist())) <= 1
            ),
        ),
    ),
)

MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP_GRAD = Limits(
    MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP.source,
    (
        dtype("unpermuted_tokens_grad", *FLOATS),
        dimensions("unpermuted_tokens_grad", 2),
        not_simulated("drop_and_pad", False),
    ),
)

GATED_EXPERTS, GROUPS_OF = 2048, 32  # experts, also once every group is filled up to multiples of 32

MOE_GATING_TOP_K = Limits(
    "wheel, npu_moe_gating_top_k; aclnn, aclnnMoeGatingTopK",
    (
        dtype("x", *FLOATS),
        dimensions("x", 2),
        Limit("x", f"at most {GATED_EXPERTS} experts", lambda a: a.x.size(1) <= GATED_EXPERTS),
        dtype_of("bias", "x"),
        Limit("bias", "[experts]", lambda a: a.bias.shape == a.x.shape[1:]),
        not_simulated("input_ids"),
        not_simulated("tid2eid"),
        one_of("group_select_mode", 0, 1),
        Limit(
            "group_count",
            "a divisor of the number of experts that leaves more than two experts per group",
            lambda a: (
                a.group_count > 0 and a.x.size(1) % a.group_count == 0 and a.x.size(1) // a.group_count > 2
            ),
        ),
        Limit(
            "group_count",
            f"at most {GATED_EXPERTS} experts after every group is padded to a multiple of {GROUPS_OF}",
            lambda a: _filled_up(a.x.size(1) // a.group_count) * a.group_count <= GATED_EXPERTS,
        ),
        Limit("k_group", "1 to group_count", lambda a: 1 <= a.k_group <= a.group_count),
        Limit(
            "k", "1 to the number of experts in k_group groups", lambda a: 1 <= a.k <= _experts_of_groups(a)
        ),
        one_of("renorm", 0),
        one_of("norm_type", 0, 1),
    ),
    "According to the wheel the operation supports inference, and its gradient supports training, through "
    "autograd of sigmoid scores. Weights from softmax scores are not divided by their sum (aclnn; older "
    "editions do not distinguish the two).",
)

MOE_GATING_TOP_K_BACKWARD = Limits(
    "wheel, npu_moe_gating_top_k_backward; aclnn, aclnnMoeGatingTopKBackward",
    (
        dtype("x_norm", torch.float32),
        dimensions("x_norm", 2),
        Limit("x_norm", f"2 to {GATED_EXPERTS} experts", lambda a: 2 <= a.x_norm.size(1) <= GATED_EXPERTS),
        dtype("grad_y", *FLOATS),
        Limit(
            "grad_y",
            "[tokens, k] with k up to the number of experts, not empty",
            lambda a: (
                a.grad_y.dim() == 2
                and a.grad_y.size(0) == a.x_norm.size(0)
                and 1 <= a.grad_y.size(1) <= a.x_norm.size(1)
                and a.grad_y.numel() > 0
            ),
        ),
        dtype("expertIdx", torch.int32),
        shape_of("expertIdx", "grad_y"),
        one_of("norm_type", 1),
    ),
)


def _filled_up(experts: int) -> int:
    return -(-experts // GROUPS_OF) * GROUPS_OF


def _experts_of_groups(a: SimpleNamespace) -> int:
    return a.x.size(1) // a.group_count * a.k_group


LIMITS = {
    "npu_moe_gating_top_k": MOE_GATING_TOP_K,
    "npu_moe_gating_top_k_backward": MOE_GATING_TOP_K_BACKWARD,
    "npu_moe_token_permute": MOE_TOKEN_PERMUTE,
    "npu_moe_token_permute_grad": MOE_TOKEN_PERMUTE_GRAD,
    "npu_moe_token_permute_grad_v2": MOE_TOKEN_PERMUTE_GRAD,
    "npu_moe_token_unpermute": MOE_TOKEN_UNPERMUTE,
    "_npu_moe_token_unpermute": MOE_TOKEN_UNPERMUTE,
    "npu_moe_token_unpermute_grad": MOE_TOKEN_UNPERMUTE_GRAD,
    "npu_moe_token_unpermute_grad_v2": MOE_TOKEN_UNPERMUTE_GRAD,
    "npu_moe_token_permute_with_routing_map": MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP,
    "npu_moe_token_permute_with_routing_map_grad": MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP_GRAD,
    "npu_moe_token_unpermute_with_routing_map": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP,
    "_npu_moe_token_unpermute_with_routing_map": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP,
    "npu_moe_token_unpermute_with_routing_map_grad": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP_GRAD,
}
