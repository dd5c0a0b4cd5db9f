"""``tools/generate_samples_gpt.py``, with keys in a cache and without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support import bytecode, stock_lm, tiny
from tests.support.deepspeed_pretraining import RARELY, samples
from tests.support.simulated import run_simulated, unavailable

pytest.importorskip("deepspeed")


@pytest.mark.parametrize("device", ["cpu", pytest.param("npu", marks=RARELY)])
def test_a_cache_changes_no_text(checkout, data, tmp_path, device):
    if device == "npu" and unavailable():
        pytest.skip(unavailable())
    texts = []
    for name, flags in (("cached", ""), ("anew", "--recompute")):
        file = tmp_path / f"{name}.json"
        script, *words = samples(checkout, data, file, flags)
        if device == "npu":
            result = run_simulated(*tiny.command("run", script, *words), **bytecode.elsewhere())
        else:
            result = stock_lm.run(Path(script), words)
        stock_lm.succeeded(result)
        texts.append([json.loads(line) for line in file.read_text().splitlines()])
    assert texts[0] == texts[1]
    assert max(sample["length"] for sample in texts[0]) == 12
