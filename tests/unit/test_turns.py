"""Steps of benchmarks that alternate (``benchmarks/turns.py``)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
STEPS = """
import json, os, sys
sys.path.insert(0, {benchmarks!r})
import turns
turn = turns.Turn()
for number in range(int(sys.argv[2])):
    with open(sys.argv[1], "a") as order:
        order.write(sys.argv[3])
    turn.take()
print(json.dumps({{"said": sys.argv[3], "variable": os.environ.get("OMP_NUM_THREADS")}}))
"""


@pytest.fixture(scope="module")
def turns():
    spec = importlib.util.spec_from_file_location("turns", BENCHMARKS / "turns.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def program(turns, tmp_path):
    """A program that writes its letter to one file in each step."""

    def make(letter: str, steps: int, **options):
        script = STEPS.format(benchmarks=str(BENCHMARKS))
        command = [sys.executable, "-S", "-c", script, str(tmp_path / "order"), str(steps), letter]
        return turns.Program(letter, command, **options)

    return make


def test_steps_alternate_after_each_program_has_warmed_up_alone(turns, program, tmp_path) -> None:
    first, second = program("a", 5), program("b", 5, environment={"OMP_NUM_THREADS": "3"})
    turns.measure([first, second], 3)
    assert (tmp_path / "order").read_text() == "aabb" + "ab" + "ba" + "ab"
    assert len(first.seconds) == len(second.seconds) == 3
    assert min(first.seconds) > 0
    assert second.said == {"said": "b", "variable": "3"}


def test_a_ratio_is_of_neighbouring_steps(turns) -> None:
    # the machine was half as fast in the second step of both
    quick = turns.Program("quick", [], seconds=[1.0, 2.0, 1.0])
    slow = turns.Program("slow", [], seconds=[3.0, 6.0, 3.1])
    assert turns.ratio(quick, slow) == pytest.approx(3.0)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_program_that_ends_early_is_named(turns, program, steps) -> None:
    with pytest.raises(RuntimeError, match=r"^b (ended early|has fewer steps than the others)"):
        turns.measure([program("a", 4), program("b", steps)], 2)
