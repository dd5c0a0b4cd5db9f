"""Compute attention over one block of the keys, and its gradients, as a single step of ring attention.

Results over disjoint blocks are merged by their lse (the log-sum-exp of the scores). ``reference`` defines
the two operations; ``cpu``, ``cuda`` and ``npu`` implement them.
"""

from __future__ import annotations

from megatron_npu.ops.attention.block import cpu, cuda, npu  # noqa: F401  (devices register themselves)
from megatron_npu.ops.attention.block.reference import Residuals, attention_block, attention_block_backward

__all__ = ["Residuals", "attention_block", "attention_block_backward"]
