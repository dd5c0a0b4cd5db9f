"""Linear layers where no gradient is wanted: the same bits, without autograd's function."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("single_process")


def _layer(bias: bool) -> torch.nn.Module:
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    config = ModelParallelConfig(use_cpu_initialization=True)
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


@pytest.mark.skipif("os.environ.get('MEGATRON_NPU_DEVICE', 'cpu') != 'cpu'", reason="patched on a cpu alone")
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
