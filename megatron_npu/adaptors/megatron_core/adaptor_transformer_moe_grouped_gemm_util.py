"""``megatron.core.transformer.moe.grouped_gemm_util``: the package grouped_gemm, for --moe-grouped-gemm."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

from torch import Tensor

from megatron_npu.adaptors.megatron_core.decorators import constant, installed
from megatron_npu.ops.grouped_matmul import grouped_matmul

_MODULE = "megatron.core.transformer.moe.grouped_gemm_util"


def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_a: bool = False, trans_b: bool = False) -> Tensor:
    """``[t, k]`` and ``[e, k, n]`` (``[e, n, k]`` with ``trans_b``) to ``[t, n]``; ``batch_sizes`` ``[e]``.

    Raises:
        NotImplementedError: ``trans_a``, which megatron-core never sets.
    """
    if trans_a:
        raise NotImplementedError("grouped_gemm's trans_a")
    return grouped_matmul(a, b.transpose(1, 2) if trans_b else b, batch_sizes)


_stand_in = partial(
    constant,
    condition=partial(installed, "grouped_gemm"),
    why="the experts of --moe-grouped-gemm need TransformerEngine or the package grouped_gemm, which is CUDA",
)
_stand_in(f"{_MODULE}:ops", SimpleNamespace(gmm=gmm))
_stand_in(f"{_MODULE}:grouped_gemm", SimpleNamespace(ops=SimpleNamespace(gmm=gmm)))
