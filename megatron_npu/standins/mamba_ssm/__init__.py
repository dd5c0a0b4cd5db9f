"""What Megatron's Mamba layers take from mamba_ssm to train, where that package is absent.

They stand beside the layers under TransformerEngine's names, which Mamba's specifications are made of: where
``MEGATRON_NPU_TE=local`` asks for them. Generation's kernels are not here: upstream asks for each and goes on
without. Packed sequences are taken one by one.
"""

from __future__ import annotations

__version__ = "2.2.5+megatron.npu"  # upstream asks for more where sequences are packed
