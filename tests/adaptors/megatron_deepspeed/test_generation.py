"""``tools/generate_samples_gpt.py``, with keys in a cache and without."""

from __future__ import annotations

import json

import pytest

from tests.adaptors.megatron_lm import runs

pytest.importorskip("deepspeed")

PADDED = "--make-vocab-size-divisible-by 1024"  # three quarters of the logits are of no token


def test_a_cache_changes_no_text(checkout, data, tmp_path):
    texts = []
    for name, flags in (("cached", ""), ("anew", "--recompute")):
        file = tmp_path / f"{name}.json"
        more = f"{PADDED} {flags} --num-samples 2 --out-seq-length 12 --top_p 0.9 --genfile {file}"
        script = checkout / "tools" / "generate_samples_gpt.py"
        runs.succeeded(runs.run(script, [*runs.flags(data), *more.split()]))
        texts.append([json.loads(line) for line in file.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert max(sample["length"] for sample in texts[0]) == 12
