"""Deterministic mode on a CPU: the same bits with one, two and four threads, dropout included, by operation.

Two differ, which docs/how-to/reliability.md names: fp32 products that sum over many rows (the BLAS splits the
sum), and torch's sum of all values of a large tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_npu.ops import activation, compiled, norm
from megatron_npu.ops.attention import attention

ROWS, WIDTH = 1536, 96
Call = Callable[..., Tensor]


def _embed(table: Tensor) -> Tensor:
    numbers = torch.arange(ROWS) * 7 % 50
    return F.embedding(numbers, table)


def _attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return attention(query, key, value, layout="BNSD", scale=0.2, causal=True, dropout_p=0.1)


CASES: dict[str, tuple[Call, tuple[tuple[int, ...], ...]]] = {
    "layer_norm": (lambda x, w, b: norm.layer_norm(x, w, b, 1e-5), ((ROWS, WIDTH), (WIDTH,), (WIDTH,))),
    "layer_norm_1p": (
        lambda x, w, b: norm.layer_norm(x, w, b, 1e-5, zero_centered_gamma=True),
        ((ROWS, WIDTH), (WIDTH,), (WIDTH,)),
    ),
    "rms_norm": (lambda x, w: norm.rms_norm(x, w, 1e-5), ((ROWS, WIDTH), (WIDTH,))),
    "bias_gelu": (activation.bias_gelu, ((ROWS, WIDTH), (WIDTH,))),
    "swiglu": (activation.swiglu, ((ROWS, 2 * WIDTH),)),
    "attention": (_attend, ((2, 3, 192, 32),) * 3),
    "bias": (lambda x, b: x + b, ((ROWS, WIDTH), (WIDTH,))),
    "embedding": (_embed, ((50, WIDTH),)),
    "dropout": (lambda x: F.dropout(x, 0.1), ((ROWS, WIDTH),)),
    "product_of_few_rows": (lambda x, w: x @ w.t(), ((128, WIDTH), (4 * WIDTH, WIDTH))),
    "norm": (torch.linalg.vector_norm, ((ROWS * WIDTH,),)),
}


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


def bits(call: Call, shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype, threads: int) -> list[Tensor]:
    """Return the result and the gradients."""
    torch.set_num_threads(threads)
    torch.manual_seed(5)
    given = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    result = call(*given)
    weights = torch.linspace(-1, 1, result.numel()).view_as(result)
    (result.float() * weights).sum().backward()
    return [result.detach(), *(tensor.grad for tensor in given)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernels", [True, False], ids=["ours", "torch's"])
def test_threads_change_no_bit(
    name: str, dtype: torch.dtype, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels:
        monkeypatch.setattr(compiled, "usable", lambda *tensors: False)
    one, *others = (bits(*CASES[name], dtype, threads) for threads in (1, 2, 4))
    for other in others:
        for place, (expected, found) in enumerate(zip(one, other, strict=True)):
            assert torch.equal(expected, found), f"{'gradient ' * (place > 0)}{place}"
