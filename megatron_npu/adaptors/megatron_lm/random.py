"""Generators: the device's behind the RNG tracker, the host's for initial weights."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import records
from megatron_npu.adaptors.shared import random

random.connect(records, "megatron.core.tensor_parallel.random")
random.connect_host(records)
