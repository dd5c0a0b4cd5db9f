"""Run the dashboard server as a separate process that ends together with the run."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

from megatron_npu.pretrain.report.dashboard.command import name_of
from megatron_npu.process import python_child
from megatron_npu.web.address import Address, listening, url

_SECONDS = 5.0  # for the server to end after the run


@contextlib.contextmanager
def shown(metrics: Path, at: Address) -> Iterator[str]:
    """Serve the dashboard of a run inside the ``with`` block, and yield its address.

    The server ends with the block or with this process, even if this process is killed by SIGKILL. The server
    first sends the final state to clients. Ctrl-C does not reach it.

    Args:
        metrics: the JSON-lines file that the run writes.
        at: the address to listen on.

    Raises:
        UsageError: the server cannot listen on the address.
    """
    with listening(f"--dashboard {at}", at) as sock:
        place = url(sock)
        process = _start(metrics.absolute(), sock.fileno(), at.host)
    try:
        yield place
    finally:
        _end(process)


def _start(metrics: Path, descriptor: int, host: str) -> subprocess.Popen[bytes]:
    module = "megatron_npu.pretrain.report.dashboard.server"
    process = subprocess.Popen(
        python_child.module(module, [str(metrics), name_of(metrics), str(descriptor), host]),
        env=python_child.environment(),
        stdin=subprocess.PIPE,  # its end tells the server that this process is gone
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,
    )
    assert process.stdin is not None
    # processes that read data are forked, and may outlive this one by seconds: its end is not theirs to hold
    os.register_at_fork(after_in_child=process.stdin.close)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        print(f" the dashboard process exited early with code {process.returncode}", flush=True)
        return
    process.terminate()
    try:
        process.wait(_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
