"""Fused attention against the formula in fp64, and cached keys against none."""

from __future__ import annotations

import pytest
import torch

from tests.support.comparison import here, leaf, same_gradients

LENGTH, BATCH, HIDDEN, HEADS = 12, 2, 64, 4


def build(kind, args, cross=False, **values):
    """Return an attention layer of one process in evaluation mode."""
    from megatron.enums import AttnMaskType, AttnType, PositionEmbeddingType
    from megatron.model.transformer import ParallelAttention

    if "position_embedding_type" in values:
        values["position_embedding_type"] = PositionEmbeddingType[values["position_embedding_type"]]
    args(**values)

    def draw(weight):
        return torch.nn.init.normal_(weight, std=0.1)

    torch.manual_seed(1)
    attention_type = AttnType.cross_attn if cross else AttnType.self_attn
    layer = ParallelAttention(draw, draw, 2, attention_type, AttnMaskType[kind])
    return layer.to(here()).eval()


def formula(layer, hidden, encoded, forbidden, turn=lambda x: x):
    """Return what the layer is to compute, fp64."""
    size = HIDDEN // HEADS
    weight = {name: parameter.double() for name, parameter in layer.named_parameters()}
    names = ["query_key_value"] if encoded is None else ["query", "key_value"]
    inputs = [hidden] if encoded is None else [hidden, encoded]
    parts = []
    for name, given in zip(names, inputs, strict=True):
        mixed = given.double() @ weight[f"{name}.weight"].t() + weight[f"{name}.bias"]
        mixed = mixed.unflatten(-1, (HEADS, -1))
        parts += mixed.split(size, -1)
    query, key, value = (part.permute(1, 2, 0, 3) for part in parts)
    query, key = turn(query), turn(key)
    scores = query @ key.transpose(-1, -2) / size**0.5
    context = scores.masked_fill(forbidden, float("-inf")).softmax(-1) @ value
    return context.permute(2, 0, 1, 3).flatten(2) @ weight["dense.weight"].t()


def rotated(x):
    """Return ``[b, n, s, d]`` turned by its positions, pairs half a head apart (Su et al. 2021)."""
    size = x.size(-1)
    frequency = 10000.0 ** (-torch.arange(0, size, 2, device=x.device) / size)
    angle = (torch.arange(x.size(-2), device=x.device)[:, None] * frequency).double()
    first, second = x.chunk(2, -1)
    turned = first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()
    return torch.cat(turned, -1)


@pytest.mark.parametrize("position", ["absolute", "rotary"])
@pytest.mark.parametrize("window", [None, 3])
def check_causal(position, window, args):
    layer = build("causal", args, position_embedding_type=position, pre_tokens=window)
    hidden = leaf(LENGTH, BATCH, HIDDEN)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=here()).triu(1)
    forbidden = future if window is None else future | future.new_ones(future.shape).tril(-window - 1)
    found, _ = layer(hidden, future[None, None])
    turn = rotated if position == "rotary" else lambda x: x
    same_gradients(found.double(), formula(layer, hidden, None, forbidden, turn), [hidden], 1e-4, 1e-4)


@pytest.mark.parametrize("kind", ["padding", "causal"])
def check_masks_that_hold_more(kind, args):
    """Padding; documents in one sample, with --reset-attention-mask."""
    layer = build(kind, args, reset_attention_mask=True)
    hidden = leaf(LENGTH, BATCH, HIDDEN)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool, device=here())
    mask[1, ..., 7:, :7] = True
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=here()).triu(1)
    forbidden = mask | future if kind == "causal" else mask
    found, _ = layer(hidden, mask)
    same_gradients(found.double(), formula(layer, hidden, None, forbidden), [hidden], 1e-4, 1e-4)


def check_cross_attention(args):
    layer = build("padding", args, cross=True)
    hidden, encoded = leaf(LENGTH, BATCH, HIDDEN), leaf(LENGTH + 3, BATCH, HIDDEN)
    mask = torch.zeros(BATCH, 1, LENGTH, LENGTH + 3, dtype=torch.bool, device=here())
    mask[1, ..., 9:] = True
    found, _ = layer(hidden, mask, encoder_output=encoded)
    same_gradients(found.double(), formula(layer, hidden, encoded, mask), [hidden, encoded], 1e-4, 1e-4)


@pytest.mark.parametrize("position", ["absolute", "rotary", "alibi"])
def check_cached_keys(position, args):
    """Text that is written with a cache is the text without."""
    from megatron.model.transformer import ParallelTransformerLayer

    layer = build("causal", args, position_embedding_type=position)
    alibi = None
    if position == "alibi":
        alibi = ParallelTransformerLayer._build_alibi_tensor(LENGTH, HEADS, BATCH).to(here())
    hidden = torch.randn(LENGTH, BATCH, HIDDEN, device=here())
    mask = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool, device=here()).triu(1)
    whole, _ = layer(hidden, mask, alibi=alibi)
    (begin, past), _ = layer(hidden[:7], mask, get_key_value=True, alibi=alibi)
    found = [begin]
    for row in range(7, LENGTH):
        (output, past), _ = layer(hidden[row : row + 1], mask, past, get_key_value=True, alibi=alibi)
        found.append(output)
    torch.testing.assert_close(torch.cat(found), whole, atol=1e-4, rtol=1e-4)


def check_a_window_with_alibi_is_refused(args):
    from megatron_npu.base.errors import UsageError

    layer = build("causal", args, pre_tokens=3)
    with pytest.raises(UsageError, match="alibi"):
        layer(torch.randn(4, 1, HIDDEN, device=here()), None, alibi=torch.zeros(4, 1, 4, device=here()))
