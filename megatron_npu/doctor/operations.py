"""The self-test of every operation on this process's device: verify mode over small calls.

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
from megatron_npu.ops import activation, dispatch, embedding, norm, rotary, softmax, verify
from megatron_npu.ops.adam import FusedAdam
from megatron_npu.ops.attention import attention
from megatron_npu.ops.sgd import FusedSGD

Make = Callable[..., Tensor]
Call = Callable[[Make], Tensor | None]


def _attention(make: Make) -> Tensor:
    query, key, value = (make(64, 2, heads, 64) for heads in (4, 2, 2))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True)


def _window(make: Make) -> Tensor:
    query, key, value = (make(64, 2, 4, 64) for _ in range(3))
    return attention(query, key, value, layout="SBND", scale=0.125, causal=True, window=(16, 0))


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


def _optimizer(kind: type[torch.optim.Optimizer]) -> Call:
    def step(make: Make) -> None:
        parameter = torch.nn.Parameter(make(33, 65).detach())
        parameter.grad = make(33, 65).detach()
        kind([parameter], lr=0.1).step()

    return step


CALLS: dict[str, Call] = {
    "attention, causal": _attention,
    "attention, window": _window,
    "layer_norm": lambda make: norm.layer_norm(make(64, 2, 128), make(128), make(128), 1e-5),
    "rms_norm": lambda make: norm.rms_norm(make(64, 2, 128), make(128), 1e-5),
    "scale_mask_softmax": lambda make: softmax.scale_mask_softmax(make(2, 4, 64, 64), None, 0.5, True),
    "bias_gelu": lambda make: activation.bias_gelu(make(64, 2, 128), make(128)),
    "swiglu": lambda make: activation.swiglu(make(64, 2, 128)),
    "geglu": lambda make: activation.geglu(make(64, 2, 128)),
    "vocab_parallel_embedding": _embedding,
    "rotary": _rotary,
    "adam": _optimizer(FusedAdam),
    "sgd": _optimizer(FusedSGD),
}


def run(dtype: torch.dtype) -> dict[str, str]:
    """Make every call, forward and backward; return why those failed that did, by name.

    How far each is from its reference is in ``verify.findings``.
    """
    device = devices.current().torch_device()

    def make(*shape: int) -> Tensor:
        return torch.randn(shape).to(device, dtype).requires_grad_()

    failures = {}
    for name, call in CALLS.items():
        torch.manual_seed(1)
        try:
            output = call(make)
            if output is not None:
                output.backward(torch.randn(output.shape).to(output))
        except Exception as error:  # whatever a driver may raise is what the doctor is asked for
            failures[name] = f"{type(error).__name__}: {error}".partition("\n")[0]
    return failures


def main(report: Path) -> None:
    """Test in fp32 and bf16; write failures, largest errors, those beyond the limit, and refusals."""
    failures = {}
    for dtype in (torch.float32, torch.bfloat16):
        failures |= {f"{name} in {dtype}": reason for name, reason in run(dtype).items()}
    names = sorted({operation for operation, _, _ in verify.findings})
    found = {name: [f for key, f in verify.findings.items() if key[0] == name] for name in names}
    result = {
        "failures": failures,
        "largest_error": {name: max(finding.largest for finding in found[name]) for name in names},
        "beyond_limit": [name for name in names if any(finding.beyond for finding in found[name])],
        "refusals": [f"{name}: {reason}" for name, reason in dispatch.refusals],
    }
    report.write_text(json.dumps(result))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
