"""``tools/generate_samples_gpt.py``, with keys in a cache and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.adaptors.megatron_deepspeed.pretraining import samples
from tests.adaptors.megatron_lm import runs

pytest.importorskip("deepspeed")


def test_a_cache_changes_no_text(checkout, data, tmp_path):
    texts = []
    for name, flags in (("cached", ""), ("anew", "--recompute")):
        file = tmp_path / f"{name}.json"
        script, *words = samples(checkout, data, file, flags)
        runs.succeeded(runs.run(Path(script), words))
        texts.append([json.loads(line) for line in file.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert max(sample["length"] for sample in texts[0]) == 12
