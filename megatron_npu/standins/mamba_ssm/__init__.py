"""Stub for the parts of mamba_ssm that Megatron's Mamba layers import for training.

The stub is installed with ``MEGATRON_NPU_TE=local`` if the package is not installed, together with the layers
under TransformerEngine's names, which Mamba's specs are built on. Generation kernels are missing: upstream
checks for each of them and continues without it. Packed sequences are processed one by one.
"""

from __future__ import annotations

__version__ = "2.2.5+megatron.npu"  # upstream asks for more where sequences are packed
