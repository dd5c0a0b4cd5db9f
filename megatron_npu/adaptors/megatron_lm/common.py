"""Record the patches that this upstream has in common with others, which ``shared`` defines."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import records
from megatron_npu.adaptors.shared import mixed_precision, random, simulated
from megatron_npu.adaptors.shared.layers import fusions, linear_products

fusions.connect(records)
linear_products.connect(records)
mixed_precision.connect(records, "MixedPrecisionOptimizer")
random.connect(records, "megatron.core.tensor_parallel.random")
random.connect_host(records)
simulated.connect_old_tree(records, "megatron.utils:print_rank_last")
