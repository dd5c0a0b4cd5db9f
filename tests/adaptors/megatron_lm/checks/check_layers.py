"""Loss, embedding, norm, softmax, conversions and random states."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparison import here, leaf, load_stock, same_gradients


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def check_cross_entropy(smoothing, dtype):
    from megatron.core.tensor_parallel import cross_entropy

    stock = load_stock("megatron.core.tensor_parallel.cross_entropy")
    torch.manual_seed(1)
    source, target = leaf(5, 3, 37, dtype=dtype), torch.randint(37, (5, 3), device=here())
    logits = source.transpose(0, 1) * 3  # not contiguous
    found = cross_entropy.vocab_parallel_cross_entropy(logits, target.t(), smoothing)
    assert found.dtype == torch.float32
    plain = (source.transpose(0, 1) * 3).float().contiguous()  # upstream takes views of it
    expected = stock.vocab_parallel_cross_entropy(plain, target.t().contiguous(), smoothing)
    limit = 1e-5 if dtype == torch.float32 else 2e-2
    same_gradients(found, expected, [source], atol=limit, rtol=limit)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("impl", ["native", "linear"])
def check_loss_without_a_copy_of_the_logits(dtype, impl, monkeypatch):
    """The same as with upstream's fp32 copy, when both have our cross-entropy: with logits, and without."""
    from megatron import get_args
    from megatron.model import gpt_model

    monkeypatch.setattr(get_args(), "cross_entropy_fusion_impl", impl)

    stock = load_stock("megatron.model.gpt_model").post_language_model_processing
    torch.manual_seed(1)
    hidden, weight = leaf(6, 2, 8, dtype=dtype), leaf(40, 8, dtype=dtype)
    labels = torch.randint(40, (2, 6), device=here())
    results = []
    for function in (gpt_model.post_language_model_processing, stock):
        weight.main_grad = torch.zeros(40, 8, device=here())
        loss = function(hidden, labels, weight, True, False)
        (grad,) = torch.autograd.grad(loss.square().sum(), [hidden])
        logits = function(hidden, None, weight, True, False)
        results.append((loss, grad, weight.main_grad, logits))
    assert results[0][0].dtype == torch.float32
    limit = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=limit * theirs.abs().max().item(), rtol=0)


@pytest.mark.parametrize("parts", [1, 2])
def check_embedding(parts):
    """One part is upstream's forward; of two parts this rank has the second half of the vocabulary."""
    from megatron.core.tensor_parallel import layers

    stock = load_stock("megatron.core.tensor_parallel.layers")
    table = layers.VocabParallelEmbedding(
        40 // parts, 8, init_method=torch.nn.init.normal_, use_cpu_initialization=True
    ).to(here())
    if parts == 2:
        table.tensor_model_parallel_size = 2
        table.vocab_start_index, table.vocab_end_index = 20, 40
    ids = torch.randint(40, (6, 3), device=here())
    found = table(ids)
    expected = stock.VocabParallelEmbedding.forward(table, ids)
    assert (expected == 0).all(-1).any() == (parts == 2)
    same_gradients(found, expected, [table.weight])


def check_linear_accepts_any_order_of_gradient():
    from megatron.core.tensor_parallel import ColumnParallelLinear

    layer = ColumnParallelLinear(
        8, 12, init_method=torch.nn.init.normal_, use_cpu_initialization=True, bias=False
    ).to(here())
    inputs = leaf(5, 3, 8)
    output, _ = layer(inputs)
    grad = torch.randn(3, 5, 12, device=here()).transpose(0, 1)
    found = torch.autograd.grad(output, [inputs, layer.weight], grad)
    expected = torch.autograd.grad(inputs @ layer.weight.t(), [inputs, layer.weight], grad)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("input", [torch.float32, torch.bfloat16])
def check_layer_norm(input, weight):
    """The output has the dtype of the weight, as with upstream's mixed-precision kernel."""
    from megatron.model import LayerNorm

    norm = LayerNorm(24, eps=1e-5, sequence_parallel=True).to(here(), weight)
    assert norm.weight.sequence_parallel
    assert norm.bias.sequence_parallel
    with torch.no_grad():
        norm.weight.normal_()
        norm.bias.normal_()
    x = leaf(7, 2, 24, dtype=input)
    found = norm(x)
    assert found.dtype == weight
    assert found._base is None
    expected = F.layer_norm(x.double(), (24,), norm.weight.double(), norm.bias.double(), 1e-5)
    limit = 1e-5 if torch.bfloat16 not in (input, weight) else 5e-2
    same_gradients(found.double(), expected, [x, norm.weight, norm.bias], atol=limit * 4, rtol=limit)


@pytest.mark.parametrize("kind", ["causal", "padding"])
def check_softmax(kind):
    from megatron.model import fused_softmax
    from megatron.model.enums import AttnMaskType
    from megatron.model.utils import attention_mask_func

    stock = load_stock("megatron.model.fused_softmax")
    softmaxes = [
        module.FusedScaleMaskSoftmax(False, True, AttnMaskType[kind], fusion, attention_mask_func, True, 2.0)
        for module, fusion in ((fused_softmax, True), (stock, False))
    ]
    scores = leaf(2, 3, 9, 9, dtype=torch.bfloat16)
    mask = torch.ones(1, 1, 9, 9, dtype=torch.bool, device=here()).triu(1) if kind == "causal" else None
    if kind == "padding":
        mask = torch.zeros(2, 1, 9, 9, dtype=torch.bool, device=here())
        mask[1, ..., 5:] = True
    assert softmaxes[0].is_kernel_available(mask, 2, 3, 9, 9)
    assert not softmaxes[0].is_kernel_available(mask, 2, 3, 1, 9) or kind == "padding"
    found, expected = (softmax(scores, mask) for softmax in softmaxes)
    assert found.dtype == torch.bfloat16
    same_gradients(found, expected, [scores], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def check_conversions(half):
    from megatron.model import module

    stock = load_stock("megatron.model.module")
    number, ids = torch.randn(3, device=here()), torch.arange(3, device=here())
    nested = (number, [ids, torch.nn.Parameter(number.clone())], None, "text")
    for implementation in (module, stock):
        converted = implementation.fp32_to_float16(nested, lambda tensor: tensor.to(half))
        assert type(converted) is tuple
        assert type(converted[1]) is list
        assert (converted[0].dtype, converted[1][0].dtype, converted[1][1].dtype) == (half, torch.int64, half)
        assert converted[2:] == (None, "text")
        back = implementation.float16_to_fp32(converted)
        assert (back[0].dtype, back[1][0].dtype) == (torch.float32, torch.int64)
        torch.testing.assert_close(back[0], number.to(half).float())


def check_rng_tracker_forks():
    """Inside fork() another state is in force, and nothing of it is seen outside: silent otherwise."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    tracker = get_cuda_rng_tracker()
    outside, states = torch.cuda.get_rng_state(), tracker.get_states()
    with tracker.fork():
        first = torch.rand(4, device=here())
    assert torch.equal(torch.cuda.get_rng_state(), outside)
    with tracker.fork():
        assert not torch.equal(torch.rand(4, device=here()), first)
    tracker.set_states(states)
    with tracker.fork():
        assert torch.equal(torch.rand(4, device=here()), first)


def check_recomputation_repeats_dropout():
    from megatron.core import tensor_parallel

    x = leaf(50)

    def drop(y):
        with tensor_parallel.get_cuda_rng_tracker().fork():
            return F.dropout(y, 0.5) + F.dropout(y, 0.5)

    states = tensor_parallel.get_cuda_rng_tracker().get_states()
    torch.manual_seed(5)
    (expected,) = torch.autograd.grad(drop(x).sum(), [x])
    tensor_parallel.get_cuda_rng_tracker().set_states(states)
    torch.manual_seed(5)
    y = x.detach().clone().requires_grad_()
    tensor_parallel.checkpoint(drop, False, y).sum().backward()
    torch.testing.assert_close(y.grad, expected)


def check_gather_of_a_leaf():
    """What a pipeline stage receives requires grad; gloo may not write into views of such a tensor."""
    from megatron.core.tensor_parallel import gather_split_1d_tensor

    received = leaf(6)
    gathered = gather_split_1d_tensor(received).view(2, 3).requires_grad_()
    assert gathered.is_leaf
    torch.testing.assert_close(gathered.detach().flatten(), received.detach())


def check_viewless_tensor():
    from megatron.core.utils import make_viewless_tensor

    base = leaf(4, 4)
    view = base.transpose(0, 1)[1:]
    for keep in (True, False):
        found = make_viewless_tensor(view, requires_grad=True, keep_graph=keep)
        assert found._base is None
        assert torch.equal(found, view)
        assert found.data_ptr() == view.data_ptr()
    grad = torch.autograd.grad(make_viewless_tensor(view, True, True).sum(), base)[0]
    assert grad.sum() == 12


@pytest.mark.skipif("here().type == 'cpu'", reason="biases in products and sums with norms are for an NPU")
@pytest.mark.parametrize("recomputed", [None, "full"])
def check_a_layers_sums_and_products(args, monkeypatch, recomputed):
    """The numbers of upstream's order, in fewer launches: the layers' own and the next one's norm."""
    from megatron.model import ModelType, transformer
    from megatron.model.enums import AttnMaskType
    from megatron.model.utils import init_method_normal

    from megatron_npu.adaptors.shared.layers import biased_product, residual_norms
    from megatron_npu.sim import counting

    method = "uniform" if recomputed else None
    args(recompute_granularity=recomputed, recompute_method=method)
    args(model_type=ModelType.encoder_or_decoder, gradient_accumulation_fusion=False)
    torch.manual_seed(3)
    layers = transformer.ParallelTransformer(
        *[init_method_normal(0.02)] * 2, self_attn_mask_type=AttnMaskType.causal
    ).to(here())
    with torch.no_grad():
        for name, parameter in layers.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    width = layers.final_layernorm.weight.numel()
    results = []
    for fused in (True, False):
        if not fused:
            monkeypatch.setattr(residual_norms, "add", lambda *_: None)
            monkeypatch.setattr(biased_product, "_may_add", lambda _: False)
        torch.manual_seed(4)
        x = leaf(32, 2, width)
        with counting() as counts:
            output = layers(x, None)
            (output * torch.randn_like(output)).mean().backward()
        results.append(([output, x.grad, *(p.grad for p in layers.parameters())], counts))
        layers.zero_grad()
    (found, counts), (expected, plain) = results
    for ours, upstreams in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, upstreams, atol=1e-4 * upstreams.abs().max().item(), rtol=0)
    # within a layer, and into the next one's norm or the last where no layer is recomputed as a whole
    sums = len(layers.layers) * (1 if recomputed else 2)
    assert counts.launches["npu::npu_add_layer_norm"].calls == sums * (2 if recomputed else 1)
    assert counts.total_launches < plain.total_launches


@pytest.mark.skipif(here() != "npu", reason="moves what a device holds: a simulated NPU's")
def check_what_layers_save_rests_on_the_host(args):
    """The same numbers to the bit, gradients in main_grad among them, and of the last layer nothing moves."""
    from megatron.model import ModelType, transformer
    from megatron.model.enums import AttnMaskType
    from megatron.model.utils import init_method_normal

    from megatron_npu.options.memory_flags import OFFLOADED
    from megatron_npu.sim import counting

    args(model_type=ModelType.encoder_or_decoder, min_offloaded_tensor_size=1)
    results = []
    for modules in ([], OFFLOADED):
        args(offload_modules=modules)
        torch.manual_seed(3)
        layers = transformer.ParallelTransformer(
            *[init_method_normal(0.02)] * 2, self_attn_mask_type=AttnMaskType.causal
        ).to(here())
        for parameter in layers.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
        torch.manual_seed(4)
        x = leaf(32, 2, layers.final_layernorm.weight.numel())
        with counting() as counts:
            output = layers(x, None)
            output.square().mean().backward()
        grads = [each for p in layers.parameters() for each in (p.main_grad, p.grad) if each is not None]
        results.append([output, x.grad, *grads])
        moved = counts.transfers.bytes
        assert (moved > 0) == bool(modules)
    assert len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    one = x.numel() * x.element_size()
    # inputs of both norms, of the product behind the first and of the projection, q, k, v and the result,
    # there and back, and small change: means, deviations and the attention's statistics
    assert 16 * one * (len(layers.layers) - 1) <= moved < 18 * one * (len(layers.layers) - 1)
