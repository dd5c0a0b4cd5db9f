"""Layers of ours under TransformerEngine's names: what they compute is what the local layers compute."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_npu import standins
from megatron_npu.base.errors import UsageError
from megatron_npu.standins import transformer_engine_torch
from megatron_npu.standins.transformer_engine import pytorch, recipe
from tests.support import on_version

VERSIONS = ["0.12.1", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2"]
SIMULATED = VERSIONS if os.environ.get("TEST_EVERY_VERSION") == "1" else ["0.12.1", "0.19.2"]
SHARED = "0.16.1"  # tried with two tensor-parallel processes as well


@pytest.mark.parametrize("version", VERSIONS)
def test_losses_gradients_and_checkpoints_are_those_of_local_layers(version: str, tmp_path: Path) -> None:
    """Of a plain GPT, one of Llama's kind, and experts; bit for bit, but where ranks share a layer."""
    for processes in (1, 2) if version == SHARED else (1,):
        on_version.run(
            "te_layers_worker", version, str(tmp_path), processes=processes, MEGATRON_NPU_TE="local"
        )


@pytest.mark.parametrize("version", SIMULATED)
def test_an_npu_launches_no_more_than_for_local_layers(version: str, tmp_path: Path) -> None:
    """With the same numbers: sums with the norms that read them, biases in products, but for experts."""
    on_version.run("te_layers_worker", version, str(tmp_path), processes=1, npu=True, MEGATRON_NPU_TE="local")


def test_nothing_stands_under_the_name_unless_it_is_asked_for() -> None:
    assert "transformer_engine" not in sys.modules
    assert not standins.te_layers()


def linear(kind: type = pytorch.Linear, **options):
    torch.manual_seed(2)
    return kind(**({"in_features": 6, "out_features": 4, "device": "cpu"} | options))


def test_parameters_and_attributes_are_those_of_transformer_engine() -> None:
    layer = linear(pytorch.LayerNormLinear, zero_centered_gamma=True)
    names = ["layer_norm_weight", "layer_norm_bias", "weight", "bias"]
    assert [name for name, _ in layer.named_parameters()] == names
    assert not layer.layer_norm_weight.any(), "its weight is 1 less"
    column = linear(parallel_mode="column", tp_size=2, sequence_parallel=True, bias=False)
    assert (column.in_features, column.out_features, column.weight.partition_dim) == (6, 2, 0)
    assert column.bias.numel() == 0
    row = linear(parallel_mode="row", tp_size=2, sequence_parallel=True)
    assert (row.in_features, row.out_features, row.weight.partition_dim) == (3, 4, 1)
    assert row.bias.sequence_parallel
    group = SimpleNamespace(size=lambda: 3)  # the size of a group that is given counts
    assert linear(parallel_mode="row", tp_size=1, tp_group=group).in_features == 2
    grouped = linear(pytorch.GroupedLinear, num_gemms=2)
    names = ["weight0", "bias0", "weight1", "bias1"]
    assert [name for name, _ in grouped.named_parameters()] == names


def test_a_grouped_layer_is_its_layers_one_after_the_other() -> None:
    grouped = linear(pytorch.GroupedLinear, num_gemms=3, params_dtype=torch.float64)
    torch.nn.init.normal_(grouped.bias1)
    rows = torch.randn(7, 6, dtype=torch.float64)
    counts = [3, 4, 0]
    expected = torch.cat(
        [
            part @ getattr(grouped, f"weight{number}").t() + getattr(grouped, f"bias{number}")
            for number, part in enumerate(rows.split(counts))
        ]
    )
    torch.testing.assert_close(grouped(rows, counts), expected)
    kept = linear(pytorch.GroupedLinear, num_gemms=3, params_dtype=torch.float64, return_bias=True)
    output, biases = kept(rows, torch.tensor(counts))
    torch.testing.assert_close(
        output,
        expected
        - torch.cat(
            [
                row.expand(n, 4)
                for row, n in zip([grouped.bias0, grouped.bias1, grouped.bias2], counts, strict=True)
            ]
        ),
    )
    assert biases[1] is kept.bias1


def test_what_its_kernels_alone_can_do_is_refused() -> None:
    refused = [
        lambda: linear(delay_wgrad_compute=True),
        lambda: linear(symmetric_ar_type="two_shot"),
        lambda: linear(ub_overlap_ag=True),
        lambda: linear(pytorch.LayerNormLinear, normalization="PowerNorm"),
        recipe.DelayedScaling,
        pytorch.fp8_autocast,
        pytorch.DotProductAttention,
        pytorch.LayerNormMLP,
        pytorch.distributed.CudaRNGStatesTracker,
        pytorch.ops.Sequential,
        pytorch.tensor.QuantizedTensor,
    ]
    for ask in refused:
        with pytest.raises(UsageError):
            ask()
    with pytorch.fp8_autocast(enabled=False), pytorch.fp8_model_init(enabled=False):
        pass


@pytest.mark.parametrize("precision", ["fp8", "mxfp8", "fp8_block_scaling", "nvfp4"])
def test_who_asks_for_a_precision_is_told_that_it_is_not_supported(precision: str) -> None:
    module = importlib.import_module("megatron_npu.standins.transformer_engine.fp8")
    supported, why = getattr(module, f"check_{precision}_support")()
    assert supported is False
    assert precision.partition("_")[0] in why


def test_the_norm_before_a_layer_can_be_asked_for() -> None:
    """Adapters (LoRA) of libraries take it from there."""
    layer = linear(pytorch.LayerNormLinear, normalization="RMSNorm", return_bias=True)
    layer.return_layernorm_output = True
    input = torch.randn(5, 1, 6)
    with torch.no_grad():
        torch.nn.init.normal_(layer.layer_norm_weight)
    output, bias, normed = layer(input)
    scale = input.square().mean(-1, keepdim=True).add(layer.eps).rsqrt()
    torch.testing.assert_close(normed, input * scale * layer.layer_norm_weight)
    torch.testing.assert_close(output, normed @ layer.weight.t())
    assert bias is layer.bias


@pytest.mark.parametrize("normalization", ["LayerNorm", "RMSNorm"])
def test_a_residual_in_fp32_is_normed_to_the_bits_of_the_weights(normalization: str) -> None:
    """--fp32-residual-connection: products take 16 bits, the residual's gradient is fp32."""
    options = {"params_dtype": torch.bfloat16, "device": "cpu"}
    layer = linear(pytorch.LayerNormLinear, normalization=normalization, **options)
    norm = getattr(pytorch, normalization)(6, **options)
    input = torch.randn(5, 1, 6, requires_grad=True)
    normed = norm(input)
    output = layer(input)
    assert {normed.dtype, output.dtype} == {torch.bfloat16}
    torch.testing.assert_close(output, torch.nn.functional.linear(normed, layer.weight, layer.bias))
    output.sum().backward()
    assert input.grad.dtype is torch.float32


def test_context_parallel_ranks_share_the_tokens_of_packed_sequences() -> None:
    """Each sequence in twice as many parts as ranks, the first and the last of which go together."""
    parts = [
        transformer_engine_torch.thd_get_partitioned_indices(torch.tensor([0, 8, 12]), 12, 2, r)
        for r in (0, 1)
    ]
    assert [part.tolist() for part in parts] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    with pytest.raises(
        ValueError, match="the sequences must end at 16, the number of tokens, but they end at"
    ):
        transformer_engine_torch.thd_get_partitioned_indices(torch.tensor([0, 8, 12]), 16, 2, 0)


def test_activations_and_views() -> None:
    x = torch.randn(3, 8)
    gate, value = x.chunk(2, -1)
    torch.testing.assert_close(pytorch.ops.SwiGLU()(x), torch.nn.functional.silu(gate) * value)
    torch.testing.assert_close(pytorch.ops.ReGLU()(x), torch.relu(gate) * value)
    tanh = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(pytorch.ops.GELU()(x), tanh)
    parts = pytorch.attention._SplitAlongDim.apply(x, 1, [7, 1], squeeze=True)
    assert [part.shape for part in parts] == [(3, 7), (3,)]


def test_what_ranks_gather_of_a_sequence_is_contiguous(monkeypatch):
    """HCCL refuses a strided tensor, such as multi-latent attention's part of a product; gloo takes it."""
    from megatron.core.tensor_parallel import layers

    from megatron_npu.standins.transformer_engine import parallel

    seen = []

    def product(input, weight, **options):
        seen.append(input.is_contiguous())
        return input @ weight.t()

    monkeypatch.setattr(layers, "linear_with_grad_accumulation_and_async_allreduce", product)
    part, weight = torch.randn(4, 2, 24)[..., :16], torch.randn(8, 16, requires_grad=True)
    options = {"group": None, "size": 2, "fused": False}
    found = parallel.column(part, weight, None, sequence=True, **options)
    torch.testing.assert_close(found, part @ weight.t())
    assert seen == [True]
