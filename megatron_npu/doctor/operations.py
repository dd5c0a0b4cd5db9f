"""The self-test of every operation on this process's device: verify mode and reference checks on small calls.

    MEGATRON_NPU_VERIFY=all python -m megatron_npu.doctor.operations REPORT.json

Runs in a process of its own, because a broken driver may end it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.doctor import reference_checks
from megatron_npu.ops import activation, dispatch, embedding, norm, rotary, softmax, verify
from megatron_npu.ops.adam import FusedAdam
from megatron_npu.ops.attention import attention
from megatron_npu.ops.attention.block import Residuals, attention_block, attention_block_backward
from megatron_npu.ops.grouped_matmul import grouped_matmul
from megatron_npu.ops.sgd import FusedSGD

Make = Callable[..., Tensor]
Call = Callable[[Make], Tensor | None]


def _attention(make: Make) -> Tensor:
    query, key, value = (make(64, 2, heads, 64) for heads in (4, 2, 2))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True)


def _window(make: Make) -> Tensor:
    query, key, value = (make(64, 2, 4, 64) for _ in range(3))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True, window=(16, 0))


def _parts(make: Make) -> None:
    query, key, value = (make(64, 2, heads, 64).detach() for heads in (4, 2, 2))
    output, lse = attention_block(query, key, value, 0.125, True)
    residuals = Residuals(query, key, value, output, lse)
    attention_block_backward(torch.ones_like(output), residuals, 0.125, True)


def _embedding(make: Make) -> Tensor:
    table = make(64, 128)
    ids = torch.arange(256, device=table.device).view(8, 32) % 96
    return embedding.vocab_parallel_embedding(ids, table, 32, 96)


def _rotary(make: Make) -> Tensor:
    input = make(64, 2, 4, 64)
    turns = torch.arange(64.0, device=input.device)[:, None] * torch.linspace(
        1, 0.01, 32, device=input.device
    )
    return rotary.rotary(input, torch.cat([turns, turns], dim=-1)[:, None, None, :])


def _grouped_matmul(make: Make) -> Tensor:
    counts = torch.tensor([10, 0, 50, 36])  # an expert without rows is the case that goes wrong
    return grouped_matmul(make(96, 32), make(4, 32, 48), counts)


def _optimizer(kind: type[FusedAdam] | type[FusedSGD]) -> Call:
    def step(make: Make) -> None:
        parameter = torch.nn.Parameter(make(33, 65).detach())
        parameter.grad = make(33, 65).detach()
        kind([parameter], lr=0.1).step()

    return step


CALLS: dict[str, Call] = {
    "attention, causal": _attention,
    "attention, window": _window,
    "attention, in parts": _parts,
    "layer_norm": lambda make: norm.layer_norm(make(64, 2, 128), make(128), make(128), 1e-5),
    "rms_norm": lambda make: norm.rms_norm(make(64, 2, 128), make(128), 1e-5),
    "scale_mask_softmax": lambda make: softmax.scale_mask_softmax(make(2, 4, 64, 64), None, 0.5, True),
    "bias_gelu": lambda make: activation.bias_gelu(make(64, 2, 128), make(128)),
    "swiglu": lambda make: activation.swiglu(make(64, 2, 128)),
    "geglu": lambda make: activation.geglu(make(64, 2, 128)),
    "vocab_parallel_embedding": _embedding,
    "rotary": _rotary,
    "grouped_matmul": _grouped_matmul,
    "adam": _optimizer(FusedAdam),
    "sgd": _optimizer(FusedSGD),
}


def run(dtype: torch.dtype) -> dict[str, str]:
    """Make every call, forward and backward; return why those failed that did, by name.

    How far each is from its reference is in ``verify.findings``.
    """
    failures = {}
    for name, call in CALLS.items():
        torch.manual_seed(1)
        try:
            output = call(_maker(dtype))
            if output is not None:
                output.backward(torch.randn(output.shape).to(output))
        except Exception as error:  # whatever a driver may raise is what the doctor is asked for
            failures[name] = _in_one_line(error)
    return failures


def compare(dtype: torch.dtype) -> tuple[dict[str, float], dict[str, str]]:
    """Compare what verify mode does not reach with its formula; return the errors, and what failed.

    An error beyond the limit of verify mode is a failure here.
    """
    errors, failures = {}, {}
    for name, check in reference_checks.CHECKS.items():
        torch.manual_seed(1)
        try:
            pairs = check(_maker(dtype))
            errors[name] = max(verify.relative_error(ours.detach(), right) for ours, right in pairs)
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
    """Test in fp32 and bf16; return failures, largest errors, those beyond the limit, and fallbacks."""
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
    Path(sys.argv[1]).write_text(json.dumps(report()))
