"""Layers of an NPU: biases in their products, sums with their norms; the numbers of upstream's order."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.adaptors.shared.layers import biased_product, residual_norms
from megatron_npu.ops import residual_norm
from tests.adaptors.megatron_core.conftest import make_config
from tests.support.comparison import here

pytestmark = [
    pytest.mark.usefixtures("single_process"),
    pytest.mark.skipif(
        "os.environ.get('MEGATRON_NPU_SIM') != '1'", reason="these patches are for an NPU alone"
    ),
]
SIZES = {"s": 32, "b": 2, "h": 32}
RECOMPUTED = {
    "nothing": {},
    "everything": {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "norms": {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]},
}


def _block(norm, experts=None, **options):
    """Return Megatron's DDP around a block of two layers and their final norm, the same each time."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock

    config = make_config(
        normalization=norm, hidden_dropout=0.1, bias_dropout_fusion=True,
        bias_activation_fusion=not experts, num_moe_experts=experts, **options,
    )  # fmt: skip
    torch.manual_seed(5)
    spec = get_gpt_layer_local_spec(experts, normalization=norm)
    block = TransformerBlock(config, spec).to(here())
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(config, ddp, block)


def _step(model, seed=6):
    """Return output, the input's gradient and the parameters' gradients, and the operations that ran."""
    from megatron_npu.sim import counting

    torch.manual_seed(seed)
    x = torch.randn(*SIZES.values()).to(here()).requires_grad_()
    model.zero_grad_buffer()
    with counting() as counts:
        output = model(hidden_states=x, attention_mask=None)
        (output * torch.randn_like(output)).mean().backward()
    model.finish_grad_sync()
    return [output, x.grad, *(p.main_grad.clone() for p in model.parameters())], counts


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("recomputed", RECOMPUTED)
def test_numbers_and_launches(norm, recomputed, monkeypatch):
    model = _block(norm, **RECOMPUTED[recomputed])
    found, counts = _step(model)
    monkeypatch.setattr(residual_norms, "add", lambda *_: None)
    monkeypatch.setattr(biased_product, "_may_add", lambda _: False)
    expected, plain = _step(model)
    for ours, upstreams in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, upstreams, atol=1e-4 * upstreams.abs().max().item(), rtol=0)
    kernel = "npu::npu_add_layer_norm" if norm == "LayerNorm" else "npu::npu_add_rms_norm"
    sums = {"nothing": 4, "everything": 4, "norms": 0}[recomputed]  # twice one in each layer, and no last one
    assert getattr(counts.launches.get(kernel), "calls", 0) == sums
    products = 4 * 2 * (2 if recomputed == "everything" else 1)
    assert counts.launches["aten::addmm.out"].calls == products
    assert counts.total_launches < plain.total_launches


@pytest.mark.parametrize("norm", ["LayerNorm", "RMSNorm"])
def test_a_layer_that_predicts_a_further_token_does_it_too(norm, monkeypatch):
    """Its two sums have the norms that read them, in it and at its end; its products add their biases."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.models.gpt.gpt_model import GPTModel

    from megatron_npu.sim import counting

    config = make_config(
        num_layers=1, mtp_num_layers=1, normalization=norm, hidden_dropout=0.1, bias_dropout_fusion=True
    )
    spec = gpt_layer_specs.get_gpt_layer_local_spec(normalization=norm)
    predictions = gpt_layer_specs.get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    torch.manual_seed(5)
    model = GPTModel(config, spec, 64, 32, position_embedding_type="rope", mtp_block_spec=predictions)
    model.to(here())
    tokens = torch.randint(0, 64, (2, 33)).to(here())
    positions = torch.arange(32).to(here())[None]

    def step():
        torch.manual_seed(6)
        model.zero_grad()
        with counting() as counts:
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean()
            loss.backward()
        return [loss, *(p.grad for p in model.parameters())], counts

    step()  # makes attention's mask
    found, counts = step()
    kernel = "npu::npu_add_layer_norm" if norm == "LayerNorm" else "npu::npu_add_rms_norm"
    assert counts.launches[kernel].calls == 2 + 2  # the decoder's layer, and the prediction's
    assert counts.launches["aten::addmm.out"].calls >= 4 + 4
    monkeypatch.setattr(residual_norms, "add", lambda *_: None)
    monkeypatch.setattr(biased_product, "_may_add", lambda _: False)
    expected, plain = step()
    for ours, upstreams in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, upstreams, atol=1e-4 * upstreams.abs().max().item(), rtol=0)
    # of each of the two layers three biases and two sums, and with them one of gradients
    assert plain.total_launches - counts.total_launches == 2 * (6 if norm == "LayerNorm" else 5)


def test_a_sum_that_nobody_reads_in_time_is_normalised_again():
    """A norm takes a result only for the very tensor that it was computed with, and once."""
    model = _block("LayerNorm")
    block = model.module
    norm = block.layers[1].input_layernorm
    x, residual = (torch.randn(*SIZES.values()).to(here()) for _ in range(2))
    total = residual_norms.add(x, None, residual, 0.0, norm)
    first, again, copied = norm(total), norm(total), norm(total.clone())
    assert first is not again
    for other in (again, copied):
        torch.testing.assert_close(first, other, atol=1e-5, rtol=1e-5)
    total = residual_norms.add(x, None, residual, 0.0, norm)
    assert residual_norm.result_of(block.final_layernorm, total) is None


def test_weights_that_are_not_trained_leave_the_bias_to_the_caller():
    model = _block("LayerNorm").module
    layer = model.layers[0].mlp.linear_fc2
    x = torch.randn(4, 2, layer.input_size).to(here())
    with torch.no_grad():
        layer.bias.normal_()
    output, bias = layer(x)
    assert bias is None
    layer.weight.requires_grad_(False)
    plain, left = layer(x)
    assert left is layer.bias
    torch.testing.assert_close(output, plain + left, atol=1e-5, rtol=1e-5)


def test_an_expert_leaves_the_bias_that_its_caller_scales_by_a_probability():
    model = _block("LayerNorm", experts=2, moe_token_dispatcher_type="alltoall").module
    expert = model.layers[0].mlp.experts.local_experts[0]
    x = torch.randn(4, expert.linear_fc1.input_size).to(here())
    hidden, taken = expert.linear_fc1(x)
    assert taken is None
    _, left = expert.linear_fc2(hidden)
    assert left is expert.linear_fc2.bias


def test_an_mlp_that_stands_alone_hands_its_bias_to_the_caller():
    """Upstream promises it to whoever calls one: only the layers of a block add theirs."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.mlp import MLP

    submodules = get_gpt_layer_local_spec().submodules.mlp.submodules
    mlp = MLP(make_config(), submodules).to(here())
    in_block = _block("LayerNorm").module.layers[0].mlp
    in_block.load_state_dict(mlp.state_dict())
    with torch.no_grad():
        for one in (mlp, in_block):
            one.linear_fc2.bias.fill_(0.5)
    x = torch.randn(4, 2, mlp.linear_fc1.input_size).to(here())
    output, bias = mlp(x)
    assert bias is mlp.linear_fc2.bias
    added, none = in_block(x)
    assert none is None
    torch.testing.assert_close(added, output + bias, atol=1e-5, rtol=1e-5)
