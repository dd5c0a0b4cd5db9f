"""Run every operation's example on a CPU under a default dtype, and print a digest of the bits of each.

python -m tests.ops.in_default_dtype bfloat16
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from megatron_npu import devices
from megatron_npu.doctor.operations import examples
from megatron_npu.ops.attention import attention, cpu
from megatron_npu.ops.compiled import abi, library, products
from megatron_npu.ops.compiled.products import Arithmetic
from megatron_npu.ops.optimizers.adam import FusedAdam
from megatron_npu.ops.optimizers.multi_tensor import multi_tensor_l2norm

_TIMES = 6  # of attention: so often, and the heap that it had written over ended the process


def digest(tensors: Iterable[Tensor | None]) -> str:
    """Return a digest of dtypes, shapes and bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(b"none" if tensor is None else repr((tensor.dtype, tuple(tensor.shape))).encode())
        if tensor is not None:
            found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def of_example(example: Callable[[Callable[..., Tensor]], Tensor | None], dtype: torch.dtype) -> str:
    """Return the digest of what a call makes: its result, the gradients, and its arguments after it."""
    torch.manual_seed(1)
    leaves: list[Tensor] = []

    def make(*shape: int) -> Tensor:
        leaves.append(torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_())
        return leaves[-1]

    output = example(make)
    if output is not None:
        output.backward(torch.randn(output.shape, dtype=torch.float32).to(output))
    return digest([output, *(leaf.grad for leaf in leaves), *leaves])


def _attend(make: Callable[..., Tensor]) -> Tensor:
    """Return attention with dropout, of the shape that had ended the process."""
    query, key, value = (make(512, 2, 12, 64) for _ in range(3))
    results = [
        attention(query, key, value, layout="SBND", scale=0.125, causal=True, dropout_p=0.1)
        for _ in range(_TIMES)
    ]
    return torch.stack(results).sum(0)


def _step(make: Callable[..., Tensor]) -> None:
    """Make three steps of Adam, whose moments are fp16 and have scales, and a norm of nothing."""
    parameter = torch.nn.Parameter(make(33, 65).detach())
    states = {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16, "master_weights": True}
    optimizer = FusedAdam([parameter], lr=0.1, use_decoupled_grad=False, **states)
    for _ in range(3):
        parameter.grad = make(33, 65).detach()
        optimizer.step()
    assert multi_tensor_l2norm(1, None, [[]], per_tensor=True)[0].dtype is torch.float32


def _arithmetics() -> list[Arithmetic | None]:
    loaded = library()
    if loaded is None:
        return [None]
    return [None, Arithmetic.WIDENED, *([Arithmetic.PAIRED] if abi.can_pair(loaded) else [])]


def main(default: str) -> None:
    """Print the digests by name, as JSON."""
    torch.set_default_dtype(getattr(torch, default))
    devices.select("cpu")
    torch.set_num_threads(1)
    cpu.tiles_are_faster = lambda query, spec: True
    calls = {**examples(), "attention, six times": _attend, "adam, narrow": _step}
    found = {}
    for arithmetic in _arithmetics():
        products._arithmetic = lambda arithmetic=arithmetic: arithmetic  # type: ignore[assignment]
        for name, example in calls.items():
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                key = f"{name}, {dtype}, {arithmetic}"
                try:
                    found[key] = of_example(example, dtype)
                except Exception as error:  # that, too, has to be the same
                    found[key] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
