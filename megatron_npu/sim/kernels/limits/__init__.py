"""Define which arguments Ascend's documentation allows for each operation, with one table per operation.

There is one file per family, named like the file that contains its kernels. Each table names its sources:
"wheel" is ``torch_npu/_op_plugin_docs.py`` of torch_npu 2.13.0, "op-plugin" its open source
(Ascend/op-plugin, ``op_plugin/ops``), "aclnn" CANN's API reference. Where they contradict each other,
``notes`` says which one applies. Only Atlas A2 and A3 training products are covered.
"""

from __future__ import annotations

from megatron_npu.sim.kernels.checker import Limits
from megatron_npu.sim.kernels.limits import (
    activation,
    attention,
    casting,
    communication,
    cross_entropy,
    dropout,
    grouped_matmul,
    linear,
    moe,
    norm,
    optimizer,
    ring_attention,
    rotary,
    softmax,
    sparse_attention,
    status,
)

# in the order of the generated page
FAMILIES = (
    attention,
    ring_attention,
    sparse_attention,
    norm,
    softmax,
    activation,
    rotary,
    optimizer,
    status,
    casting,
    linear,
    cross_entropy,
    moe,
    grouped_matmul,
    dropout,
    communication,
)
# by operation, as torch names it: with its overload, without its namespace
LIMITS: dict[str, Limits] = {name: table for family in FAMILIES for name, table in family.LIMITS.items()}
