"""Test every operation on this process's device by running its examples in verify mode.

    MEGATRON_NPU_VERIFY=all python -m megatron_npu.doctor.operations REPORT.json

The test runs in a separate process, because a broken driver may crash it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.devices import gloo
from megatron_npu.ops import dispatch, verify
from megatron_npu.ops.dispatch import Example, Make
from megatron_npu.ops.dropout import bias_dropout_add, dropout


def examples() -> dict[str, Example]:
    """Return every registered example, keyed by the names of the operation and the case."""
    return {
        f"{operation.name}, {case}" if case else operation.name: example
        for operation in dispatch.all_operations()
        for case, example in operation.examples.items()
    }


def run(dtype: torch.dtype) -> dict[str, str]:
    """Run every example forward and backward.

    Return the failures with their reasons, keyed by name.

    The deviation of each example from its reference is in ``verify.findings``.
    """
    failures = {}
    for name, call in examples().items():
        torch.manual_seed(1)
        try:
            output = call(_maker(dtype))
            if output is not None:
                output.backward(torch.randn(output.shape).to(output))
        except Exception as error:  # whatever a driver may raise is what the doctor is asked for
            failures[name] = _in_one_line(error)
    return failures


def _added_dropout_error(make: Make) -> float:
    x, bias, residual = make(128, 256), make(256), make(128, 256)
    ours = bias_dropout_add(x, bias, residual, 0.25, True)
    return _dropout_error(ours, _host(x) + _host(bias), _host(residual))


def _plain_dropout_error(make: Make) -> float:
    x = make(128, 256)
    return _dropout_error(dropout(x, 0.25, True), _host(x), torch.zeros(x.shape))


def _dropout_error(output: Tensor, x: Tensor, residual: Tensor) -> float:
    """Return the largest error of a dropout result, in which each value must be kept or dropped.

    Raises:
        ArithmeticError: the fraction of dropped values is not the requested 0.25.
    """
    ours, kept, dropped = _host(output), residual + x / 0.75, residual
    nearest = torch.where((ours - kept).abs() < (ours - dropped).abs(), kept, dropped)
    share = (nearest == dropped).float().mean()
    # 32,768 decisions: the standard deviation of the share is 0.0024
    if abs(share - 0.25) >= 0.015:
        raise ArithmeticError(f"{share:.3f} of the values were dropped; expected 0.25")
    return verify.relative_error(ours, nearest)


def _host(tensor: Tensor) -> Tensor:
    return tensor.detach().float().cpu()


# No reference can repeat a call that draws random numbers: these have a formula that holds for any draw.
DRAWING: dict[str, Callable[[Make], float]] = {
    "bias_dropout_add": _added_dropout_error,
    "dropout": _plain_dropout_error,
}


def compare(dtype: torch.dtype) -> tuple[dict[str, float], dict[str, str]]:
    """Compare operations that use random numbers with their formulas.

    Return the errors and the failures.
    """
    errors, failures = {}, {}
    for name, error_of in DRAWING.items():
        torch.manual_seed(1)
        try:
            errors[name] = error_of(_maker(dtype))
        except Exception as error:  # as above
            failures[name] = _in_one_line(error)
    return errors, failures


def _maker(dtype: torch.dtype) -> Make:
    device = devices.current().torch_device()

    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).requires_grad_()

    return make


def _in_one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def report() -> dict[str, object]:
    """Test all operations in fp32 and bf16, and return the results.

    Return failures, largest errors, errors above the limit, and fallbacks.
    """
    failures: dict[str, str] = {}
    largest: dict[str, float] = {}
    beyond: set[str] = set()
    for dtype in (torch.float32, torch.bfloat16):
        errors, failed = compare(dtype)
        failed |= run(dtype)
        failures |= {f"{name} in {dtype}": reason for name, reason in failed.items()}
        largest |= {name: max(error, largest.get(name, 0.0)) for name, error in errors.items()}
        beyond |= {name for name, error in errors.items() if error > verify.LIMITS[dtype]}
    for (name, _, _), finding in verify.findings.items():
        largest[name] = max(finding.largest, largest.get(name, 0.0))
        beyond |= {name} if finding.beyond else set()
    return {
        "failures": failures,
        "largest_error": dict(sorted(largest.items())),
        "beyond_limit": sorted(beyond),
        "fallbacks": [f"{name}: {reason}" for name, reason in dispatch.fallbacks],
    }


if __name__ == "__main__":
    gloo.wait_at_exit()  # else a thread of the backward pass may abort the process after it has reported
    Path(sys.argv[1]).write_text(json.dumps(report()), encoding="utf-8")
