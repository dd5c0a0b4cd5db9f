"""The doctor asks DeepSpeed for its accelerator, in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.doctor import subprocess_checks

ACCELERATOR = """
import os

class Accelerator:
    _name = os.environ["DS_ACCELERATOR"]

    def communication_backend_name(self):
        return "gloo"

def get_accelerator():
    print("Setting ds_accelerator")
    return Accelerator()
"""


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder with a package of DeepSpeed's name, which this process and those it starts find."""
    (tmp_path / "deepspeed").mkdir()
    (tmp_path / "deepspeed" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")  # a run sets it to its own device
    return tmp_path / "deepspeed"


def test_its_accelerator_is_that_of_a_run(package: Path) -> None:
    (package / "accelerator.py").write_text(ACCELERATOR)
    assert subprocess_checks.deepspeed() == {"accelerator": "cpu", "communication": "gloo"}


def test_one_that_does_not_start_is_told(package: Path) -> None:
    (package / "accelerator.py").write_text("raise ImportError('it is broken')")
    assert subprocess_checks.deepspeed() == {"error": "ImportError: it is broken"}


def test_none_is_no_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess_checks.early_import, "is_absent", lambda name: True)
    assert subprocess_checks.deepspeed() == {}
