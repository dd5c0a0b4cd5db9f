"""``benchmarks/convergence.py`` and its page: what a row holds, and what the page makes of it."""

from __future__ import annotations

import importlib.util
import json
import sys

from benchmarks import convergence
from tests.conftest import ROOT
from tests.support import tiny


def test_two_rows_of_a_few_steps(tmp_path):
    """Two ranks: the first one shared out or not, the losses are the same."""
    output = tmp_path / "found.json"
    script = ROOT / "benchmarks" / "convergence.py"
    words = f"--steps 3 --seeds 1 --only none zero-1 --json {output}".split()
    done = tiny.run_python([sys.executable, str(script), *words])
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    found = json.loads(output.read_text())
    assert found["rows"]["none"] == found["rows"]["zero-1"]
    (row,) = found["rows"]["none"]
    assert set(row) == {"first", "last", "validation", "accuracy"}
    assert 0.5 < row["first"] < 0.9
    assert 0.2 < row["accuracy"] < 0.8
    assert found["commit"]


def test_the_page_has_the_largest_difference_of_the_seeds(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    spec = importlib.util.spec_from_file_location(
        "convergence_page", ROOT / "scripts" / "convergence_page.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    seeds = ({"first": 0.7, "last": 0.2, "validation": 0.3, "accuracy": 0.9}, {"first": 0.7, "last": 0.2})
    plain = [seeds[0], {**seeds[1], "validation": 0.5, "accuracy": 0.8}]
    other = [{**plain[0], "validation": 0.31}, {**plain[1], "validation": 0.48, "accuracy": 0.81}]
    found = {"rows": {"none": plain, "mixed bf16": other}, "date": "2026-01-02T03:04", "commit": "abc1234"}
    found |= {
        "versions": {"torch": "2"},
        "machine": {"processor": "one"},
        "steps": 5,
        "batch": 32,
        "seeds": 2,
    }
    text = module.page(found)
    assert "| none | 0.7000 | 0.2000 | 0.4000 | 0.8500 | - | - |" in text
    assert "| mixed bf16 | 0.7000 | 0.2000 | 0.3950 | 0.8550 | -2.0e-02 | +1.0e-02 |" in text
    assert "loss by up to 0.2000 and the accuracy by up to 0.1000" in text
    assert "2026-01-02, commit abc1234" in text


def test_every_switch_of_the_documents_command_line_has_a_row():
    words = set().union(*convergence.ROWS.values())
    assert words == {
        "mixed_precision",
        "sharding",
        "checkpoint_activations",
        "fused_ops",
        "graph_optimization",
    }
    shardings = {row["sharding"] for row in convergence.ROWS.values() if "sharding" in row}
    assert shardings == {"zero-1", "zero-2", "zero-3", "fsdp"}
