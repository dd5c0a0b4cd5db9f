"""Stub for ``emerging_optimizers.triton_kernels`` without Triton, which reports that no kernels exist.

Muon's Newton-Schulz iteration then uses plain matmuls, which are the package's default.
"""

from __future__ import annotations

HAS_TRITON_340 = False
