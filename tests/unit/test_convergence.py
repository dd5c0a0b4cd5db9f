"""``benchmarks/convergence.py`` and its page: what a row holds, and what the page makes of it."""

from __future__ import annotations

import importlib.util
import json
import random

import pytest

from benchmarks import convergence
from megatron_npu.options.switches import SHARDINGS
from tests.conftest import ROOT

SCRIPT = ROOT / "scripts" / "convergence_page.py"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("convergence_page", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def result(rows):
    known = {"date": "2026-01-02T03:04", "commit": "abc1234", "seeds": 2}
    machine = {"versions": {"torch": "2"}, "machine": {"processor": "one"}}
    return {**known, **machine, "steps": {"bert": 5, "gpt": 6}, "rows": rows, "asked": [*rows, "gpt: later"]}


def seeds(*pairs):
    known = {"first": 0.7, "last": 0.2}
    return numbered([{**known, "validation": loss, "accuracy": part} for loss, part in pairs])


def numbered(found):
    return {str(seed): one for seed, one in enumerate(found)}


def test_the_page_compares_seed_by_seed_with_the_spread_of_seeds(script):
    rows = {
        "bert: none": seeds((0.3, 0.9), (0.5, 0.8), (0.4, 0.85)),  # the last is for the spread alone
        "bert: zero-1": seeds((0.31, 0.9), (0.48, 0.81)),
        "bert: fsdp": seeds((0.6, 0.9), (0.7, 0.8)),
        "bert: zero-2": seeds((0.3, 0.79), (0.5, 0.68)),
    }
    text = script.page(result(rows))
    assert "| none | 0.7000 | 0.2000 | 0.4000 | - | - | 0.8500 | - | - | - |" in text
    assert (
        "| zero-1 | 0.7000 | 0.2000 | 0.3950 | -5.0e-03 | -2.0e-02 | 0.8550 | +5.0e-03 | +1.0e-02 | yes |"
    ) in text
    (line,) = [line for line in text.splitlines() if line.startswith("| fsdp |")]
    assert line.endswith("| **no** |")
    (line,) = [line for line in text.splitlines() if line.startswith("| zero-2 |")]
    assert line.endswith("| **no** |")
    assert "Another seed changes the loss by 0.2000 and accuracy by 0.1000" in text
    assert "Not measured yet: gpt: later." in text
    assert "on 2026-01-02 at commit abc1234 with torch 2, on a machine with one" in text


def test_a_kind_without_accuracy(script):
    plain = [{"first": 5.0, "last": 2.0, "validation": value} for value in (2.0, 2.1)]
    text = script.page(result({"gpt: none": numbered(plain), "gpt: fsdp": numbered(plain[::-1])}))
    assert "| fsdp | 5.0000 | 2.0000 | 2.0500 | +0.0e+00 | +1.0e-01 | yes |" in text


def test_what_was_measured_holds_and_was_learned(script):
    """The page's own numbers: each row was learned, and the criterion holds; rows to come are named."""
    found = json.loads(script.RESULT.read_text())
    assert found["asked"] == list(convergence.ROWS)
    assert {len(mine) for name, mine in found["rows"].items() if convergence.ROWS[name]} == {3}
    for name, mine in found["rows"].items():
        for one in mine.values():
            assert one["validation"] < (0.3 if name.startswith("bert") else 0.7 * one["first"]), name
            assert one.get("accuracy", 1.0) > 0.95, name
    assert "**no**" not in script.page(found)


def test_every_switch_of_the_documents_command_lines_has_a_row():
    words = " ".join(convergence.ROWS.values())
    for name in set(SHARDINGS) - {"none"}:
        assert f"--{name}-memory-optimization" in words
    for switch in ("--mixed-precision bf16", "--mixed-precision fp16", "--checkpoint-activations"):
        assert switch in words
    for switch in ("--onnx-runtime-training", "--fused-ops", "--tensor-model-parallel-size", "--pipeline-"):
        assert switch in words


def test_a_seed_gives_the_same_rows_and_one_label_in_fifty_is_wrong():
    rows = [convergence.row(drawn) for drawn in [random.Random(3)] for _ in range(2000)]
    again = random.Random(3)
    assert rows[:5] == [convergence.row(again) for _ in range(5)]
    words = [f"{one['sentence1']} {one['sentence2']}" for one in rows]
    told = [int(text.count("good") > text.count("bad")) for text in words]
    right = [one["label"] == label for one, label in zip(rows, told, strict=True)]
    assert 0.97 < sum(right) / len(right) < 0.99
