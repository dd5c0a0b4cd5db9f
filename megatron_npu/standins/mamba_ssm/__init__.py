"""What Megatron's Mamba layers import from mamba_ssm for training if that package is absent.

The stub is installed with ``MEGATRON_NPU_TE=local``, together with the layers under TransformerEngine's
names, on which Mamba's specs are built. Generation kernels are missing: upstream checks for each and
continues without it. Packed sequences are processed one by one.
"""

from __future__ import annotations

__version__ = "2.2.5+megatron.npu"  # upstream asks for more where sequences are packed
