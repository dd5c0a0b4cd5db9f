"""Ctrl-C at moments at which Python drops its exception."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

import pytest

from megatron_npu.process import interruption
from tests.support import processes


class _Garbage:
    """Is collected while Ctrl-C comes."""

    def __del__(self) -> None:
        signal.raise_signal(signal.SIGINT)


def _collected() -> None:
    _Garbage()


_forked = False


def _at_fork() -> None:
    if _forked:
        signal.raise_signal(signal.SIGINT)


os.register_at_fork(after_in_parent=_at_fork)


def _fork() -> None:
    global _forked
    _forked = True
    try:
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
    finally:
        _forked = False


def _wait_for_it() -> None:
    time.sleep(60)  # which a signal ends


@pytest.mark.parametrize("happens", [_collected, _fork])
def test_what_python_drops_comes_again(
    happens: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt), interruption.heard():  # noqa: PT012
        happens()
        _wait_for_it()
    assert "ignored" not in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_other_dropped_errors_are_told_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __del__(self) -> None:
            raise ValueError

    told: list[type[BaseException]] = []
    monkeypatch.setattr("sys.unraisablehook", lambda dropped: told.append(dropped.exc_type))
    with interruption.heard():
        Broken()
    assert told == [ValueError]


def test_one_around_a_fork_comes_at_the_end() -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt), interruption.deferred():  # noqa: PT012
        _fork()
        reached = True
    assert reached


def test_one_in_a_block_that_fails_comes_too() -> None:
    """It was lost: a fork that failed, say, was told, and the run went on or tried again."""
    with pytest.raises(KeyboardInterrupt) as caught, interruption.deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        raise OSError("no more processes")
    assert isinstance(caught.value.__context__, OSError)


def test_a_block_that_fails_without_one_fails_as_it_does() -> None:
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(OSError, match="no more processes"), interruption.deferred():
        raise OSError("no more processes")
    assert signal.getsignal(signal.SIGINT) is before


def test_one_that_is_ignored_stays_so() -> None:
    """As in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interruption.deferred():
            within = signal.getsignal(signal.SIGINT)
            _fork()
        assert within == signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


_PRESSED = """
import signal, sys
class Pressed:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron_npu.patching":
            signal.raise_signal(signal.SIGINT)
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Pressed())
sys.argv[0] = "/bin/" + sys.argv[1]
import megatron_npu
"""


@pytest.mark.parametrize(("program", "code"), [("megatron-npu", 130), ("train.py", -signal.SIGINT)])
def test_ctrl_c_while_a_command_is_imported_is_one_line(program: str, code: int) -> None:
    """A script that imports the package keeps Python's traceback."""
    done = processes.run([sys.executable, "-c", _PRESSED, program], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert (done.stderr == "megatron-npu: interrupted\n") == (code == 130), done.stderr
