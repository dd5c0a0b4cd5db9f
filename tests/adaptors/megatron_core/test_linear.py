"""Linear layers: their three products by our kernel, and the same bits without autograd's function."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("single_process")


def _layer(bias: bool, into_main_grad: bool = False) -> torch.nn.Module:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(use_cpu_initialization=True, gradient_accumulation_fusion=into_main_grad)
    layer = ColumnParallelLinear(
        16, 24, config=config, init_method=torch.nn.init.normal_, bias=bias, gather_output=False
    )
    return layer.to(torch.ones(1).cuda().device)


@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_are_those_of_training(bias: bool) -> None:
    layer = _layer(bias)
    x = torch.randn(3, 2, 16).cuda()
    trained, _ = layer(x)
    assert trained.requires_grad
    with torch.no_grad():
        drawn, _ = layer(x)
    assert torch.equal(drawn, trained)


@pytest.mark.skipif(
    "os.environ.get('MEGATRON_NPU_DEVICE', 'cpu') != 'cpu'", reason="the case: patched on a cpu alone"
)
def test_no_function_of_autograd_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.tensor_parallel import layers

    layer = _layer(True)
    x = torch.randn(3, 2, 16).cuda()

    class Forbidden:
        @staticmethod
        def apply(*_: object) -> None:
            raise AssertionError("called")

    monkeypatch.setattr(layers, "LinearWithGradAccumulationAndAsyncCommunication", Forbidden)
    with torch.no_grad():
        layer(x)
    with pytest.raises(AssertionError, match="called"):
        layer(x)


@pytest.mark.skipif(
    "os.environ.get('MEGATRON_NPU_DEVICE', 'cpu') != 'cpu'", reason="the case: patched on a cpu alone"
)
@pytest.mark.parametrize("into_main_grad", [False, True])
def test_bf16_is_multiplied_by_our_kernel(into_main_grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's function on either: the products of a layer and what becomes of their results."""
    from megatron_npu.ops.compiled import library, products

    if library() is None:
        pytest.skip("no g++, or threads not of libgomp")
    layer = _layer(True, into_main_grad).bfloat16()
    x, grad = torch.randn(20, 2, 16).bfloat16(), torch.randn(20, 2, 24).bfloat16()
    calls, found = [], []
    for name in ("multiply", "add"):
        kernel = getattr(products, name)
        monkeypatch.setattr(
            products, name, lambda *a, _kernel=kernel, **k: calls.append(1) or _kernel(*a, **k)
        )
    for arithmetic in (None, products.Arithmetic.WIDENED):
        monkeypatch.setattr(products, "_arithmetic", lambda arithmetic=arithmetic: arithmetic)
        layer.weight.grad, layer.weight.main_grad = None, torch.ones(24, 16)
        input = x.clone().requires_grad_()
        output, _ = layer(input)
        output.backward(grad)
        of_weight = layer.weight.main_grad if into_main_grad else layer.weight.grad
        found.append((output.detach(), input.grad, of_weight))
    assert len(calls) == 3
    for theirs, ours in zip(*found, strict=True):
        assert theirs.shape == ours.shape
        assert theirs.dtype is ours.dtype
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=1e-2)
