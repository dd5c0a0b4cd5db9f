"""Layers of ours under the names of TransformerEngine's, where that package is absent and they are asked for.

megatron-core wraps TransformerEngine's modules in classes of its own (``megatron.core.extensions.
transformer_engine``): constructors, sharded checkpoints and bias conventions are there, a little different in
every version. These modules are what it wraps: parameter names, attributes and forward passes of
TransformerEngine 2.6, made of our operations and of megatron-core's own tensor-parallel functions. What is
another precision (fp8, fp4), or a kernel of CUDA's that nobody here has, is refused with the reason, or is
not there: upstream asks for each such name and goes on without.

They stand in ``sys.modules`` under ``transformer_engine`` where ``MEGATRON_NPU_TE=local`` asks for them, and
never where the real package is installed.
"""

from __future__ import annotations

from megatron_npu.standins.transformer_engine import common, pytorch

__all__ = ["common", "pytorch"]
# Upstream asks for versions: from 2.6 on layers have what recomputation needs (save_original_input); 2.7 has
# kernels of the router that are not here.
__version__ = "2.6.0+megatron.npu"
