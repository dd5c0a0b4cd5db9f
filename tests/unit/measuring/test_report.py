"""Tables: mean and deviation, OOM and NA with their reasons, and which way a row goes."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest

from megatron_npu.measuring import plot
from megatron_npu.measuring.machine import Machine
from megatron_npu.measuring.plan import Plan
from megatron_npu.measuring.ranks import FAILED, MEASURED, NA, OOM, Outcome
from megatron_npu.measuring.report import Report, Row, aligned
from megatron_npu.measuring.schemes import SUITES, Scheme
from megatron_npu.measuring.sizes import GPT
from tests.conftest import ROOT

CPU = Machine("cpu", "cpu", None, True, False, True, 2, frozenset({"avx512_bf16"}))
NPU = Machine("simulated npu", "npu", 8, True, True, False, 2, frozenset())
CUDA = Machine("cuda", "cuda", 4, False, False, False, 64, frozenset())
MB = 1 << 20


def measured(*throughputs: float, peak: float = 100) -> Outcome:
    return Outcome(
        MEASURED, "", list(throughputs), [int(peak * MB), 1], 5322240, "a processor", "", [0.2, 0.3]
    )


def report(*outcomes: Outcome | None, machine: Machine = CPU, suite: str = "3d") -> Report:
    rows = [Row(scheme) for scheme in SUITES[suite].schemes]
    for row, outcome in zip(rows, outcomes, strict=False):
        row.outcome = outcome
    plan = Plan(
        suite=SUITES[suite],
        machine=machine,
        size=GPT.size("gpt-tiny"),
        ranks=2,
        micro_batch_size=1,
        global_batch_size=2,
        steps=20,
        repeat=5,
    )
    return Report(plan, {"torch": "2"}, rows)


def test_mean_and_deviation_of_the_repeats():
    row = Row(Scheme(("a",)), measured(2, 4, 4, 4, 5, 5, 7, 9))
    assert row.throughput == 5
    assert row.deviation == pytest.approx((32 / 7) ** 0.5)  # of a sample: n - 1
    assert row.uncertainty == pytest.approx((32 / 7 / 8) ** 0.5 / 5)
    assert Row(Scheme(("a",)), measured(3)).deviation == 0


def test_the_peak_is_that_of_the_largest_rank():
    assert Row(Scheme(("a",)), measured(1, peak=12.5)).peak == 12.5


def test_a_table_as_the_document_prints_it():
    text = report(
        measured(9, 11), measured(4, 6, peak=50), Outcome(OOM, "too much"), Outcome(NA, "no")
    ).markdown()
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert ["1", "1", "10.00 +/- 1.41", "100", "250.0"] in lines
    assert ["2", "1", "5.00 +/- 1.41", "50", "250.0"] in lines
    assert ["4", "1", "OOM [1]", "OOM [1]", "OOM [1]"] in lines
    assert ["1", "2", "NA [2]", "NA [2]", "NA [2]"] in lines
    assert ["1", "4", *["not measured"] * 3] in lines
    assert "[1] too much  \n[2] no  \n" in text
    assert "5322240 parameters" in text


def test_a_simulated_device_has_no_times():
    found = report(measured(9.123, 11), measured(4, 6, peak=50), machine=NPU)
    text = found.markdown()
    assert "9.12" not in text
    assert "10.06" not in text
    assert "its times mean nothing" in text
    assert "peak as in the document" in text
    assert "samples_per_second" not in json.dumps(found.to_json())


@pytest.mark.parametrize(
    ("throughputs", "peak", "said"),
    [
        ((5.0, 5.1), 45, "as in the document"),
        ((20.0, 20.1), 45, "peak as in the document; throughput not as in the document"),
        ((10.0, 10.1), 100.5, "peak about the same; throughput about the same"),
        ((5.0, 5.1), 200, "peak not as in the document; throughput as in the document"),
    ],
)
def test_the_direction_of_a_row(throughputs, peak, said):
    found = report(measured(10.0, 10.1), measured(*throughputs, peak=peak))
    base, row = found.rows[:2]
    assert found.direction(row, base) == said


def test_a_row_without_a_number_in_the_document_has_no_direction():
    peaks = {0: 101, 1: 100, 2: 90, 4: 50, 6: 300}
    outcomes = [measured(10, peak=peaks[row]) if row in peaks else None for row in range(7)]
    found = report(*outcomes, suite="sharding")
    said = {row: found.direction(found.rows[row], found.rows[1]) for row in peaks}
    assert said[0] == "OOM in the document; peak about the same here"
    assert said[4] == "NA in the document; peak lower here"
    assert said[6] == "not in the document; peak higher here"
    assert re.search(r"mixed \+ zero-3 +\| NA +\| ", found.markdown())


@pytest.mark.parametrize("machine", [CPU, NPU, CUDA], ids=lambda machine: machine.device)
@pytest.mark.parametrize("suite", list(SUITES))
def test_every_row_goes_the_documents_way_or_says_why_not(suite, machine):
    """Rows that are three times as fast and large as the first, a third of it, and nearly the same."""
    schemes = SUITES[suite].schemes
    first = next(number for number, scheme in enumerate(schemes) if scheme.printed.peak is not None)
    for times in itertools.product((3, 1 / 3, 1.001), repeat=2):
        faster, larger = times
        other = measured(10 * faster, 10.1 * faster, peak=100 * larger)
        outcomes = [measured(10, 10.1) if number == first else other for number in range(len(schemes))]
        text = report(*outcomes, machine=machine, suite=suite).markdown()
        rows = dict(zip([s for s in schemes if s is not schemes[first]], directions(text), strict=True))
        for scheme, said in rows.items():
            mark = re.search(r"\[(\d+)\]$", said)
            assert bool(mark) != goes_that_way(scheme, schemes[first], times, machine), (scheme.name, said)
            if mark:
                assert re.search(rf"^\[{mark[1]}\] (peak|throughput|no OOM here): ", text, re.M), text


def directions(text: str) -> list[str]:
    """Return the last column of the second table."""
    lines = text.splitlines()
    begin = next(number for number, line in enumerate(lines) if "| direction" in line)
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return [row.strip("| ").rpartition("|")[2].strip() for row in rows]


def goes_that_way(scheme: Scheme, first: Scheme, here: tuple[float, float], machine: Machine) -> bool:
    """Return whether speed and memory are on the document's side, as far as it has numbers."""
    if scheme.printed.peak is None:
        return scheme.printed.word != "OOM"  # NA, or not in the document: nothing to follow
    there = [scheme.printed.throughput / first.printed.throughput, scheme.printed.peak / first.printed.peak]
    sides = [0 if abs(ratio - 1) < 0.02 else ratio - 1 for ratio in (*there, *here)]
    if machine.simulated:
        sides[0] = sides[2] = 0  # no times
    return all((a > 0) == (b > 0) and (a < 0) == (b < 0) for a, b in zip(sides[:2], sides[2:], strict=True))


def test_the_recorded_tables_leave_no_row_unexplained():
    paths = sorted((ROOT / "benchmarks" / "results" / "bench").glob("*.md"))
    assert {path.name.partition("-cpu")[0].partition("-sim")[0] for path in paths} >= set(SUITES)
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for said in directions(text) if "| direction" in text else ():
            explained = re.search(r" \[\d+\]$", said) or said in (
                "as in the document",
                "peak as in the document",
            )
            assert explained or said.startswith(("NA in", "not in")), (path.name, said)


def test_every_recorded_table_has_its_files_and_its_picture():
    for path in sorted((ROOT / "benchmarks" / "results" / "bench").glob("*.json")):
        assert path.with_suffix(".md").is_file(), path
        if any(row["outcome"] == "measured" for row in json.loads(path.read_text())["rows"]):
            assert path.with_suffix(".png").is_file(), f"{path}: run scripts/bench_page.py --pictures"


def test_what_the_processor_cannot_is_said():
    lacking = replace(CPU, features=frozenset({"avx2"}))
    assert "bf16, for which it has no instructions" in report(machine=lacking).markdown()
    assert "no instructions" not in report().markdown()
    assert "with 1 thread each" in report().markdown()
    assert "the load was 3.0 on 2 cores" in report(machine=replace(CPU, load=3)).markdown()
    assert "Other programs" not in report().markdown()


def test_json_says_everything():
    rows = report(measured(9, 11), Outcome(FAILED, "why")).to_json()["rows"]
    assert rows[0]["samples_per_second"] == 10
    assert rows[0]["samples_per_second_of_repeats"] == [9, 11]
    assert rows[0]["peak_bytes_of_ranks"] == [100 * MB, 1]
    assert rows[1] == {
        "tensor parallel": "2",
        "pipeline parallel": "1",
        "outcome": "failed",
        "reason": "why",
    }
    assert rows[2]["outcome"] == "not measured"


def test_columns_are_aligned():
    assert aligned([["a", "bcd"], ["ef", "g"]]) == "| a  | bcd |\n| -- | --- |\n| ef | g   |"


def test_a_picture(tmp_path):
    table = json.loads(json.dumps(report(measured(9, 11), Outcome(OOM, "too much")).to_json()))
    plot.draw(table, tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")
