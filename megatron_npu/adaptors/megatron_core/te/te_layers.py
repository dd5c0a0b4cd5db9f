"""Implement layers for ``MEGATRON_NPU_TE=local``: attention, and Mamba layers with packed sequences.

Patches ``extensions.transformer_engine`` and ``ssm.mamba_mixer``. All other classes of the former are
upstream's own, which are built on the modules of ``standins.transformer_engine``.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from megatron_npu import standins
from megatron_npu.adaptors.megatron_core.decorators import replace, te_layers_not_ours, wrap
from megatron_npu.patching.patch import NotAsked


@wrap(
    "megatron.core.extensions.transformer_engine:TEDotProductAttention",
    condition=te_layers_not_ours,
    why=(
        "the class is built from TransformerEngine's kernels; megatron-core's own attention, which runs "
        "our operation, supports the same features: masks, windows, packed sequences, context parallelism"
    ),
)
def attention_of_megatron_core(original: type) -> type:
    """Return megatron-core's attention class, with the constructor arguments of ``TEDotProductAttention``.

    The class has no extra state. TransformerEngine's extra state in a checkpoint (fp8 scales) is not used.
    """
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class TEDotProductAttention(DotProductAttention):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            given = inspect.signature(original.__init__).bind(self, *args, **kwargs).arguments  # type: ignore[misc]
            ours = ("self", "num_splits")  # the latter for flash-attn's kernel
            named = {name: value for name, value in given.items() if name not in ours}
            super().__init__(**{"cp_comm_type": "p2p", **named})
            self.window_size = _window(self)
            self._register_load_state_dict_pre_hook(_without_extra_state)

        def forward(
            self,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | tuple[Tensor, Tensor] | None,
            attn_mask_type: Any = None,
            attention_bias: Tensor | None = None,
            packed_seq_params: Any = None,
            num_splits: int | None = None,
        ) -> Tensor:
            mask = _of_pairs(attention_mask) if isinstance(attention_mask, tuple) else attention_mask
            options = (attn_mask_type, attention_bias, packed_seq_params)
            return super().forward(query, key, value, mask, *options)

    TEDotProductAttention.__doc__ = original.__doc__
    return TEDotProductAttention


@replace(
    "megatron.core.extensions.transformer_engine:TEFusedResidualRMSNorm.forward",
    versions=">=0.17",
    condition=te_layers_not_ours,
    why=(
        "the class is a chain of TransformerEngine's fused operations; our norm already fuses the "
        "preceding addition"
    ),
)
def normed_and_residual(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norm of ``[s, b, h]``, and also the unchanged input for --fused-residual-rmsnorm."""
    from megatron_npu.standins.transformer_engine.norms import RMSNorm

    return RMSNorm.forward(self, hidden_states), hidden_states


def scan_not_ours() -> str | None:
    """Return the reason why our scan does not replace that of mamba_ssm, or None if it does."""
    return (
        None
        if standins.mamba_kernels()
        else NotAsked("MEGATRON_NPU_TE is not local, or mamba_ssm is installed")
    )


@replace(
    "megatron.core.ssm.mamba_mixer:_check_mamba_sequence_packing_support",
    versions=">=0.16",
    condition=scan_not_ours,
    why=(
        "upstream queries the version of causal-conv1d, a CUDA package, without which packed sequences "
        "raise a ModuleNotFoundError; our scan processes them one by one"
    ),
)
def packs_are_taken(for_inference_not_training: bool = True) -> tuple[bool, str | None]:
    """Return whether a Mamba layer supports packed sequences, and the reason if it does not.

    The layer does not accept packed sequences in generation, which uses caches.
    """
    return not for_inference_not_training, "packed sequences are supported in training, not in generation"


def _window(attention: Any) -> tuple[int, int]:
    """Return the attention window in the form that TransformerEngine uses.

    -1 means no limit, and a causal window ends with 0.
    """
    before, after = attention.layer_options.window
    open_end = 0 if "causal" in attention.attn_mask_type.name else -1
    return -1 if before is None else before, open_end if after is None else after


def _of_pairs(masks: tuple[Tensor, Tensor]) -> Tensor:
    """Combine a mask of queries ``[b, 1, 1, q]`` and one of keys ``[b, 1, 1, s]`` into a padding mask ``[b,
    1, q, s]``.

    T5's cross-attention receives both masks separately; True means masked.
    """
    queries, keys = masks
    return torch.logical_or(queries.transpose(-1, -2), keys)


def _without_extra_state(state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    state_dict.pop(f"{prefix}_extra_state", None)
