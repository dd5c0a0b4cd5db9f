"""What took the place of TorchScript functions: values and gradients of upstream's formulas in fp64."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from tests.support.comparison import here, leaf, same_gradients

GATED = {"geglu": F.gelu, "liglu": lambda gate: gate, "reglu": F.relu, "swiglu": F.silu}


@pytest.mark.parametrize("name", GATED)
def check_gated_activation(name):
    """The gate is the second half."""
    from megatron.model.glu_activations import GLU_ACTIVATIONS

    torch.manual_seed(1)
    x = leaf(5, 2, 16)
    value, gate = x.double().chunk(2, -1)
    same_gradients(GLU_ACTIVATIONS[name](x).double(), value * GATED[name](gate), [x])


def check_gelu_of_models_without_fusion():
    from megatron.model import utils

    torch.manual_seed(1)
    x = leaf(5, 2, 16)
    same_gradients(utils.openai_gelu(x).double(), F.gelu(x.double(), approximate="tanh"), [x])
    exact = 0.5 * x.double() * (torch.erf(x.double() / math.sqrt(2)) + 1)
    same_gradients(utils.erf_gelu(x).double(), exact, [x])


@pytest.mark.parametrize("offset", [0, 3])
def check_rotary(offset):
    """The function that upstream keeps beside it for bf16 is the same without TorchScript."""
    from megatron.model import positional_embeddings

    torch.manual_seed(1)
    query, key, table = leaf(5, 6, 8), leaf(5, 6, 8), torch.randn(5 + offset, 1, 4, device=here())
    angles = torch.cat([table, table], -1)
    given = query, key, angles.cos(), angles.sin(), offset
    ours = positional_embeddings.apply_rotary_pos_emb(*given)
    stock = positional_embeddings.apply_rotary_pos_emb_torch(*given)
    for found, expected, source in zip(ours, stock, (query, key), strict=True):
        same_gradients(found, expected, [source])


@pytest.mark.parametrize("training", [True, False])
def check_bias_dropout_add(training):
    from megatron.model import transformer

    torch.manual_seed(1)
    x, bias, residual = leaf(5, 2, 8), leaf(8), leaf(5, 2, 8)
    name = "train" if training else "inference"
    function = getattr(transformer, f"bias_dropout_add_fused_{name}")
    found = function(x, bias.expand_as(residual), residual, 0.0 if training else 0.5)
    same_gradients(found.double(), (x.double() + bias) + residual, [x, bias, residual])


def check_layer_norm():
    from megatron.model.fused_layer_norm import MixedFusedLayerNorm

    torch.manual_seed(1)
    norm, x = MixedFusedLayerNorm(24, eps=1e-5).to(here()), leaf(7, 2, 24)
    expected = F.layer_norm(x.double(), (24,), norm.weight.double(), norm.bias.double(), 1e-5)
    same_gradients(norm(x).double(), expected, [x, norm.weight, norm.bias])


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
def check_conversions(half):
    from megatron.model import module

    number, ids = torch.randn(3, device=here()), torch.arange(3, device=here())
    first, (second, third) = module.fp32_to_float16((number, [ids, number]), lambda tensor: tensor.to(half))
    assert (first.dtype, second.dtype, third.dtype) == (half, torch.int64, half)
    assert module.float16_to_fp32((first, ids))[0].dtype == torch.float32


def check_an_overflow_that_only_the_flag_knows(monkeypatch):
    """Ascend chips before 910B saturate: upstream's check alone finds the gradients finite."""
    from megatron.optimizer.grad_scaler import ConstantGradScaler
    from megatron.optimizer.optimizer import Float16OptimizerWithFloat16Params

    from megatron_npu import devices

    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.float16, device=here()))
    optimizer = Float16OptimizerWithFloat16Params(
        torch.optim.SGD([weight], lr=0.1), 0.0, False, False, False, ConstantGradScaler(4.0)
    )
    for flagged in (False, True):
        monkeypatch.setattr(devices.current(), "overflowed", lambda flagged=flagged: flagged, raising=False)
        weight.grad = torch.ones_like(weight)
        optimizer._copy_model_grads_to_main_grads()
        assert optimizer._unscale_main_grads_and_check_for_nan() == (flagged and here().type == "npu")


def check_row_parallel_with_one_bias():
    """--sync-tp-duplicated-parameters: upstream's ends in an error, with one rank, too."""
    from megatron.mpu.layers import RowParallelLinear

    torch.manual_seed(1)
    layer, x = RowParallelLinear(8, 6, input_is_parallel=True).to(here()), leaf(5, 2, 8)
    layer.bias_tp_auto_sync = True
    with torch.no_grad():
        layer.bias.fill_(0.5)
    found, _ = layer(x)
    assert layer.bias_tp_auto_sync
    expected = F.linear(x.double(), layer.weight.double(), layer.bias.double())
    same_gradients(found.double(), expected, [x, layer.weight, layer.bias])
