"""Verify mode: it sees a wrong output, a wrong gradient, a wrong update; it changes nothing."""

from __future__ import annotations

import os
import sys
from typing import NamedTuple

import pytest
import torch

from megatron_npu import devices
from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.ops import dispatch, verify
from megatron_npu.ops.dispatch import Operation
from megatron_npu.ops.linear_cross_entropy import linear_cross_entropy
from tests.conftest import ROOT
from tests.support import warm


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(verify, "findings", {})
    monkeypatch.setattr(verify, "random_calls", {})
    names = settings.operation_names() | {"scaled", "sample"}
    monkeypatch.setattr(settings, "operation_names", lambda: names)
    yield
    dispatch.OPERATIONS[:] = [operation for operation in dispatch.OPERATIONS if operation.name != "scaled"]


def scaled(x, weight):
    return x * weight


class WrongGradient(torch.autograd.Function):
    """Right in forward; the gradient of the weight is 1 % off."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad * weight, 1.01 * (grad * x)


def bound(monkeypatch, function, reference=scaled, selection="sample", draws=None):
    operation = Operation("scaled", reference, group="sample", draws=draws)
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", selection)
    operation.on("here")(function)
    operation.bind("here")
    return operation


def found(what, layer="(outside any module)"):
    return verify.findings["scaled", layer, what]


def run(operation, dtype=torch.float32):
    torch.manual_seed(0)
    here = devices.current().torch_device()
    x, weight = (torch.randn(8, 3, device=here).to(dtype).requires_grad_() for _ in range(2))
    result = operation(x, weight)
    (result * torch.arange(24.0, device=here).view(8, 3)).sum().backward()
    return result.detach(), x.grad, weight.grad


@pytest.mark.parametrize("selection", ["sample", "scaled", "all", "attention, sample"])
def test_a_right_implementation_passes_and_is_not_changed(monkeypatch, selection, caplog):
    operation = bound(monkeypatch, lambda x, weight: weight * x, selection=selection)
    for ours, right in zip(run(operation), run(scaled), strict=True):
        assert torch.equal(ours, right)
    assert {key[2] for key in verify.findings} == {"output", "gradient of x", "gradient of weight"}
    assert all(f.calls == 1 and f.largest < 1e-6 and not f.beyond for f in verify.findings.values())
    assert not caplog.records


def test_the_gradient_is_that_of_this_call_alone(monkeypatch):
    """A tensor used elsewhere too collects other gradients, which are none of the operation's business."""
    operation = bound(monkeypatch, lambda x, weight: weight * x)
    x, weight = (torch.randn(4, requires_grad=True) for _ in range(2))
    (operation(x, weight) + operation(2 * x, weight) + 100 * x).sum().backward()
    assert found("gradient of x").calls == 2
    assert found("gradient of x").largest < 1e-6


def test_a_wrong_output_is_named(monkeypatch, caplog):
    operation = bound(monkeypatch, lambda x, weight: x * weight * 1.01)
    run(operation)
    assert found("output").largest == pytest.approx(0.01, rel=1e-3)
    assert "verify: scaled, (outside any module), output: error 0.01 exceeds" in caplog.text


def test_a_wrong_gradient_is_named(monkeypatch, caplog):
    run(bound(monkeypatch, WrongGradient.apply))
    assert found("output").beyond == found("gradient of x").beyond == 0
    assert found("gradient of weight").largest == pytest.approx(0.01, rel=1e-3)
    assert "gradient of weight: error 0.01 exceeds" in caplog.text


def test_16_bit_has_the_limits_of_its_rounding(monkeypatch):
    run(bound(monkeypatch, lambda x, weight: weight * x), torch.bfloat16)
    assert 1e-4 < found("output").largest < 1e-2
    assert not found("output").beyond


def test_a_gradient_that_cancels_is_not_an_error(monkeypatch):
    """The sum of a layer norm does not depend on its input: what is left is rounding."""
    operation = bound(monkeypatch, lambda x, weight: weight * (x - x.mean(-1, keepdim=True)), _centered)
    x = torch.randn(64, 256, requires_grad=True)
    operation(x, torch.full((256,), 3.0)).sum().backward()
    assert x.grad.abs().max() < 1e-4
    assert not found("gradient of x").beyond


def _centered(x, weight):
    return (x.double() - x.double().mean(-1, keepdim=True)).to(x.dtype) * weight


def test_nan_in_one_alone_is_an_error(monkeypatch):
    run(bound(monkeypatch, lambda x, weight: x * weight + float("nan")))
    assert found("output").largest == float("inf")
    both = torch.tensor([float("nan"), 1.0])
    assert verify.relative_error(both, both) == 0.0


def test_an_operation_in_place(monkeypatch):
    def add(targets, amount, *, twice):
        for target in targets:
            target.add_(amount * (2 if twice else 1))

    def wrong(targets, amount, *, twice):
        targets[0].add_(amount)

    operation = bound(monkeypatch, wrong, add)
    targets = [torch.ones(2), torch.ones(3)]
    operation(targets, torch.tensor(4.0), twice=True)
    assert [t[0].item() for t in targets] == [5.0, 1.0]  # what the implementation did, not the reference
    assert found("targets[0]").largest == pytest.approx(4 / 9)
    assert found("targets[1]").largest == pytest.approx(8 / 9)


def test_random_calls_are_counted_not_compared(monkeypatch):
    def drop(x, weight):
        return torch.dropout(x * weight, 0.5, True)

    run(bound(monkeypatch, drop, draws=lambda x, weight: x.dtype is torch.float32))
    assert verify.random_calls == {"scaled": 1}
    assert not verify.findings
    assert "1 calls not compared" in verify.summary()


def test_without_gradients(monkeypatch):
    operation = bound(monkeypatch, lambda x, weight: weight * x)
    with torch.no_grad():
        operation(torch.ones(2, requires_grad=True), torch.ones(2))
    assert {key[2] for key in verify.findings} == {"output"}


def test_the_layer_is_named(monkeypatch):
    class Layer(torch.nn.Module):
        def __init__(self, operation):
            super().__init__()
            self.weight, self.operation = torch.nn.Parameter(torch.ones(3)), operation

        def forward(self, x):
            return self.operation(x, self.weight)

    removed = []
    hooks = torch.nn.modules.module
    for register, hook in (
        (hooks.register_module_forward_pre_hook, verify._enter),
        (hooks.register_module_forward_hook, verify._leave),
    ):
        removed.append(register(hook))
    try:
        operation = bound(monkeypatch, lambda x, weight: weight * x)
        model = torch.nn.Sequential(Layer(operation), torch.nn.Sequential(Layer(operation)))
        model(torch.randn(2, 3)).sum().backward()
        model[1][0](torch.randn(2, 3))  # run alone, as recomputation does
    finally:
        for handle in removed:
            handle.remove()
    assert {key[1] for key in verify.findings} == {"0", "1.0"}
    assert found("output", "1.0").calls == 2
    assert found("gradient of weight", "0").calls == 1


def test_an_unknown_name_is_refused(monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", "norm,nrom")
    with pytest.raises(UsageError, match="contains unknown operations: nrom"):
        verify.watches("layer_norm", "norm")


def test_settings_name_all_operations_there_are():
    names = {name for each in dispatch.all_operations() for name in (each.name, each.group)}
    assert names | {"scaled", "sample"} == settings.operation_names()


@pytest.mark.parametrize("command", [["ledger"], ["pretrain", "--save", "out", "--mock-data"]])
def test_a_misspelt_name_stops_a_command_before_it_writes(command, tmp_path):
    done = warm.run(
        [sys.executable, "-m", "megatron_npu", *command],
        env={**os.environ, "MEGATRON_NPU_VERIFY": "atention", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "MEGATRON_NPU_VERIFY contains unknown operations: atention. " in line
    assert not list(tmp_path.iterdir())


def test_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("MEGATRON_NPU_VERIFY", raising=False)
    assert not verify.watches("layer_norm", "norm")


def test_the_summary_comes_when_the_process_ends():
    code = """
import torch
from megatron_npu.ops import norm
layer = torch.nn.Module()
layer.forward = lambda x: norm.layer_norm(x, torch.ones(4), torch.zeros(4), 1e-5)
torch.nn.Sequential(layer)(torch.randn(3, 4, requires_grad=True)).exp().sum().backward()
"""
    environment = {**os.environ, "MEGATRON_NPU_VERIFY": "norm", "MEGATRON_NPU_DEVICE": "cpu"}
    done = warm.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "verify: layer_norm: largest error" in done.stdout
    assert "2 comparisons, 0 above the limit" in done.stdout


@pytest.mark.parametrize(("factor", "beyond"), [(1.005, 0), (1.1, 1)])
def test_in_place_the_limit_is_that_of_the_least_precise_tensor(monkeypatch, factor, beyond):
    """A 16-bit product added to an fp32 buffer is off by more than fp32 may be."""

    def add(total, value):
        total.add_(value)

    def add_too_much(total, value):
        total.add_(value.float() * factor)

    total, value = torch.zeros(4), torch.ones(4, dtype=torch.bfloat16)
    assert bound(monkeypatch, add_too_much, add)(total, value) is None
    assert found("total").beyond == beyond


def test_an_output_that_nothing_uses_has_no_gradient(monkeypatch):
    """An operation in C++ hands its hook None then: the other output's gradient is compared alone."""
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", "all")
    tokens, probs = torch.randn(6, 8, requires_grad=True), torch.rand(6, 4, requires_grad=True)
    call = verify._Call("two", lambda x, w: (x * 2, w * 3), (tokens, probs), {})
    outputs = call.args[0] * 2, call.args[1] * 3
    call.compare(outputs, rounds_within=False)
    call._output_grad(1, None)
    outputs[0].sum().backward()
    assert {what: finding.beyond for (_, _, what), finding in verify.findings.items()} == {
        "output 0": 0,
        "output 1": 0,
        "gradient of x": 0,
    }


def test_a_weight_whose_gradient_goes_into_a_buffer_has_none(monkeypatch):
    """As in every training by the driver: the output layer and its loss in one, with ``main_grad``."""
    monkeypatch.setenv("MEGATRON_NPU_VERIFY", "all")
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    main_grad, target = torch.zeros(20, 8), torch.arange(6)
    for operation in dispatch.OPERATIONS:
        operation.bind("cpu")
    linear_cross_entropy(hidden, weight, target, main_grad=main_grad).sum().backward()
    assert weight.grad is None
    assert main_grad.any()
    compared = {what for name, _, what in verify.findings if name == "linear_cross_entropy"}
    assert compared == {"output", "gradient of hidden"}
    assert not any(finding.beyond for finding in verify.findings.values())


def test_tensors_in_a_named_tuple_are_compared_too(monkeypatch):
    class Factors(NamedTuple):
        x: torch.Tensor
        weight: torch.Tensor

    def product(factors):
        assert isinstance(factors, Factors)
        return factors.x * factors.weight

    operation = bound(monkeypatch, lambda factors: 1.5 * product(factors), reference=product)
    operation(Factors(torch.ones(3), torch.full((3,), 2.0)))
    assert found("output").largest == 0.5


def test_of_several_results_the_tensors_are_compared(monkeypatch):
    """What a backward pass is to draw again, a seed, is handed on."""
    operation = bound(
        monkeypatch,
        lambda x, weight: (x * weight, (3,), x + 1),
        reference=lambda x, weight: (x * weight, (5,), x + 2),
    )
    assert operation(torch.ones(2), torch.ones(2))[1] == (3,)
    assert (found("output 0").beyond, found("output 1").beyond) == (0, 1)
    assert {key[2] for key in verify.findings} == {"output 0", "output 1"}
