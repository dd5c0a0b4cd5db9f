"""Patch ``tasks/zeroshot_gpt``, which ``tasks/main.py`` imports to evaluate LAMBADA and WIKITEXT103."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_core.decorators import around
from megatron_npu.adaptors.shared import zeroshot

around(
    "zeroshot_gpt.datasets:_build_lambada_dataset",
    versions="<0.13",
    why=zeroshot.KEEPS_NO_END,
    upstream_bug=True,
    until="0.13, which has no such tasks",
)(zeroshot.keep_the_end)

around(
    "zeroshot_gpt.evaluate:evaluate",
    versions="<0.13",
    why=zeroshot.COUNTS_TWICE,
    upstream_bug=True,
    until="0.13, which has no such tasks",
)(zeroshot.count_each_once)
