"""Support ``--moe-permute-fusion`` without TransformerEngine: sort tokens by expert, and restore their order,
in one call.

Patches ``moe.token_dispatcher``, ``moe.moe_utils`` and ``transformer_config``. Upstream's own flag is
disabled for its dispatcher, which then keeps the token counts on the host, where our other operations need
them. The map of tokens to experts records the number of experts per token if it is the same for all tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import around, transformer_engine_present
from megatron_npu.ops import dispatch
from megatron_npu.ops.experts.token_permutation import permute_tokens, unpermute_tokens

_MOE = "megatron.core.transformer.moe"
_ASKED, _COPIES = "megatron_npu_permute_fusion", "megatron_npu_copies"  # of a configuration, of a map
_fused = partial(
    around,
    condition=transformer_engine_present,
    why=(
        "--moe-permute-fusion requires TransformerEngine's kernels; without fusion, tokens are selected "
        "by a mask twice, waiting for the device each time, and copies are summed where they collide"
    ),
)


@_fused("megatron.core.transformer.transformer_config:TransformerConfig.__post_init__", order=3)
def note_that_it_is_asked_for(original: Callable[[Any], None], self: Any) -> None:
    """Record that fused permutation is requested, and make upstream run its unfused code.

    Raises:
        FallbackForbiddenError: the fusion is not possible here, and strict mode is enabled.
    """
    asked = bool(self.moe_permute_fusion)
    self.moe_permute_fusion = False
    original(self)
    setattr(self, _ASKED, asked)
    if asked and self.num_moe_experts and self.moe_token_dispatcher_type != "alltoall":
        dispatch.report_fallback(
            "moe-permute-fusion",
            f"with the dispatcher {self.moe_token_dispatcher_type}, a token may have any number of experts "
            "here",
            "is ignored",
            "Pass --moe-token-dispatcher-type alltoall",
        )


@_fused(f"{_MOE}.token_dispatcher:MoEAlltoAllTokenDispatcher.preprocess")
def note_the_experts_of_a_token(original: Callable[..., Any], self: Any, routing_map: Tensor) -> Any:
    """Record how many experts each token has, unless tokens are dropped or padded.

    Upstream then does not count them.
    """
    result = original(self, routing_map)
    if getattr(self.config, _ASKED, False) and not self.drop_and_pad:
        if isinstance(self.num_out_tokens, int):
            setattr(routing_map, _COPIES, self.config.moe_router_topk)
        else:
            reason = "tokens may have any number of experts if some are dropped or padded"
            dispatch.report_fallback("moe-permute-fusion", reason, "is ignored")
    return result


@_fused(f"{_MOE}.moe_utils:permute", versions="<0.17")
def permute(
    original: Callable[..., Any],
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Sort the tokens ``[t, h]`` by expert according to the routing map ``[t, e]``.

    Return rows, probabilities and sorted indices.
    """
    copies = getattr(routing_map, _COPIES, None)
    if copies is None:
        return original(tokens, routing_map, probs, *args, **kwargs)
    return permute_tokens(tokens, routing_map.bool(), probs, copies)


@_fused(f"{_MOE}.moe_utils:permute", versions=">=0.17")
def permute_with_counts(
    original: Callable[..., Any],
    tokens: Tensor,
    routing_map: Tensor,
    probs: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Permute tokens like ``permute``, and return the token counts of the experts unchanged.

    No padding is added.
    """
    # since 0.20: upstream's own order, and its inverse
    inverse = args[5] if len(args) > 5 else kwargs.get("return_batch_invariant_inverse_map")
    if inverse:
        return original(tokens, routing_map, probs, *args, **kwargs)
    counts: Tensor | None = args[3] if len(args) > 3 else kwargs.get("tokens_per_expert")
    result = permute(original, tokens, routing_map, probs, *args, **kwargs)
    return (*result, None, counts) if len(result) == 3 else result  # upstream's own are five


@_fused(f"{_MOE}.moe_utils:unpermute")
def unpermute(
    original: Callable[..., Tensor],
    permuted_tokens: Tensor,
    sorted_indices: Tensor,
    restore_shape: torch.Size,
    probs: Tensor | None = None,
    routing_map: Tensor | None = None,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """Restore the tokens ``[t, h]`` from the rows that ``permute`` has sorted by expert.

    Its indices are int32, whereas upstream's are int64.
    """
    if sorted_indices.dtype is not torch.int32:
        return original(permuted_tokens, sorted_indices, restore_shape, probs, routing_map, *args, **kwargs)
    chosen = None if probs is None or routing_map is None else routing_map.bool()
    return unpermute_tokens(permuted_tokens, sorted_indices, restore_shape[0], probs, chosen)
