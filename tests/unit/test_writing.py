"""Whether a load or a save that stands still gets on: by the bytes that come from the disk or go out."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_npu.watchdog import place, sending, stillness
from megatron_npu.watchdog.elsewhere import Elsewhere
from megatron_npu.watchdog.writing import Writing

MIB = 2**20


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file that no memory holds."""
    path = tmp_path / "shard"
    with path.open("wb") as stream:
        stream.write(os.urandom(MIB))
        stream.flush()
        os.fsync(stream.fileno())
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def _read_from_disk() -> int:
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes:"))


def test_a_load_gets_on_by_what_comes_from_the_disk(file: Path) -> None:
    progress = Writing()
    assert not progress.gets_on(reads=True)  # the first look
    before = _read_from_disk()
    file.read_bytes()
    if _read_from_disk() - before < MIB:
        pytest.skip("the case: a file system that is on a disk")
    assert progress.gets_on(reads=True)
    file.read_bytes()  # from memory: nothing of it waits for a disk
    assert not progress.gets_on(reads=True)


def test_a_load_does_not_get_on_by_what_is_written(tmp_path: Path) -> None:
    progress = Writing()
    progress.gets_on(reads=True)
    (tmp_path / "log").write_bytes(bytes(MIB))
    assert not progress.gets_on(reads=True)


def test_a_save_gets_on_by_what_is_written(tmp_path: Path) -> None:
    progress = Writing()
    assert not progress.gets_on()
    (tmp_path / "shard").write_bytes(bytes(MIB))
    assert progress.gets_on()
    assert not progress.gets_on()


@pytest.mark.parametrize("client", ["fsspec.asyn:103 in sync", "multistorageclient.client:1 in upload_file"])
@pytest.mark.parametrize("sends", [True, False])
def test_a_slow_upload_gets_on_by_what_is_sent(client: str, sends: bool, monkeypatch) -> None:
    """The main thread waits at one line, and little is sent, so that nothing computes much."""
    frames = ("threading:1 in wait", client, "megatron_npu.checkpoint_files.object_storage:1 in upload")
    stands = place.Place("saving", "", "upload", frames, ("one line",))
    monkeypatch.setattr(place, "of_main_thread", lambda: stands)
    monkeypatch.setattr(Elsewhere, "computes", lambda self: False)
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)  # the machine may be busy: no real seconds
    monkeypatch.setattr(stillness, "time", clock)
    monkeypatch.setattr(sending, "time", clock)
    watched = stillness.Stillness(2.0, lambda: 1)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        for _ in range(18):
            watched.look()
            clock.now += 0.2
            sender.sendall(bytes(40_000 if sends else 400))  # or heartbeats
            receiver.recv(MIB)
    watched.look()
    assert (watched.still < 2.0) is sends
