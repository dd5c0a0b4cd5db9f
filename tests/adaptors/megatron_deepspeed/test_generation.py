"""``tools/generate_samples_gpt.py``, with keys in a cache and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import stock_lm
from tests.support.deepspeed_pretraining import samples

pytest.importorskip("deepspeed")


def test_a_cache_changes_no_text(checkout, data, tmp_path):
    texts = []
    for name, flags in (("cached", ""), ("anew", "--recompute")):
        file = tmp_path / f"{name}.json"
        script, *words = samples(checkout, data, file, flags)
        stock_lm.succeeded(stock_lm.run(Path(script), words))
        texts.append([json.loads(line) for line in file.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert max(sample["length"] for sample in texts[0]) == 12
