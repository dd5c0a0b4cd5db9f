"""Activations of megatron-core's local layers on a simulated NPU: moved away, and computed again."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from megatron_npu.adaptors.shared import core_attention
from tests.support.core_models import make_config, single_process  # noqa: F401 (a fixture)

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


@pytest.mark.usefixtures("single_process")
def test_gradients_added_to_their_buffer_are_announced_while_others_are_reduced():
    """The weight of a layer whose input was moved is the parameter that DDP waits for."""
    pytest.importorskip("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    fused = {"gradient_accumulation_fusion": True, "overlapped": True}
    plain = step(**fused)
    offloaded = step(
        fine_grained_activation_offloading=True,
        offload_modules=["core_attn", "attn_proj", "qkv_linear"],
        min_offloaded_tensor_size=1,
        **fused,
    )
    assert offloaded["transfers"] > plain["transfers"] == 0
    assert offloaded["losses"] == plain["losses"]
    assert all(torch.equal(a, b) for a, b in zip(offloaded["gradients"], plain["gradients"], strict=True))


@pytest.mark.usefixtures("single_process")
def test_recomputed_attention_keeps_values_and_not_the_product_that_they_came_from():
    options = {"normalization": "RMSNorm", "num_query_groups": 4}
    plain = step(rotary=True, **options)
    again = step(rotary=True, recompute_granularity="selective", recompute_modules=["core_attn"], **options)
    assert again["losses"] == plain["losses"]
    assert all(torch.equal(a, b) for a, b in zip(again["gradients"], plain["gradients"], strict=True))
    # no statistics of the softmax: two numbers of fp32, eight times each, for every query of every head
    assert plain["held"] - again["held"] == LAYERS * 2 * 8 * 4 * LENGTH * 4


def test_only_parts_of_a_memory_that_is_larger_than_they_are_get_copied():
    product = torch.randn(LENGTH, 3, HIDDEN)
    query, key, value = product.unbind(1)
    turned = query + 1
    untouched = core_attention.out_of_larger_memory(query, key, value)
    assert all(a is b for a, b in zip(untouched, (query, key, value), strict=True))
    kept = core_attention.out_of_larger_memory(turned, key, value)
    assert kept[0] is turned
    assert torch.equal(kept[2], value)
    assert [part.untyped_storage().nbytes() for part in kept] == [part.nbytes for part in kept]


def step(rotary: bool = False, overlapped: bool = False, **options) -> dict:
    """Return what the third forward and backward pass of a model costs, and gives; the first warms up.

    ``overlapped``: in Megatron's DDP, which reduces gradients while others are computed.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
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
    positions = {"position_embedding_type": "rope" if rotary else "learned_absolute"}
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    model = GPTModel(config, spec, 64, LENGTH, **positions).bfloat16().cuda()
    if overlapped:
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(overlap_grad_reduce=True), model
        )
    tokens = torch.randint(64, (1, LENGTH + 1), generator=torch.Generator().manual_seed(2)).cuda()
    positions, losses = torch.arange(LENGTH).cuda()[None], []
    for _ in range(3):
        (model.zero_grad_buffer if overlapped else model.zero_grad)()
        with counting() as counts:
            before = requested()
            loss = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).float().mean()
            held = requested() - before
            loss.backward()
        if overlapped:
            model.finish_grad_sync()
        Interface.reset()
        losses.append(loss.item())
    return {
        "losses": losses,
        "gradients": [
            (parameter.main_grad if overlapped else parameter.grad).cpu() for parameter in model.parameters()
        ],
        "transfers": counts.transfers.bytes,
        "held": held,
    }


def requested() -> int:
    """Return the bytes asked of the device's allocator, and not given back."""
    return torch.npu.memory_stats()["requested_bytes.all.current"]


def test_it_is_kept_from_upstreams_check_alone():
    from megatron_npu.adaptors.megatron_core.layers import activation_offloading

    args = Namespace(fine_grained_activation_offloading=True)
    with activation_offloading.unseen_by_upstream(args):
        assert not args.fine_grained_activation_offloading
    assert args.fine_grained_activation_offloading
