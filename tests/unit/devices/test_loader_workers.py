"""Loaders with workers: what a worker hands over has no name, and one that is killed is told in one line."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import select
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing import connection, process, resource_sharer, synchronize
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from megatron_npu.base.errors import LoaderWorkerError
from megatron_npu.devices import loader_workers, nameless_sharing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memfd_create")
_IN_CREATE, _IN_MOVED_TO = 0x100, 0x80  # inotify(7)
EVENT = struct.Struct("iIII")


class Rows(Dataset):
    """Numbers and tensors, and a view of memory that all samples share."""

    def __init__(self) -> None:
        self.shared = torch.arange(16.0)

    def __len__(self) -> int:
        return 16

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"row": torch.full((3,), number), "number": float(number), "view": self.shared[number:]}


def first(samples: list[dict[str, Any]]) -> dict[str, Any]:
    """Collate as users do, into tensors that nobody has shared yet."""
    return {"rows": torch.stack([sample["row"] for sample in samples]), "view": samples[0]["view"]}


def stacked(samples: list[dict[str, Any]]) -> dict[str, Any]:
    return torch.utils.data.default_collate([{**sample, "view": 0} for sample in samples])


@pytest.fixture
def nameless() -> Iterator[None]:
    loader_workers.begin()
    yield
    loader_workers.end()


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for temporary files that has none yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.delitem(process.current_process()._config, "tempdir", raising=False)
    return tmp_path


@pytest.fixture
def made() -> Iterator[Callable[[], list[str]]]:
    """What tells which names have been made in /dev/shm, however soon they were gone."""
    libc = ctypes.CDLL(None, use_errno=True)
    watch = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    assert libc.inotify_add_watch(watch, b"/dev/shm", _IN_CREATE | _IN_MOVED_TO) >= 0

    def names() -> list[str]:
        found = []
        while select.select([watch], [], [], 0)[0]:
            events, at = os.read(watch, 1 << 16), 0
            while at < len(events):
                length = EVENT.unpack_from(events, at)[3]
                at += EVENT.size + length
                found.append(events[at - length : at].rstrip(b"\0").decode())
        return found

    yield names
    os.close(watch)


needs_moves = pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
    reason="the case: this torch moves a tensor to shared memory in C++ alone, under a name",
)


def batches(collate: Any, workers: int) -> Any:
    return iter(DataLoader(Rows(), batch_size=2, num_workers=workers, collate_fn=collate))


@needs_moves
@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("collate", [stacked, first])
def test_a_batch_passes_without_a_name_in_shared_memory(collate: Any, made: Callable[[], list[str]]) -> None:
    """torch makes ``torch_PID_…`` and takes it away in the next call: killed between them, it stays."""
    loader = batches(collate, 2)
    numbers = [worker.pid for worker in loader._workers]
    seen = [{name: value.clone() for name, value in batch.items()} for batch in loader]
    assert [name for name in made() if any(f"_{number}_" in name for number in numbers)] == []
    for batch, expected in zip(seen, batches(collate, 0), strict=True):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], expected[name]) for name in batch)


@pytest.mark.usefixtures("nameless")
def test_a_worker_that_is_killed_is_named_and_leaves_nothing(temporary: Path) -> None:
    loader = batches(first, 2)
    next(loader)
    worker = loader._workers[1].pid

    os.kill(worker, signal.SIGKILL)
    while not any(str(worker) in death for death in loader_workers._noted):
        time.sleep(0.01)  # its signal comes in any line, and ends none
    with pytest.raises(
        LoaderWorkerError, match=rf"^DataLoader worker .*\b{worker}\b.*Killed\. The machine may"
    ) as told:
        next(loader)
    assert "\n" not in str(told.value)
    assert "--num-workers" in str(told.value)
    loader._shutdown_workers()
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("nameless")
def test_a_worker_that_is_killed_while_it_sends_is_not_waited_for() -> None:
    """What it has begun to send is more than a pipe holds, and the rest never comes."""
    loader = iter(DataLoader([b"x" * 2**20], batch_size=None, num_workers=1))  # type: ignore[arg-type]
    worker = loader._workers[0].pid
    assert loader._data_queue._reader.poll(60)
    os.kill(worker, signal.SIGSTOP)
    threading.Timer(0.3, os.kill, (worker, signal.SIGKILL)).start()
    with pytest.raises(LoaderWorkerError, match=rf"\b{worker}\b"):
        next(loader)
    loader._shutdown_workers()


def holding(_: int) -> None:
    """Take, in a worker, the lock that torch takes around each look at the event which ends the workers."""
    event = next(each for each in process.current_process()._args if isinstance(each, synchronize.Event))
    event._cond.acquire()


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("seen", [True, False])
def test_a_worker_that_is_killed_with_a_lock_in_its_hands_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, seen: bool
) -> None:
    """A semaphore outlives who took it: torch asks for it where it finds a dead worker, and at the end."""
    monkeypatch.setattr(loader_workers, "_UNTIL_SEEN", 0.1)
    loader = iter(DataLoader(Rows(), num_workers=2, worker_init_fn=holding, timeout=0.1))
    event = loader._workers_done_event._event
    while event._cond.acquire(timeout=0):  # until a worker has it
        event._cond.release()
        time.sleep(0.01)
    if not seen:
        monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", lambda: None)
    numbers = [str(worker.pid) for worker in loader._workers]
    for worker in loader._workers:
        worker.kill()
    while seen and not any(number in " ".join(loader_workers._noted) for number in numbers):
        time.sleep(0.01)
    for worker in loader._workers:
        worker.join()
    with pytest.raises(LoaderWorkerError, match="Killed" if seen else "exited unexpectedly"):
        next(loader)
    loader._shutdown_workers()
    assert event.is_set()


@pytest.mark.usefixtures("nameless")
@pytest.mark.parametrize("dies", [True, False])
def test_a_connection_that_breaks_is_a_dead_worker_or_an_error_of_the_data(
    monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    """A broken pipe would end a run without a word, as where the reader of its output has gone."""
    loader = batches(first, 1)
    next(loader)
    worker = loader._workers[0]

    def broken(*_: Any) -> Any:
        if dies:
            os.kill(worker.pid, signal.SIGKILL)
            assert connection.wait([worker.sentinel], 60)
        raise BrokenPipeError

    monkeypatch.setattr(loader, "_try_get_data", broken)
    monkeypatch.setattr(loader_workers, "_UNTIL_SEEN", 0.1)
    # its death is not seen yet
    monkeypatch.setattr(signal_handling, "_error_if_any_worker_fails", lambda: None)
    with pytest.raises(LoaderWorkerError if dies else BrokenPipeError):
        next(loader)
    monkeypatch.undo()
    loader._shutdown_workers()


@pytest.mark.usefixtures("nameless")
def test_an_error_of_the_queue_makes_no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch counts the descriptors that are left with files, which stay if a signal ends the process then."""
    loader = batches(first, 1)
    next(loader)
    made: list[Any] = []
    monkeypatch.setattr(tempfile, "NamedTemporaryFile", lambda *_, **__: made.append(0))

    def broken(timeout: float) -> Any:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(loader._data_queue, "get", broken)
    with pytest.raises(OSError, match="Too many open files"):
        next(loader)
    monkeypatch.undo()
    loader._shutdown_workers()
    assert made == []


@needs_moves
@pytest.mark.usefixtures("nameless")
def test_a_tensor_that_is_shared_stays_where_its_views_look() -> None:
    whole = torch.arange(6)
    view = whole[2:]
    whole.share_memory_()
    assert view.is_shared()
    descriptor, size = whole.untyped_storage()._share_fd_cpu_()
    assert os.readlink(f"/proc/self/fd/{descriptor}").startswith("/memfd:megatron_npu-tensor")
    other = torch.UntypedStorage._new_shared_fd_cpu(descriptor, size)
    torch.tensor([], dtype=torch.int64).set_(other)[3] = 33
    assert (whole.tolist(), view.tolist()) == ([0, 1, 2, 33, 4, 5], [2, 33, 4, 5])
    assert torch.empty(0).share_memory_().tolist() == []


@pytest.mark.usefixtures("nameless")
def test_who_goes_away_in_a_hand_over_or_is_another_user_gets_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    pipe = resource_sharer.DupFd(write)
    with socket.socket(socket.AF_UNIX) as gone:
        gone.connect(pipe._id[0])
    with monkeypatch.context() as patch:
        patch.setattr(nameless_sharing, "_user_at", lambda _: os.geteuid() + 1)
        with pytest.raises((EOFError, ConnectionError)):
            connection.Client(pipe._id[0], authkey=process.current_process().authkey)
    os.write(taken := pipe.detach(), b"here")
    assert os.read(read, 9) == b"here"
    resource_sharer._resource_sharer.stop()
    assert capfd.readouterr().err == ""
    for descriptor in (read, write, taken):
        os.close(descriptor)


@needs_moves
def test_at_the_end_torch_and_python_are_as_they_were() -> None:
    def looked_at() -> list[object]:
        storage = vars(torch.UntypedStorage)
        loader = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
        return [
            storage.get("_new_using_fd_cpu"),
            storage["_share_fd_cpu_"],
            resource_sharer._resource_sharer,
            loader._next_data,
        ]

    before = looked_at()
    loader_workers.begin()
    loader_workers.begin()
    assert all(now is not then for now, then in zip(looked_at(), before, strict=True))
    loader_workers.end()
    assert looked_at() == before


def test_a_worker_whose_parent_is_killed_before_it_begins_ends(nameless: None) -> None:
    reading, writing = os.pipe()

    def kill_parent(number: int) -> None:
        parent = os.getppid()
        os.kill(parent, signal.SIGKILL)
        while os.getppid() == parent:
            time.sleep(0.01)
        os.write(writing, b"alone")

    def load() -> None:
        next(iter(DataLoader(Rows(), num_workers=1, worker_init_fn=kill_parent)))

    loading = multiprocessing.get_context("fork").Process(target=load)
    loading.start()
    os.close(writing)
    loading.join()
    assert os.read(reading, 16) == b"alone"
    assert select.select([reading], [], [], 60)[0], "it is still there"
    assert os.read(reading, 16) == b""  # whoever could write has ended
    os.close(reading)
