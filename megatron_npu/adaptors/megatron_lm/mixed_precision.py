"""16-bit training: what crosses the model's border, and overflows that only the device's flag knows of."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import records
from megatron_npu.adaptors.shared import mixed_precision

mixed_precision.connect(records, "MixedPrecisionOptimizer")
