"""The limits of Ascend's documentation: every one of them refuses, and the message says what and why."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megatron_npu.sim import kernels
from megatron_npu.sim.kernels.checker import LimitError, NotSimulatedError
from megatron_npu.sim.kernels.limits import LIMITS
from megatron_npu.sim.kernels.registry import KERNELS
from tests.sim.refusals import CASES, Case, Change

kernels.declare()


def refused(case: Case, change: Change) -> LimitError:
    with pytest.raises(LimitError) as caught:
        KERNELS[case.operation].checked(**{**case.allowed, **change.given})
    return caught.value


def test_every_table_belongs_to_a_kernel_and_has_cases():
    assert LIMITS.keys() <= KERNELS.keys()
    assert LIMITS.keys() == CASES.keys()


DRAWS = {"_npu_dropout"}  # from the device's generator, which is not here
# with other ranks: tests/sim/test_hccl.py
COMMUNICATE = {"npu_all_gather_base_mm", "npu_mm_reduce_scatter_base", "npu_mm_all_reduce_base"}


@pytest.mark.parametrize("operation", sorted(CASES.keys() - DRAWS - COMMUNICATE))
def test_the_allowed_call_is_computed(operation):
    KERNELS[operation].checked(**{name: copied(value) for name, value in CASES[operation].allowed.items()})


def copied(value: object) -> object:
    """Return a copy of tensors, so that operations in place do not change the cases."""
    if isinstance(value, list) and value and isinstance(value[0], Tensor):
        return [copied(tensor) for tensor in value]
    return value.clone() if isinstance(value, Tensor) and value.is_contiguous() else value


@pytest.mark.parametrize("operation", CASES)
def test_forbidden_arguments_are_refused_and_named(operation):
    for change in CASES[operation].changes:
        error = refused(CASES[operation], change)
        given = {name: str(getattr(value, "shape", value)) for name, value in change.given.items()}
        assert error.limit.argument == change.argument, f"{given}: {error}"
        assert str(error).startswith(f"{operation}: {change.argument} is ")
        assert isinstance(error, NotSimulatedError) != error.limit.simulated


@pytest.mark.parametrize("operation", CASES)
def test_every_limit_is_seen_to_refuse(operation):
    seen = {id(refused(CASES[operation], change).limit) for change in CASES[operation].changes}
    unseen = [limit for limit in LIMITS[operation].limits if id(limit) not in seen]
    assert not unseen, [f"{limit.argument}: {limit.allowed}" for limit in unseen]


def test_a_long_sequence_of_one_batch_is_not_taken_for_many_batches():
    angle = torch.zeros(2048, 1, 1, 8)
    result = KERNELS["npu_rotary_mul"].checked(torch.zeros(2048, 1, 3, 8), angle, angle)
    assert result.shape == (2048, 1, 3, 8)


def test_lengths_of_ring_attention_need_no_zero_where_they_are_not_used():
    statistics = [torch.ones(4, 2, 8)] * 2
    output = torch.ones(4, 2, 64)
    options = {"actual_seq_qlen": torch.tensor([1, 4]), "input_layout": "TND", "input_softmax_layout": "TND"}
    update = KERNELS["npu_ring_attention_update"].checked
    merged, _, total = update(output, *statistics, output, *statistics, **options)
    assert torch.equal(merged, output)
    assert torch.equal(total, torch.full((4, 2, 8), 2.0))


def test_the_message_says_operation_argument_given_allowed_and_source():
    with pytest.raises(LimitError) as caught:
        KERNELS["npu_rms_norm"].checked(torch.zeros(2, 8), torch.zeros(8, dtype=torch.bfloat16))
    assert str(caught.value) == (
        "npu_rms_norm: gamma is bfloat16 [8], but "
        "the documentation requires the dtype of input (wheel, npu_rms_norm; aclnnRmsNorm)"
    )


@pytest.mark.simulated
def test_the_device_refuses_what_the_limits_refuse():
    for case in CASES.values():
        for change in case.changes:
            call = {name: on_device(value) for name, value in {**case.allowed, **change.given}.items()}
            with pytest.raises(LimitError) as caught:
                _operation(case.operation)(**call)
            assert caught.value.limit.argument == change.argument


def _operation(name: str) -> torch._ops.OpOverload:
    base, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.npu, base), overload or "default")


def on_device(value: object) -> object:
    """Return tensors on the NPU with the same strides; other values as they are."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        return [on_device(tensor) for tensor in value]
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float64:  # there is none on the device; torch_npu would make it fp32
        value = value.to(torch.int32)
    memory = value.as_strided((value.untyped_storage().nbytes() // value.element_size(),), (1,), 0)
    return memory.npu().as_strided(value.shape, value.stride(), value.storage_offset())
