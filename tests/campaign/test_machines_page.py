"""The page of trials over several machines: each is on it, also those that failed or were not run."""

from __future__ import annotations

import importlib

import pytest

from tests.campaign.machines import trials
from tests.conftest import ROOT


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("machines_page")


def row(*faults):
    return {"faults": [*faults], "seconds": 9, "date": "2026-01-02", "commit": "abc1234"}


def test_every_trial_has_a_row_and_a_column(script) -> None:
    for name in trials():
        harm, layout, command = script.parsed(name)
        assert harm in script.HARMS
        assert layout in script.LAYOUTS
        assert layout in script.COLUMNS
        assert command in script.COMMANDS


def test_failed_trials_and_those_not_run_are_named(script) -> None:
    text = script.page(
        {"cut/driver": row(), "cut-npu-pipeline/driver": row("machine 1 lived on")},
        ["cut/driver", "cut-npu-pipeline/driver", "killed/train"],
        {
            "train/0.19.2/s3": row("losses differ"),
            "pretrain_gpt.py/0.20.0/msc/killed": row(),
            "train/0.19.2/s3/one": row(),
        },
    )
    assert "1 of 2 trials ended as they should; not: `cut-npu-pipeline/driver` (machine 1 lived on)." in text
    assert "Not run: `killed/train`." in text
    assert "| NPU PP 2 | **no** | - | - | - | - |" in text
    assert "2026-01-02, commit abc1234: 2." in text
    assert "| `train` | 0.19.2 | `s3://` | no: losses differ | 2026-01-02, abc1234 |" in text
    assert "| `cut` | 1 | 0 | 0 | 0 | 0 | 0 | 1 | 0 |" in text  # both were tried, whatever came of it
    assert "| `train` | 0.19.2 | `s3://` | yes (one process) |" in text
    killed = "| `pretrain_gpt.py` | 0.20.0 | `msc://` | yes (only the kill in a save) |"
    assert killed in text
