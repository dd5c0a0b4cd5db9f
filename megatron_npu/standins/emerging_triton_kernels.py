"""Stub for ``emerging_optimizers.triton_kernels``, used without Triton; it reports that there are no kernels.

Muon's Newton-Schulz iteration then uses plain matmuls, which are the package's default.
"""

from __future__ import annotations

HAS_TRITON_340 = False
