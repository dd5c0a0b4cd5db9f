"""Modules of core attention, ours and stock, and what they are called with."""

from __future__ import annotations

import torch

from megatron_npu.options.attention_flags import AttentionFlags
from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here, load_stock


def attention_pair(layer=1, **changes):
    """Return our attention module and a stock one, with the same configuration."""
    from megatron.core.transformer import dot_product_attention as patched
    from megatron.core.transformer.enums import AttnMaskType

    stock = load_stock("megatron.core.transformer.dot_product_attention")
    kind = getattr(AttnMaskType, changes.pop("mask_type", "causal"))
    arguments = {"softmax_scale": changes.pop("softmax_scale", None)}
    of_what = changes.pop("attention_type", "self")
    flags = changes.pop("flags", AttentionFlags())
    config = make_config(attention_softmax_in_fp32=True, **changes)
    config.attention_flags = flags
    return tuple(
        module.DotProductAttention(config, layer, kind, of_what, **arguments).train()
        for module in (patched, stock)
    )


def leaves_of(*shapes, dtype=torch.float32):
    torch.manual_seed(3)
    return [torch.randn(shape, dtype=dtype, device=here(), requires_grad=True) for shape in shapes]


def qkv(queries=12, keys=12, heads=4, groups=4, dtype=torch.float32):
    return leaves_of((queries, 2, heads, 8), *[(keys, 2, groups, 8)] * 2, dtype=dtype)


def positional_attention(*arguments, **named):
    """Return a DotProductAttention made with arguments in upstream's order behind the configuration."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    return DotProductAttention(make_config(), 1, AttnMaskType.causal, "self", *arguments, **named)


def document_mask(*rows):
    """Return ``[b, 1, s, s]``: causal within the documents of each row, as Megatron's datasets build it."""
    masks = []
    for lengths in rows:
        document = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        seen = (document[:, None] == document) & torch.ones(sum(lengths), sum(lengths)).tril().bool()
        masks.append(~seen)
    return torch.stack(masks)[:, None].to(here())


def packed_params(*lengths, padded=None, key_lengths=None):
    from megatron.core.packed_seq_params import PackedSeqParams

    def ends(values):
        return torch.tensor([0, *values], device=here()).cumsum(0).int()

    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends(lengths),
        cu_seqlens_kv=ends(key_lengths or lengths),
        cu_seqlens_q_padded=None if padded is None else ends(padded),
        cu_seqlens_kv_padded=None if padded is None else ends(padded),
    )
