"""Help texts and static commands where torch is not installed, with every Python that is here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import packaging
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.upstream import megatrons
from tests.conftest import ROOT
from tests.support import bytecode, processes, warm

sys.path.insert(0, str(ROOT / "scripts"))
import every_python

MINORS = (10, 11, 12, 13)
HELPS = """
import contextlib, io, json
from megatron_npu.commands import cli

def helps():
    texts = {}
    for command in cli.COMMANDS:
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            cli.main([command, "--help"])
        texts[command] = text.getvalue()
    return texts

found = [helps()]
try:
    import torch, megatron.core
except ModuleNotFoundError:
    pass
else:
    assert torch.ones(2).sum() == 2  # nothing inert is left behind
    found.append(helps())
print(json.dumps(found))
"""


def interpreter(minor: int) -> str:
    """Return this Python, or another that is installed; skip where there is none."""
    found = every_python.interpreter(f"3.{minor}")
    if found is None:
        pytest.skip(f"Python 3.{minor} is not installed")
    return found


@pytest.fixture(params=MINORS, ids=lambda minor: f"3.{minor}")
def bare(request: pytest.FixtureRequest, tmp_path: Path):
    """A function that runs an interpreter which finds this project and packaging, and no other package."""
    (tmp_path / "packaging").symlink_to(Path(packaging.__file__).parent)
    environment = {"PATH": os.defpath, "PYTHONPATH": f"{ROOT}:{tmp_path}", **bytecode.kept()}
    python = interpreter(request.param)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return processes.run(
            [python, "-S", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    return run


def helps(done: subprocess.CompletedProcess[str]) -> list[dict[str, str]]:
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_every_help_text(bare) -> None:
    (texts,) = helps(bare("-c", HELPS))
    assert texts.keys() == cli.COMMANDS.keys()
    for command, text in texts.items():
        assert text.startswith(f"usage: megatron-npu {command}"), command
    assert "--hidden-size N" in texts["pretrain"]


def test_a_help_text_is_the_same_with_torch(megatron: Path) -> None:
    done = processes.run([sys.executable, "-c", HELPS], capture_output=True, text=True, check=False)
    before, after = helps(done)
    assert before == after


@pytest.fixture(scope="module")
def megatron() -> Path:
    """Where the Megatron lies that is installed."""
    try:
        return megatrons.find().root
    except UsageError as error:
        pytest.skip(f"no Megatron is installed: {error}")


@pytest.fixture(scope="module")
def reports(megatron: Path) -> dict[str, Any]:
    """The command lines of static commands, and what they report with torch."""
    lines = [f"{command} --json --megatron {megatron}" for command in ("check", "ledger --static")]
    return {line: json.loads(_with_torch(line)) for line in lines}


def _with_torch(line: str) -> str:
    command = [sys.executable, "-m", "megatron_npu", *line.split()]
    return warm.run(command, env=os.environ, capture_output=True, text=True, check=True).stdout


def test_static_commands(bare, reports: dict[str, Any]) -> None:
    for line, report in reports.items():
        without = bare("-m", "megatron_npu", *line.split())
        assert without.returncode == 0, without.stderr
        assert json.loads(without.stdout) == report
    assert bare("-m", "megatron_npu", "--version").stdout.startswith("megatron_npu ")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("pretrain --num-layers 2", "megatron-npu pretrain: error: the package torch is not installed, but "),
        ("ledger", "megatron-npu ledger: error: there is no Megatron on the Python path; "),
        ("preprocess --input x", "is not installed, but it is declared as a dependency of megatron_npu. "),
    ],
)
def test_what_computes_says_what_is_missing(bare, line: str, told: str) -> None:
    done = bare("-m", "megatron_npu", *line.split())
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_what_a_script_misses_is_the_script_s_own_error(bare, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import absent_package\n")
    done = bare("-m", "megatron_npu", "run", "script.py")
    assert done.returncode == 1
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'absent_package'\n")
