"""Patch ``tasks/zeroshot_gpt``, which ``tasks/main.py`` imports to evaluate LAMBADA and WIKITEXT103."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_lm.decorators import around
from megatron_npu.adaptors.shared import zeroshot

around(
    "zeroshot_gpt.datasets:_build_lambada_dataset",
    why=zeroshot.KEEPS_NO_END,
    upstream_bug=True,
    until="never: 285068c8 is frozen",
)(zeroshot.keep_the_end)

around(
    "zeroshot_gpt.evaluate:evaluate",
    why=zeroshot.COUNTS_TWICE,
    upstream_bug=True,
    until="never: 285068c8 is frozen",
)(zeroshot.count_each_once)
