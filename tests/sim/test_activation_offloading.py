"""--fine-grained-activation-offloading of megatron-core on a simulated NPU, with the local layers."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from tests.adaptors.megatron_core.conftest import make_config, single_process  # noqa: F401 (a fixture)

pytestmark = pytest.mark.simulated
LENGTH, HIDDEN, LAYERS = 128, 256, 4
EACH = LENGTH * HIDDEN  # numbers of one activation [s, b, h]


@pytest.mark.usefixtures("single_process")
@pytest.mark.parametrize(
    ("modules", "moved"),
    [
        # queries, keys, values and the result, kept by the kernel; of the last layer nothing is moved
        (["core_attn"], 4 * (LAYERS - 1)),
        (["core_attn", "attn_proj"], 5 * (LAYERS - 1)),  # the result once more, the projection's input
    ],
    ids=["core_attn", "core_attn-attn_proj"],
)
def test_the_same_numbers_with_what_is_asked_for_moved_there_and_back(modules, moved):
    pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    plain = step()
    offloaded = step(
        fine_grained_activation_offloading=True, offload_modules=modules, min_offloaded_tensor_size=EACH
    )
    assert offloaded["losses"] == plain["losses"]
    assert all(torch.equal(a, b) for a, b in zip(offloaded["gradients"], plain["gradients"], strict=True))
    assert plain["transfers"] == 0
    assert offloaded["transfers"] == 2 * moved * EACH * 2  # there and back, bf16


def step(**options) -> dict:
    """Return what the third forward and backward pass of a model costs, and gives; the first warms up."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Interface,
    )

    from megatron_npu.sim import counting

    Interface.reset_instance()
    torch.manual_seed(1)
    config = make_config(
        num_layers=LAYERS, hidden_size=HIDDEN, bf16=True, params_dtype=torch.bfloat16, **options
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), 64, LENGTH).bfloat16().cuda()
    tokens = torch.randint(64, (1, LENGTH + 1), generator=torch.Generator().manual_seed(2)).cuda()
    positions, losses = torch.arange(LENGTH).cuda()[None], []
    for _ in range(3):
        model.zero_grad()
        with counting() as counts:
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
            loss.backward()
        Interface.reset()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": [parameter.grad.cpu() for parameter in model.parameters()],
        "transfers": counts.transfers.bytes,
    }


def test_it_is_kept_from_upstreams_check_alone():
    from megatron_npu.adaptors.megatron_core import activation_offloading

    args = Namespace(fine_grained_activation_offloading=True)
    with activation_offloading.unseen_by_upstream(args):
        assert not args.fine_grained_activation_offloading
    assert args.fine_grained_activation_offloading
