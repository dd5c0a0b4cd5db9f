"""One rank of a world: pytest in a forked process, which tells the runner after each test how it went."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import functools
import json
import os
import re
import signal
import sys
import tempfile
import traceback
import types
from collections.abc import Iterable, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from megatron_npu.devices.redirect import callers
from megatron_npu.upstream import megatrons

from .results import FAILED, PASSED, SKIPPED

parallel_state: Any = None
with contextlib.suppress(ImportError):  # bigscience's Megatron-DeepSpeed has no megatron.core
    from megatron.core import parallel_state

TEXT_LIMIT = 200
_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")
_INSTALLED = re.compile(r"/[^\s\"']*/site-packages/")  # a path of this machine
# Upstream's conftest fetches data from the network into /opt/data when this module lets it: by the first name
# from core_v0.16.0 on, by the second in core_v0.14.0 and core_v0.15.
_DOWNLOAD = "tests.test_utils.python_scripts.download_unit_tests_dataset"
_DOWNLOADERS = ("download_and_extract_asset", "get_oldest_release_and_assets")


class Reporter:
    """The pytest plugin of a rank: sends one message per event, and waits after a failure.

    A failure in one rank can leave its peers inside a collective, so the runner decides whether this world
    goes on or is replaced.
    """

    def __init__(
        self, connection: Connection, selected: Iterable[str] | None, barred: Mapping[str, str], log: int
    ) -> None:
        self.connection, self.log = connection, log
        self.selected = None if selected is None else set(selected)
        self.barred = barred
        self.phases: list[pytest.TestReport] = []

    def send(self, **message: object) -> None:
        self.connection.send_bytes(json.dumps(message).encode())

    def pytest_collection_modifyitems(self, items: list[pytest.Item], config: pytest.Config) -> None:
        if dist.is_initialized():  # lend_group's
            dist.destroy_process_group()
        names = {item: name_of(item.nodeid) for item in items}
        reasons = {name: self._reason_not_to_run(name) for name in names.values()}
        dropped = [item for item, name in names.items() if reasons[name] is not None]
        items[:] = [item for item in items if reasons[names[item]] is None]
        config.hook.pytest_deselected(items=dropped)
        barred = {name: reason for name, reason in reasons.items() if reason}
        self.send(event="collected", names=[names[item] for item in items], barred=barred)

    def _reason_not_to_run(self, name: str) -> str | None:
        """Return why a test must not start, nothing ("") where it was not asked for, None where it runs."""
        if self.selected is not None and name not in self.selected:
            return ""
        return next((why for pattern, why in self.barred.items() if re.match(pattern, name)), None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        # Upstream's CI has two sessions: one without --experimental, one with it of the tests marked so.
        item.config.option.experimental = item.get_closest_marker("experimental") is not None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Let go of a test's object behind it.

        pytest keeps it to the end of the session, and with it a model whose layers hold their groups. A group
        ends its threads only when nothing refers to it any more.
        """
        try:
            return (yield)
        finally:
            for name in ("_instance", "_obj"):
                vars(item).pop(name, None)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.send(event="unreadable", outcome=FAILED, text=summary(report))
        elif report.skipped:
            self.send(event="unreadable", outcome=SKIPPED, text=summary(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.phases.append(report)
        if report.failed:  # pytest itself would show it at the end, to which a broken world does not come
            os.write(self.log, f"\n{report.nodeid}\n{report.longreprtext}\n".encode())
        if report.when != "teardown":
            if report.failed:  # a teardown with a barrier may never end after this
                self.send(event="failing", name=name_of(report.nodeid), text=summary(report))
            return
        phases, self.phases = self.phases, []
        told = next((r for r in phases if r.failed), None) or next((r for r in phases if r.skipped), None)
        outcome = PASSED if told is None else FAILED if told.failed else SKIPPED
        self.send(
            event="test",
            name=name_of(report.nodeid),
            outcome=outcome,
            text="" if told is None else summary(told),
            seconds=round(sum(phase.duration for phase in phases), 3),
        )
        release_groups()
        if outcome == FAILED:
            self.connection.recv_bytes()  # the verdict "go on"; a world that must not go on is killed


def name_of(nodeid: str) -> str:
    """Return the part of a node id that names the test within its file."""
    return nodeid.partition("::")[2]


def summary(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Return one line that says why: of a failure its exception and place, of a skip its reason."""
    representation = report.longrepr
    if isinstance(representation, tuple):
        return representation[2].removeprefix("Skipped: ")[:TEXT_LIMIT]
    crash = getattr(representation, "reprcrash", None)
    if crash is None:
        lines = str(representation).strip().splitlines()
        return next((line[4:] for line in reversed(lines) if line.startswith("E  ")), lines[-1])[:TEXT_LIMIT]
    message = _INSTALLED.sub("", _ADDRESS.sub("0x…", " ".join(crash.message.split())))
    message = message.replace(tempfile.gettempdir(), "$TMPDIR")[:TEXT_LIMIT]
    return f"{message} ({Path(crash.path).name}:{crash.lineno})"


_created: list[object] = []  # groups that parallel_state made and nothing has released


def note_groups() -> None:
    """Remember each group that ``parallel_state`` makes, from megatron-core 0.9 on."""
    create = getattr(parallel_state, "create_group", None)
    if create is None:
        return

    @functools.wraps(create)
    def create_group(*args: Any, **kwargs: Any) -> Any:
        group = create(*args, **kwargs)
        if group is not None and group is not dist.GroupMember.NON_GROUP_MEMBER:
            _created.append(group)
        return group

    parallel_state.create_group = create_group


def release_groups() -> None:
    """Release the groups of a model-parallel layout that is gone.

    ``destroy_model_parallel`` forgets them without releasing them. With gloo each keeps threads that wake
    a hundred times a second: after fifty tests eight ranks would have thousands.
    """
    if not _created or parallel_state.model_parallel_is_initialized() or not dist.is_initialized():
        return
    for group in _created:
        if group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)
    _created.clear()


def forbid_downloads() -> None:
    """Put a module in place of upstream's downloader that leaves network and /opt/data alone."""
    module = types.ModuleType(_DOWNLOAD)

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("the unit tests' data set is not fetched here")

    for name in _DOWNLOADERS:
        setattr(module, name, refuse)
    sys.modules[_DOWNLOAD] = module


def lend_group() -> None:
    """Make a process group for the time of the collection, in which this is rank 1.

    The conftest of deepspeedai's Megatron-DeepSpeed 4efb479d asks for the rank before there is a group, and
    as rank 0 for its data-parallel group, too: no test could be collected.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)


def let_asyncio_wait_for_coroutines() -> None:
    """Let ``asyncio.wait`` take them as up to Python 3.10: bigscience's tests start every script with it."""
    wait = asyncio.wait

    async def wait_for_tasks(awaited: Iterable[Any], **options: Any) -> Any:
        return await wait([asyncio.ensure_future(one) for one in awaited], **options)

    asyncio.wait = wait_for_tasks


def show_device_to_tests() -> None:
    """Answer upstream's test files that there is an accelerator: here it is the device under test.

    On a CPU the plug-in tells Megatron that CUDA is not available, because its branches on that are right;
    the tests ask in order to skip themselves, and would hide half of what they can judge. What a tensor is
    (``is_cuda``, ``type()``) they are told as Megatron is.
    """
    told = torch.cuda.is_available

    @functools.wraps(told)
    def is_available() -> bool:
        return "/tests/unit_tests/" in sys._getframe(1).f_code.co_filename or told()

    class AndTests(callers.Callers):
        def __contains__(self, module: str) -> bool:
            file = getattr(sys.modules.get(module), "__file__", None)
            return super().__contains__(module) or "/tests/unit_tests/" in (file or "")

    torch.cuda.is_available = is_available
    callers.SEE_CUDA_TENSORS = AndTests(
        *callers.SEE_CUDA_TENSORS.names, why="upstream's tests stand for Megatron"
    )


def let_tests_select_nccl() -> None:
    """Let upstream's test files select NCCL for symmetric memory where torch has no NCCL.

    From main's d98e8a64 on, a fixture of all tests of FSDP's second version does so where there is an
    accelerator, whether or not the test uses symmetric memory. A test that does fails when it allocates some.
    """
    select: Any = symm_mem.set_backend

    @functools.wraps(select)
    def set_backend(name: str) -> None:
        if dist.is_nccl_available() or "/tests/unit_tests/" not in sys._getframe(1).f_code.co_filename:
            select(name)

    symm_mem.set_backend = set_backend


def main(
    connection: Connection,
    arguments: list[str],
    selected: list[str] | None,
    barred: Mapping[str, str],
    log: Path,
) -> None:
    """Run pytest with ``arguments`` in this process, which ends with it; its output goes to ``log``."""
    os.setsid()  # whatever a test starts ends with this rank
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.register(signal.SIGUSR1, file=output)  # the runner asks where a test hangs
    forbid_downloads()
    let_asyncio_wait_for_coroutines()
    if megatrons.find().name == "megatron_deepspeed_core":
        lend_group()
    show_device_to_tests()
    let_tests_select_nccl()
    note_groups()
    reporter = Reporter(connection, selected, barred, output)
    try:
        reporter.send(event="end", status=int(pytest.main(arguments, plugins=[reporter])))
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        os._exit(0)
