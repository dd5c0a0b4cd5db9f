"""What the plug-in's own Python costs in a step, in instructions (benchmarks/overhead.py)."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT

# docs/records/benchmarks.md has what is recorded; a step of the smallest shapes takes about 55,000.
MOST = 80_000


@pytest.mark.usefixtures("single_process")
def test_a_step_of_two_layers_takes_few_instructions_of_ours(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    overhead = pytest.importorskip("overhead")
    training = overhead.prepare_megatron_core("gpt", overhead.LAYERS, 16, hidden_size=64)
    for _ in range(2):
        overhead.step(training)
    first, second = (overhead.instructions(lambda: overhead.step(training)) for _ in range(2))
    assert first == second, "counted, not measured"
    assert 1_000 < first.total() < MOST, first.most_common(5)


def test_instructions_of_other_code_do_not_count(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    overhead = pytest.importorskip("overhead")

    def run() -> None:
        sum(number * 2 for number in range(10))

    assert not overhead.instructions(run)
    ten = overhead.instructions(run, __file__).total()
    assert ten > 30
