"""The short form of the trials with two accounts: a few of each kind, where a second account can be made."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import cast

import pytest

from tests.campaign.accounts import __main__ as command
from tests.campaign.accounts import rooms, signals, trials
from tests.campaign.accounts.trials import DONE, EITHER, REFUSED, Ended, Later, Try, Verdict
from tests.support import processes, tiny

pytest.importorskip("megatron.core")
TRACEBACK = 'Traceback (most recent call last):\n  File "x"\n'
SAID = "megatron-npu x: error: y"


@pytest.mark.parametrize(
    ("end", "expected", "marks", "verdict"),
    [
        (Ended(2, "", SAID), REFUSED, [], "refused"),
        (Ended(2, "", SAID), REFUSED, ["here"], "executed"),
        (Ended(2, "", SAID, has_left=True), REFUSED, [], "orphan"),
        (Ended(None, "", SAID, is_hung=True), EITHER, [], "hung"),
        (Ended(1, "", TRACEBACK + SAID), REFUSED, [], "traceback"),
        (Ended(2, "", f'{SAID}\n  File "x", line 3, in load\n    y()'), REFUSED, [], "traceback"),
        (Ended(-11, "", SAID), EITHER, [], "crash"),
        (Ended(139, "", SAID), EITHER, [], "crash"),
        (Ended(1, "", "what?"), REFUSED, [], "unnamed"),
        (Ended(2, "", SAID), DONE, [], "denied"),
        (Ended(0, "fine", ""), REFUSED, [], "silent"),
        (Ended(0, "fine", "warning: odd"), REFUSED, [], "done"),
        (Ended(0, "3 skipped (for npu, …) | number of skipped iterations: 0", ""), REFUSED, [], "silent"),
        (Ended(0, "", "2026-11-28:09:08:52 WARNING  [_cli.utils:188] Overwriting"), REFUSED, [], "silent"),
        (Ended(0, "fine", ""), EITHER, [], "done"),
        (Ended(2, "\x1b[2J", SAID), REFUSED, [], "control"),
    ],
)
def test_each_fault_is_noticed(end: Ended, expected: str, marks: list[str], verdict: str) -> None:
    assert trials.verdict_on(end, expected, marks) == verdict


@pytest.mark.parametrize("keys", [("place", "what"), ("group", "trial")])
def test_a_round_goes_on_without_the_trials_of_a_file(
    keys: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        ("environment", "pretrain: umask 0, modes"),
        ("environment", "pretrain: umask 777"),
        ("outputs", "plain"),
        ("signals", "doctor: SIGINT after 0.5 s, in the middle"),
        ("signals", "doctor: SIGINT after 1.2 s, it had ended before"),
    ]
    file = tmp_path / "trials.jsonl"
    file.write_text("".join(f"{json.dumps(dict(zip(keys, row, strict=True)))}\n" for row in rows))

    def tries(room: object) -> list[Try | Later]:
        seconds = ("0.5", "1.2", "3.0")
        later = [Later(f"doctor: SIGINT after {each} s", lambda: _verdict("")) for each in seconds]
        words = ("pretrain: umask 0", "pretrain: umask 777", "plain")
        return [*later, *(Try("environment", each, []) for each in words)]

    monkeypatch.setattr(signals, "tries", tries)
    monkeypatch.setattr(command, "_made", lambda room, each: _verdict(each.what))
    args = command.parsed(["--only", "signals", "--without", str(file)])
    made = [each.what for each in command.verdicts(cast(rooms.Room, None), args)]
    assert made == ["doctor: SIGINT after 3.0 s", "pretrain: umask 0", "plain"]


def _verdict(what: str) -> Verdict:
    return Verdict("a place", what, "done", 0, 0.0, "")


@pytest.mark.skipif(bool(rooms.reason_against()), reason=rooms.reason_against())
def test_hostile_files_of_another_account_are_refused(tmp_path: Path) -> None:
    told = tmp_path / "trials.jsonl"
    words = ["--only", "texts,models,datasets", "--first", "4", "--json", str(told)]
    done = processes.run(
        [sys.executable, "-P", "-m", "tests.campaign.accounts", *words],
        env=tiny.environment(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in told.read_text().splitlines()]
    assert len(rows) == 12
    assert {row["verdict"] for row in rows} <= {"refused", "done"}
    assert sum(row["verdict"] == "refused" for row in rows) > 9
