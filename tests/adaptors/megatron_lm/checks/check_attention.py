"""Attention and MLP of ``megatron.model.transformer``."""

from __future__ import annotations

import sys

import pytest
import torch

from megatron_npu.options.attention_flags import AttentionFlags
from tests.support.comparison import here, leaf, load_stock, same_gradients


@pytest.fixture(scope="module")
def modules():
    """The patched module, and a stock copy."""
    from megatron.model import transformer

    return transformer, load_stock("megatron.model.transformer")


def core_attention(modules, kind="causal", layer_number=3):
    """Return our CoreAttention, with the flags as they are, and a stock one."""
    from megatron import get_args
    from megatron.model.enums import AttnMaskType

    ours, stock = (module.CoreAttention(layer_number, AttnMaskType[kind]).train() for module in modules)
    ours.attention_flags = AttentionFlags.from_args(get_args())
    return ours, stock


def qkv(queries=13, keys=13, batch=2, heads=4, size=16):
    """Return leaves ``[s, b, n, d]``."""
    torch.manual_seed(3)
    return [leaf(length, batch, heads, size) for length in (queries, keys, keys)]


def future(queries, keys):
    """Return ``[1, 1, sq, sk]``, True where a key comes after the query; queries stand at the end."""
    return torch.ones(1, 1, queries, keys, dtype=torch.bool, device=here()).triu(1 + keys - queries)


@pytest.fixture(params=["SBH", "BSH"], autouse=True)
def shape_order(request, args):
    args(shape_order=request.param)


@pytest.mark.parametrize("scaling", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (1, 1), (1, 9), (4, 9), (64, 64)])
def check_causal(modules, args, queries, keys, scaling):
    args(apply_query_key_layer_scaling=scaling)
    ours, stock = core_attention(modules)
    leaves, mask = qkv(queries, keys), future(queries, keys)
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)
    assert ours(*leaves, mask).is_contiguous()


def check_padding(modules):
    """BERT's mask, and cross-attention, whose keys are as many as they like."""
    ours, stock = core_attention(modules, "padding")
    leaves = qkv(6, 11)
    mask = torch.zeros(2, 1, 6, 11, dtype=torch.bool, device=here())
    mask[1, ..., 8:] = True
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def check_reset_attention_mask(modules, args):
    """Two documents in a sample do not see each other, which upstream's own causal kernel forgets."""
    args(reset_attention_mask=True)
    ours, stock = core_attention(modules)
    leaves, mask = qkv(), future(13, 13)
    mask[..., 7:, :7] = True
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def check_decoder_of_t5(modules, args):
    from megatron.model.enums import ModelType

    args(model_type=ModelType.encoder_and_decoder)
    ours, stock = core_attention(modules)
    leaves, mask = qkv(), future(13, 13).repeat(2, 1, 1, 1)
    mask[1, ..., 3] = True  # a padded key
    mask[1, ..., 3, 3] = False
    same_gradients(ours(*leaves, mask), stock(*leaves, mask), leaves)


def check_window(modules, args):
    """The flags restrict what a query sees, in cross-attention nothing."""
    from megatron.model.enums import AttnMaskType, AttnType

    args(pre_tokens=4, next_tokens=0)
    ours, stock = core_attention(modules)
    leaves, mask = qkv(), future(13, 13)
    same_gradients(ours(*leaves, mask), stock(*leaves, outside(mask, 4)), leaves)
    crossing = {"attention_type": AttnType.cross_attn, "mask": AttnMaskType.padding}
    cross, stock = (layer.core_attention for layer in attention_layers(modules, **crossing))
    nothing = torch.zeros(1, 1, 13, 13, dtype=torch.bool, device=here())
    same_gradients(cross(*leaves, nothing), stock(*leaves, nothing), leaves)


def outside(mask, before):
    """Return a causal mask that hides what is more than ``before`` keys before the query, too."""
    return mask | ~torch.ones_like(mask).triu(-before)


def check_two_windows_in_one_process(modules, args, monkeypatch):
    """Flags that are parsed later change nothing for a layer that was built before."""
    from megatron.arguments import parse_args

    def built(*flags):
        monkeypatch.setattr(sys, "argv", [*sys.argv[:1], *flags])
        parsed = parse_args(ignore_unknown_args=True)
        args(**{name: getattr(parsed, name) for name in ("pre_tokens", "next_tokens")})
        flash = modules[0].FlashSelfAttention(causal=True)
        return attention_layers(modules[:1] * 2)[0].core_attention, flash

    short, all_of_it = built("--pre-tockens=4", "--next-tockens=0"), built()
    _, stock = core_attention(modules, layer_number=1)
    leaves, mask = qkv(), future(13, 13)
    for (core, flash), expected in [(all_of_it, mask), (short, outside(mask, 4))]:
        same_gradients(core(*leaves, mask), stock(*leaves, expected), leaves)
        found = flash(*(leaf.transpose(0, 1) for leaf in leaves)).transpose(0, 1).flatten(2)
        same_gradients(found, stock(*leaves, expected), leaves)


def check_dropout_draws_from_the_tracker(modules, args):
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    args(attention_dropout=0.5)
    ours, _ = core_attention(modules)
    leaves, tracker = qkv(), get_cuda_rng_tracker()
    states, default = tracker.get_states(), torch.cuda.get_rng_state()
    first = ours(*leaves, None)
    assert torch.equal(torch.cuda.get_rng_state(), default), "the default generator must not move"
    assert not torch.equal(ours(*leaves, None), first), "the tracker's generator must move"
    tracker.set_states(states)
    assert torch.equal(ours(*leaves, None), first)
    assert torch.equal(ours.eval()(*leaves, None), ours.eval()(*leaves, None))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_flash_self_attention(modules, dtype):
    """``[b, s, n, d]``, without the packages flash-attn and einops; cached keys too."""
    _, stock = core_attention(modules, layer_number=1)
    flash = modules[0].FlashSelfAttention(causal=True)
    for queries, keys in [(13, 13), (2, 9)]:
        leaves, mask = qkv(queries, keys), future(queries, keys)
        found = flash(*(leaf.transpose(0, 1).to(dtype) for leaf in leaves))
        assert found.dtype == dtype
        expected = stock(*leaves, mask)
        limit = 1e-5 if dtype == torch.float32 else 4e-2
        found = found.transpose(0, 1).flatten(2).float()
        same_gradients(found, expected, leaves, atol=limit, rtol=limit)


def attention_layers(modules, **kwargs):
    """Return our ParallelAttention and a stock one with the same weights."""
    from megatron.model.enums import AttnMaskType

    def normal(weight):
        torch.nn.init.normal_(weight, std=0.1)

    kind = kwargs.pop("mask", AttnMaskType.causal)
    layers = [
        m.ParallelAttention(normal, normal, 1, attn_mask_type=kind, **kwargs).to(here()) for m in modules
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers


def gradients(layer, inputs, *arguments):
    """Return output, bias and gradients; the fused weight gradient needs a buffer."""
    for parameter in layer.parameters():
        parameter.main_grad = torch.zeros_like(parameter)
    output, bias = layer(inputs, *arguments)
    (grad,) = torch.autograd.grad((output * torch.arange(output.size(-1), device=here())).sum(), [inputs])
    return output, bias, grad, layer.dense.weight.main_grad


def check_flash_flag_needs_no_package(modules, args):
    """--use-flash-attn builds without flash-attn and einops, and means what the layer means without it."""
    args(use_flash_attn=True, recompute_granularity="selective")
    assert modules[1].flash_attn_unpadded_func is None or True
    (ours,) = attention_layers(modules[:1] * 2)[:1]
    assert not ours.checkpoint_core_attention
    args(use_flash_attn=False, recompute_granularity=None)
    assert modules[0].get_args().use_flash_attn is False
    stock = attention_layers(modules)[1]
    stock.load_state_dict(ours.state_dict())
    inputs = leaf(13, 2, 64)
    for left, right in zip(
        gradients(ours, inputs, future(13, 13)), gradients(stock, inputs, future(13, 13)), strict=True
    ):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


def check_key_value_cache(modules, args):
    """Word by word with cached keys gives what the whole text gives at once."""
    from megatron.text_generation.forward_step import InferenceParams

    args(use_flash_attn=True)
    layer = attention_layers(modules[:1] * 2)[0].eval()
    with torch.no_grad():
        inputs = torch.randn(7, 2, 64, device=here())
        whole, _ = layer(inputs, future(7, 7))
        cache = InferenceParams(2, 7)
        for first, last in [(0, 4), (4, 5), (5, 7)]:
            cache.sequence_len_offset = first
            mask = future(7, 7)[..., first:last, :last]
            part, _ = layer(inputs[first:last], mask, inference_params=cache)
            torch.testing.assert_close(part, whole[first:last], atol=1e-5, rtol=1e-5)


def check_cross_attention(modules, args):
    from megatron.model.enums import AttnMaskType, AttnType

    args(pre_tokens=1, next_tokens=1)
    ours, stock = attention_layers(modules, attention_type=AttnType.cross_attn, mask=AttnMaskType.padding)
    assert ours.core_attention.attention_flags.window == (None, None)
    inputs, encoded = leaf(5, 2, 64), torch.randn(9, 2, 64, device=here())
    mask = torch.zeros(2, 1, 5, 9, dtype=torch.bool, device=here())
    mask[0, ..., 6:] = True
    for left, right in zip(
        gradients(ours, inputs, mask, encoded), gradients(stock, inputs, mask, encoded), strict=True
    ):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("flag", ["bias_gelu_fusion", None, "openai_gelu", "onnx_safe"])
def check_mlp(modules, args, flag):
    """ParallelMLP is upstream's own; its fused activation is an operation, the others stay what they are."""
    args(**{name: name == flag for name in ("bias_gelu_fusion", "openai_gelu", "onnx_safe")})

    def normal(weight):
        torch.nn.init.normal_(weight, std=0.1)

    stock_gelu = load_stock("megatron.model.fused_bias_gelu")
    ours, stock = (module.ParallelMLP(normal, normal).to(here()) for module in modules)
    stock.load_state_dict(ours.state_dict())
    modules[1].bias_gelu_impl = stock_gelu.bias_gelu_impl
    inputs = leaf(13, 2, 64)
    results = []
    for layer in (ours, stock):
        for parameter in layer.parameters():
            parameter.main_grad = torch.zeros_like(parameter)
        torch.nn.init.normal_(layer.dense_h_to_4h.bias, generator=torch.Generator(here()).manual_seed(1))
        output, bias = layer(inputs)
        grads = torch.autograd.grad(output.square().sum(), [inputs, layer.dense_h_to_4h.bias])
        results.append((output, bias, *grads, layer.dense_h_to_4h.weight.main_grad))
    for left, right in zip(*results, strict=True):
        torch.testing.assert_close(left, right, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("expanded", [True, False])
def check_bias_dropout_add(modules, expanded):
    ours, stock = modules
    torch.manual_seed(7)
    x, residual, wide = (leaf(50, 2, 8) for _ in range(3))
    bias = leaf(8) if expanded else wide
    leaves = [x, bias, residual]

    def both(name, prob, training):
        spread = bias.expand_as(residual) if expanded else bias
        found = getattr(ours, name)(x.clone(), spread, residual, prob)
        return found, stock.bias_dropout_add(x, spread, residual, prob, training)

    same_gradients(*both("bias_dropout_add_fused_train", 0.0, False), leaves)
    same_gradients(*both("bias_dropout_add_fused_inference", 0.3, False), leaves)
    found, _ = both("bias_dropout_add_fused_train", 0.3, True)
    kept = (found - residual) != 0
    assert 0.6 < kept.float().mean() < 0.8
    spread = bias.expand_as(residual)
    same_gradients(found, residual + kept * (x + spread) / 0.7, leaves, atol=1e-4, rtol=1e-4)
    state = torch.cuda.get_rng_state()
    both("bias_dropout_add_fused_train", 0.0, False)
    assert torch.equal(torch.cuda.get_rng_state(), state)
