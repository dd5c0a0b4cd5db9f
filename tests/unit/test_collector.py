"""The garbage collector rests while a command starts, and only then."""

import sys

import pytest

from tests.support import processes

_REST = "import gc, sys, types; from megatron_npu.process import collector; collector.rest(); "


def _run(code: str) -> str:
    return processes.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_a_fresh_process_rests_until_it_resumes() -> None:
    assert _run(f"{_REST} a = gc.isenabled(); collector.resume(); print(a, gc.isenabled())") == "False True\n"


def test_what_was_there_is_not_looked_through_again() -> None:
    assert int(_run(f"{_REST} collector.resume(); print(gc.get_freeze_count())")) > 1000


def test_a_process_with_torch_does_not_rest() -> None:
    before = "import sys, types; sys.modules['torch'] = types.ModuleType('torch'); "
    frozen = "before = gc.get_freeze_count(); "  # Python 3.12 begins with some
    told = _run(
        f"{before}{_REST}{frozen}collector.resume(); print(gc.isenabled(), gc.get_freeze_count() - before)"
    )
    assert told == "True 0\n"


@pytest.mark.parametrize("arguments", [["pretrain", "--no-such-flag"], ["check", "--help"]])
def test_the_collector_runs_again_when_a_command_has_ended(arguments: list[str]) -> None:
    tried = f"try: cli.main({arguments})\nexcept SystemExit: pass\n"
    ran = f"import gc; from megatron_npu.commands import cli\n{tried}"
    assert _run(f"{ran}print(gc.isenabled())").endswith("True\n")
