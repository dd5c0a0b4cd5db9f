"""End checkpoint writer processes together with the training, and prevent a hang of the training if they
fail.

Patches ``megatron.core.dist_checkpointing.strategies.filesystem_async``.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import gc
import multiprocessing
import os
import pickle
import queue
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import IO, Any

from megatron_npu.adaptors.megatron_core.decorators import NOT_FIXED, around, replace
from megatron_npu.process import interruption

_PR_SET_PDEATHSIG = 1  # prctl(2)
_WRITER = "megatron.core.dist_checkpointing.strategies.filesystem_async"


class ResultsFile:
    """Queue between a process and its children, stored in an unnamed file.

    The queue has the methods of a multiprocessing manager's queue that upstream uses: ``put`` and
    ``get_nowait``. Forked children share the file, and spawned children receive it by pickle. Nothing remains
    of it once the last process ends, however it ends.
    """

    def __init__(self) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._read = 0

    def put(self, item: Any) -> None:
        """Append an item to the queue."""
        content = pickle.dumps(item)
        record = len(content).to_bytes(8, "big") + content
        with self._locked() as fd:
            written, end = 0, os.fstat(fd).st_size
            while written < len(record):
                written += os.pwrite(fd, record[written:], end + written)

    def get_nowait(self) -> Any:
        """Return the first item that this process has not read yet.

        Raises:
            queue.Empty: there is no such item.
        """
        with self._locked() as fd:
            length = os.pread(fd, 8, self._read)
            if not length:
                raise queue.Empty
            begin, size = self._read + 8, int.from_bytes(length, "big")
            content = os.pread(fd, size, begin)
            self._read = begin + size
            if self._read == os.fstat(fd).st_size:  # a run of weeks saves often
                os.ftruncate(fd, 0)
                self._read = 0
        return pickle.loads(content)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        fd = self._file.fileno()
        fcntl.lockf(fd, fcntl.LOCK_EX)  # a lock of the process: forked ones share the open file
        try:
            yield fd
        finally:
            fcntl.lockf(fd, fcntl.LOCK_UN)

    def __getstate__(self) -> dict[str, Any]:
        return {"fd": reduction.DupFd(self._file.fileno()), "read": self._read}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._file = os.fdopen(state["fd"].detach(), "w+b", buffering=0)
        self._read = state["read"]


_of_this_process = functools.cache(ResultsFile)

_queue = functools.partial(
    replace,
    upstream_bug=True,
    until=NOT_FIXED,
    why=(
        "the writers' queue lives in a spawned process (270 MB), which outlives a killed training run and"
        " keeps its output open; if interrupted while that process starts, the run hangs at its end"
    ),
)


@_queue(f"{_WRITER}:_get_write_results_queue", versions="<0.17")
def results_queue() -> ResultsFile:
    """Return the results queue of this process, which works without a manager process."""
    return _of_this_process()


@_queue(f"{_WRITER}:get_write_results_queue", versions=">=0.17")
def results_queue_of_no_process(mp_mode: str = "spawn") -> ResultsFile:
    """Return the result of ``results_queue()``, ignoring all arguments.

    ``mp_mode`` is ignored, because no manager process is started.
    """
    return results_queue()


_processes = functools.partial(
    replace,
    f"{_WRITER}:FileSystemWriterAsync.write_preloaded_data_multiproc",
    upstream_bug=True,
    until=NOT_FIXED,
    why="upstream waits forever for a writer that was killed, for example by the out-of-memory killer",
)


@_processes(versions=">=0.13,<0.17")  # which writes in threads
def write_in_processes(
    transform_list: Any, use_msc: bool, rank: int, write_buckets: Any, global_results_queue: Any
) -> None:
    """Write each bucket of a checkpoint in its own forked process.

    Queue the results by bucket number, or the first error.

    Args:
        transform_list: torch's transforms.
        use_msc: whether a multi-storage client writes the files.
        rank: the rank of this process.
        write_buckets: the file, storage key and data of each bucket.
        global_results_queue: the queue for the results.
    """
    keywords = {"use_msc": True} if use_msc else {}
    collecting = gc.isenabled()
    gc.disable()  # as upstream does: it fails in a process that was forked from one that uses a CUDA device
    try:
        global_results_queue.put(_written(transform_list, write_buckets, keywords))
    finally:
        if collecting:
            gc.enable()


@_processes(versions="<0.13")
def write_in_processes_without_client(
    transform_list: Any, rank: int, write_buckets: Any, global_results_queue: Any
) -> None:
    """Call ``write_in_processes`` for upstream versions without a multi-storage client."""
    write_in_processes(transform_list, False, rank, write_buckets, global_results_queue)


@around(
    f"{_WRITER}:FileSystemWriterAsync.retrieve_write_results",
    versions="<0.14",  # whose writer of a whole checkpoint is one more process
    upstream_bug=True,
    until="0.14, which passes the error to all ranks",
    why=(
        "if the writing process was killed, upstream reports 'results_queue should not be empty' with a "
        "traceback"
    ),
)
def results_or_reason(original: Callable[[Any], Any], self: Any) -> Any:
    """Return the results of the writer, or raise an OSError that describes why its process failed.

    Raises:
        OSError: the writing process was killed, or could not write.
    """
    try:
        return original(self)
    except RuntimeError as error:
        if isinstance(error.__context__, queue.Empty):
            said = (
                "the process that writes this rank's files exited without a message (it may have been "
                "killed by SIGKILL because memory ran out)"
            )
            raise ChildProcessError(said) from error
        raise OSError(str(error)) from error


def _written(transforms: Any, buckets: list[Any], keywords: dict[str, Any]) -> dict[int, Any] | Exception:
    """Wait until all processes have ended, and return the results of all buckets by number, or the first
    error.
    """
    writers: list[tuple[Any, Connection]] = []
    try:
        for number, bucket in enumerate(buckets):
            with interruption.deferred():
                writers.append(_start(number, bucket, transforms, keywords))
        outcomes = [_received(*writer, bucket[0]) for writer, bucket in zip(writers, buckets, strict=True)]
    except OSError as error:  # other ranks wait for word of this one: it is reported, not raised
        return RuntimeError(f"no process could be started to write {buckets[0][0]}: {error}")
    finally:
        _end_all(writers)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    return failures[0] if failures else dict(enumerate(outcomes))


def _start(number: int, bucket: Any, transforms: Any, keywords: dict[str, Any]) -> tuple[Any, Connection]:
    """Start the process that writes a bucket.

    Return the process and the connection for its result.
    """
    fork = multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    process = fork.Process(target=_write, args=(number, bucket, transforms, keywords, sender), daemon=True)
    process.start()
    sender.close()  # its end is then the process's alone: where that dies, receiving ends
    return process, receiver


def _write(number: int, bucket: Any, transforms: Any, keywords: dict[str, Any], sender: Connection) -> None:
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the training decides
    end_with_parent()  # else it fills the disk for a training that is no more
    FileSystemWriterAsync.write_preloaded_data(
        transforms, number, bucket, _Sender(sender), _Counter(), True, **keywords
    )


def _received(process: Any, receiver: Connection, path: Any) -> Any:
    """Return the results or the error that the writer process sent.

    Return an error if the process died first.
    """
    try:
        _, outcome = receiver.recv()
    except EOFError:
        process.join()
        outcome = RuntimeError(f"the process that writes {path} {end_of(process.exitcode)}")
    process.join()
    return outcome


def _end_all(writers: list[tuple[Any, Connection]]) -> None:
    """Kill the processes that are still writing after Ctrl-C or an error, because their files would be
    useless.
    """
    for process, receiver in writers:
        if process.is_alive():
            process.kill()
            process.join()
        receiver.close()


def end_of(code: int) -> str:
    """Describe how a process ended, given its exit code."""
    if code >= 0:
        return f"exited with {code}"
    name = signal.Signals(-code).name
    return f"was killed by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"


class _Sender:
    """Queue-like object that sends the result of upstream's writer over a connection."""

    def __init__(self, connection: Connection) -> None:
        self.put = connection.send


class _Counter:
    """Counter object that upstream's writer requires, but that no process waits for."""

    def get(self) -> None:
        """Do nothing, because no process waits for this counter.

        Upstream's counter would remove one item.
        """

    def task_done(self) -> None:
        """Do nothing, because no process waits for this counter.

        Upstream's counter would mark one item as done.
        """


def end_with_parent() -> None:
    """Make the kernel end this process when its parent ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        parent = multiprocessing.parent_process()
        if parent is not None and not parent.is_alive():  # it has ended before the kernel was told
            os.kill(os.getpid(), signal.SIGKILL)
