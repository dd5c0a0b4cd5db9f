"""Fixtures for all tests: data that is there on some machines only."""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import hypothesis
import psutil
import pytest

from megatron_npu.base import malloc
from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons
from tests.support import bytecode, held_rows, skipped, warm
from tests.support.processes import LONGEST
from tests.support.trees import core_tag
from tests.support.warm import one_device

ROOT = Path(__file__).resolve().parent.parent

# Workers of xdist share the cores: with a thread for each core in each worker, operations take twice as long.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch.compile, here and in what tests start: plain C++ rather than vector instructions, each kind of which
# inductor first tries out in a process of its own, and no pool of processes that compile.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# Triton without a GPU (tests/support/interpreted.py); it looks when it is imported, which torch does soon.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Under nohup, what tests start would ignore SIGHUP, as it should. A handler of this process is not inherited.
if (
    signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGHUP, lambda *_: None)

# Arrow's allocator, which main's data sets import, would start a thread, which no parent of forks may have.
os.environ.setdefault("JE_ARROW_MALLOC_CONF", "background_thread:false")

# What somebody has set for programs of their own is not for what tests start: with PYTHONUNBUFFERED processes
# that share a pipe write parts of lines between each other's, and a launcher's words make all of them ranks.
_LAUNCHERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
for _name in [*os.environ]:
    if _name.startswith("TORCHELASTIC_") or _name in (*_LAUNCHERS, "PYTHONUNBUFFERED", "PYTHONWARNINGS"):
        del os.environ[_name]
os.environ.setdefault("OMP_PROC_BIND", "false")  # on a quiet machine ranks would be bound to cores
# The reference of a long attention has tensors of 70 MB. The C library would map each of them and have its
# pages cleared: a third of the time of the operations' tests.
malloc.keep_freed_memory()
# both named in the environment before workers start
bytecode.keep(ROOT / ".pytest_cache" / "bytecode")
warm.home()
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"  # where servers of tests are


@contextlib.contextmanager
def on_a_leash(process: subprocess.Popen[Any], seconds: float = LONGEST) -> Iterator[None]:
    """Kill a process, and what it has started, at the end of the block, or after so many seconds."""

    def kill() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            parent = psutil.Process(process.pid)
            for each in [parent, *parent.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    timer = threading.Timer(seconds, kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if process.poll() is None:
            kill()
        process.wait(60)


_T = TypeVar("_T")


def wait_until(
    condition: Callable[[], _T],
    process: subprocess.Popen[Any] | None = None,
    told: Callable[[], object] = lambda: "",
) -> _T:
    """Return what a condition gives, as soon as Python takes it for true, however long that takes.

    Args:
        condition: is asked again and again.
        process: must not end before, if one is given.
        told: is shown if it does, or nothing comes at all.
    """
    end = time.monotonic() + LONGEST
    while True:
        ended = process is not None and process.poll() is not None
        if found := condition():
            return found
        assert not ended, told()
        assert time.monotonic() < end, told()
        time.sleep(0.02)


# Timing is no matter of tests: a busy machine may take seconds for an example. And what fixtures hold here
# serves all examples of a test. Where a commit is judged (.ci/run sets CI), examples are the same each time.
hypothesis.settings.register_profile(
    "untimed",
    deadline=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("untimed")

# Tests leave process groups of gloo as garbage. A forked child that collects one joins threads which it does
# not have: it crashes or hangs. Garbage of the parent is none of its business.
os.register_at_fork(after_in_child=gc.freeze)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the collector leave out what is imported, and found: a full collection would take half of a second.

    Commands ask for one, as Megatron does where it loads, and pytest asks for five at its end.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        _name_what_is_no_module()
        if "torch.distributed.distributed_c10d" in sys.modules:
            one_device.share()
        gc.freeze()
        gc.enable()
        _left_out["modules"] = len(sys.modules)


def _name_what_is_no_module() -> None:
    """Tell ``inspect`` which files of this process's stack are no module's.

    For each of them, whoever reads the stack would look through all modules.
    """
    files = (frame.f_code.co_filename for frame, _ in traceback.walk_stack(None))
    absent = {os.path.abspath(file): "" for file in files if file.startswith("<")}
    inspect.modulesbyfile.update(absent)  # type: ignore[attr-defined]


_left_out = {"modules": 0}  # that there were when the collector was last told to leave out what there is
_MANY = 200  # further ones: Megatron and transformers, which tests import, are 2,000
_left_over = {"threads": 1}  # of process groups that are still in use
_IDLE = (
    150  # further ones: a run in this process leaves about 35, and a collection takes a quarter of a second
)
_THREADS = Path("/proc/self/task")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, object, object]:
    """Let the collector leave out what tests have imported, and what a file's tests have left behind.

    A conversion asks for four full collections, a run of the driver for two. With all the modules, and with
    the graphs that torch.compile keeps, each took a quarter of a second.
    """
    done = yield
    _end_idle_threads()
    file_is_done = nextitem is None or nextitem.path != item.path
    if file_is_done or len(sys.modules) - _left_out["modules"] > _MANY:
        gc.collect()
        gc.freeze()
        _left_out["modules"] = len(sys.modules)
    return done


def _end_idle_threads() -> None:
    """Collect process groups that tests have left as garbage.

    Each has a thread of its own, and one that looks for messages is shared (``one_device``).
    """
    if not _THREADS.is_dir():  # not Linux
        return
    threads = len(os.listdir(_THREADS))
    if threads - _left_over["threads"] > _IDLE:
        _forget_embeddings()
        gc.collect()
        threads = len(os.listdir(_THREADS))
        if threads - _left_over["threads"] > _IDLE:  # something held them when an earlier file was done
            gc.unfreeze()
            gc.collect()
            gc.freeze()
            threads = len(os.listdir(_THREADS))
    else:
        threads = min(threads, _left_over["threads"])
    _left_over["threads"] = threads


def _forget_embeddings() -> None:
    """Clear the caches of upstream's rotary embeddings, each of which holds a group.

    ``RotaryEmbedding.forward`` of megatron-core has an ``lru_cache`` with 32 entries, of which the embedding
    itself is a part.
    """
    for name, module in [*sys.modules.items()]:
        if name.startswith("megatron.core.") and name.endswith("rotary_pos_embedding"):
            for value in vars(module).values():
                clear = getattr(getattr(value, "forward", None), "cache_clear", None)
                if clear is not None:
                    clear()


# A shell lets what it starts in the background ignore Ctrl-C, and children inherit that; tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _environment_restored() -> Iterator[None]:
    """What Megatron puts into the environment of this process must not reach what later tests start."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


# of a module too: its fixtures run before those of its tests, and may start Megatron as well
environment_ends_with_the_module = pytest.fixture(autouse=True, scope="module")(_environment_restored)
environment_ends_with_the_test = pytest.fixture(autouse=True)(_environment_restored)


@pytest.fixture(scope="module")
def warm_children() -> Iterator[None]:
    """What multiprocessing spawns has torch already: of no use where that is what a test looks at."""
    with warm.spawning():
        yield


class Vocabulary(NamedTuple):
    """The two files of a GPT-2 tokenizer."""

    vocab_file: Path
    merge_file: Path


@pytest.fixture(scope="session")
def gpt2_vocab() -> Vocabulary:
    """GPT-2's own vocabulary: from ../shared/data, or as `make demo` fetches it; else the test is skipped."""
    for directory in (ROOT.parent / "shared" / "data", ROOT / "runs" / "demo" / "data"):
        found = Vocabulary(directory / "gpt2-vocab.json", directory / "gpt2-merges.txt")
        if all(path.is_file() for path in found):
            return found
    pytest.skip("no gpt2-vocab.json and gpt2-merges.txt in ../shared/data or runs/demo/data (make demo)")


def checkout(name: str, version: str) -> Path:
    """Return the Megatron-LM tree of an upstream: MEGATRON_LM_PATH, or a clone of scripts/get_megatron.sh.

    The test is skipped where neither is that upstream.
    """
    named = os.environ.get("MEGATRON_LM_PATH")
    for path in [*([Path(named)] if named else []), *sorted((ROOT / "checkouts").glob("*"))]:
        try:
            found = megatrons.find(path)
        except UsageError:
            continue
        if (found.name, found.version) == (name, version) and (path / "pretrain_gpt.py").is_file():
            return path.resolve()
    tree = core_tag(version) if name == "megatron_core" else version
    command = f"bash scripts/get_megatron.sh checkouts {tree}"
    pytest.skip(f"no tree of {name} {version}: run `{command}`, or set MEGATRON_LM_PATH to one")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say at the end what the suite could not look at, by group."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = [report.longrepr[-1] for report in reports if isinstance(report.longrepr, tuple)]
    for line in skipped.summary(reasons):
        terminalreporter.line(line)
    _tell_of_requirements(terminalreporter)


def _tell_of_requirements(terminalreporter: pytest.TerminalReporter) -> None:
    page = (ROOT / "docs" / "records" / "requirements.md").read_text(encoding="utf-8")
    stats = terminalreporter.stats
    reports = {
        "passed": [report.nodeid for report in stats.get("passed", [])],
        "skipped": [report.nodeid for report in stats.get("skipped", [])],
        "failed": [report.nodeid for kind in ("failed", "error") for report in stats.get(kind, [])],
    }
    found = held_rows.outcomes(held_rows.named(page), reports)
    for line in held_rows.summary(page, found):
        terminalreporter.line(line)
    if file := os.environ.get("TEST_RECORD_ROWS"):
        held_rows.record(Path(file), found)
