"""``enable_autocast``: a GPT trains in bf16 by megatron-core's own schedule, as near to fp32 as bf16 is."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.ops.products import linear
from tests.adaptors.megatron_core.conftest import make_config

pytestmark = pytest.mark.usefixtures("single_process")
SEQUENCE, BATCH, VOCABULARY = 16, 2, 64


def _gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Run one step's forward and backward pass of megatron-core's schedule on fixed tokens."""
    from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

    tokens = torch.randint(VOCABULARY, (BATCH, SEQUENCE), generator=torch.Generator().manual_seed(3)).cuda()
    positions = torch.arange(SEQUENCE, device="cuda").expand(BATCH, SEQUENCE)

    def forward_step(batches, model):
        next(batches)
        return model(tokens, positions, None, labels=tokens), lambda loss: (loss.mean(), {})

    model.zero_grad()
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([None]),
        model=[model],
        num_microbatches=1,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=False,
    )
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


@pytest.mark.parametrize("library", ["MKL", "oneDNN"])
def test_a_gpt_trains_with_autocast(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if library == "oneDNN" and not torch.backends.mkldnn.is_available():
        pytest.skip("torch was built without oneDNN")
    # whichever multiplies fp32 faster here
    monkeypatch.setattr(linear, "_ONEDNN_BEATS_MKL", library == "oneDNN")
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear

    # a layer that adds its fp32 bias itself answers in fp32, here as on CUDA
    config = make_config(add_bias_linear=False)
    model = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, SEQUENCE).cuda()
    true = _gradients(model)
    seen = []
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear):
            module.register_forward_hook(lambda _, inputs, outputs: seen.append(outputs[0].dtype))
    config.enable_autocast, config.autocast_dtype = True, torch.bfloat16
    got = _gradients(model)
    assert set(seen) == {torch.bfloat16}
    for name, gradient in got.items():
        assert gradient.dtype is torch.float32
        assert (gradient - true[name]).norm() <= 3e-2 * true[name].norm() + 1e-6, name
