"""The comparison of full and dry runs goes on where an earlier one ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks import plan_devices
from tests.sim import dry_grid, dry_record
from tests.support import processes

EQUAL = {"ranks": [{"rank": 0, "equal": True}], "commit": "12345678"}


@pytest.mark.parametrize(
    ("row", "commit", "done"),
    [
        (EQUAL, "12345678", True),
        (EQUAL | {"ranks": [{"rank": 0, "equal": False}]}, "12345678", True),  # it would differ again
        (None, "12345678", False),
        (EQUAL, "87654321", False),
        (EQUAL | {"commit": "12345678+"}, "12345678+", False),  # nobody knows of which change
        (EQUAL | {"ranks": [{"rank": 0, "failed": "no time"}]}, "12345678", False),
    ],
)
def test_a_layout_is_compared_once_per_commit(row: dict | None, commit: str, done: bool) -> None:
    assert dry_grid.is_done(row, commit) is done


def test_rows_of_several_processes_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "grid.json"
    dry_grid.write(path, "gpt", EQUAL)
    dry_grid.write(path, "llama", EQUAL)
    assert list(json.loads(path.read_text())) == ["gpt", "llama"]


def test_the_commit_is_the_last_one_of_what_matters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}

    def git(*words: str, day: int = 1) -> str:
        dates = {"GIT_COMMITTER_DATE": f"2026-01-0{day}T00:00:00Z"}
        command, environment = ["git", "-C", str(tmp_path), *words], os.environ | names | dates
        done = processes.run(command, env=environment, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    def commit(name: str, day: int) -> str:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(str(day))
        git("add", "-A")
        git("commit", "-qm", name, day=day)
        return git("rev-parse", "--short=8", "HEAD")

    monkeypatch.setattr(dry_grid, "CHECKOUTS", tmp_path / "checkouts")
    git("init", "-q")
    commit("package/other.py", 1)
    own = commit("package/job.py", 2)
    commit("package/plan/report.py", 3)
    lists = (("package", ":(exclude)package/plan"), ("package/other.py",))
    assert dry_grid.commit(lists) == own
    (tmp_path / "package" / "plan" / "report.py").write_text("changed")
    assert dry_grid.commit(lists) == own
    (tmp_path / "package" / "job.py").write_text("changed")
    assert dry_grid.commit(lists) == f"{own}+"


def test_blocks_without_a_partner_are_those_of_the_operations_that_differ() -> None:
    npu = [(1000, ""), (1000, "attention"), (1 << 20, ""), (5000, "residual norm")]
    cuda = [(1000, ""), ((1 << 20) + 512, ""), (32 << 20, "cuBLAS")]
    assert plan_devices.unpaired(npu, cuda) == {"cuBLAS": 0, "attention": 1000, "residual norm": 5000}
    assert plan_devices.unpaired(cuda, npu) == {"cuBLAS": 32 << 20, "attention": 0, "residual norm": 0}


def test_the_record_of_the_two_devices_counts_what_is_within_two_per_cent() -> None:
    held = {name: [0, 64 << 20] for name in plan_devices.DIFFERENT}
    row = {"npu": 100, "cuda": 103, "differ": 3.0, "held": held, "day": "today", "commit": "abc"}
    said = plan_devices.lines({"one": row | {"rest_differ": -2.0}, "two": row | {"rest_differ": 2.1}})
    assert "today, commit abc: 1 of 2 are." in said
    assert said[-1].endswith("| 0.0, 67.1 | +2.10 % |")


def test_the_record_says_which_layouts_run_again_have_the_bytes_of_the_table() -> None:
    def row(peak: int, *, equal: bool = True, commit: str) -> dict:
        full = {"peak": peak, "reserved": 20}
        rank = {"rank": 0, "full": full, "dry": full | {"peak": peak + (not equal)}, "equal": equal}
        return {"ranks": [rank], "day": "today", "commit": commit}

    found = {name: row(10, commit="abc") for name in ("gpt", "llama", "mla")}
    repeated = {"gpt": row(10, commit="def"), "llama": row(11, commit="def")}
    repeated["mla"] = row(10, equal=False, commit="def")
    said = dry_record.lines(found, repeated)
    assert "today, commit abc, torch 2.13: 3 of 3 layouts are equal on all ranks." in said
    assert (
        "Run again: today, commit def: 2 of 3 layouts are equal on all ranks, 1 of them with the "
        "bytes of the table." in said
    )
    assert "Not equal, or with other bytes: `llama`, `mla`." in said
    assert not any("again" in line for line in dry_record.lines(found))


def test_the_record_lists_single_jobs() -> None:
    row = {"code": 2, "seconds": 9, "seen": "one | line", "day": "today", "commit": "abc"}
    said = dry_record.commands({"too large": row})
    assert any("today, commit abc." in line for line in said)
    assert said[-1] == "| too large | 2 | 9 | one / line |"
