"""Provide our layers under TransformerEngine's names if this is requested and TransformerEngine is not
installed.

megatron-core wraps TransformerEngine's modules in its own classes (``megatron.core.extensions.
transformer_engine``), which define constructors, sharded checkpoints and bias conventions, with small
differences in every version. The modules here are what these classes wrap: they have the parameter names,
attributes and forward passes of TransformerEngine 2.6, and are built on our operations and megatron-core's
own tensor-parallel functions. Other precisions (fp8, fp4), and CUDA kernels that are not available here, are
either rejected with the reason or missing: upstream checks for each such name and continues without it.

With ``MEGATRON_NPU_TE=local``, they are added to ``sys.modules`` under ``transformer_engine``, but never if
the real package is installed.
"""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
# Upstream asks for versions: from 2.6 on layers have what recomputation needs (save_original_input); 2.7 has
# kernels of the router that are not here.
__version__ = "2.6.0+megatron.npu"
