"""Manage processes that import the modules of a plan's ranks once and fork for each rank."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import threading
from collections.abc import Mapping
from typing import IO

from megatron_npu.process import python_child

_MODULE = "megatron_npu.planning.rank.host_process"
_ENDING = 10  # seconds


class Hosts:
    """The host processes of a plan, one for each program and environment.

    Host processes end with ``end`` and with this process.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hosts: dict[tuple[str, ...], _Host] = {}

    def run(
        self,
        device: str,
        start: tuple[str, ...],
        environment: Mapping[str, str],
        told: Mapping[str, object],
        limit: float,
    ) -> tuple[int | None, str]:
        """Run a rank in a process that a host process forks.

        Return its exit code, or None after ``limit`` seconds, and the output of a host that died.

        Args:
            device: ``npu`` or ``cuda``.
            start: the words of the program before its flags.
            environment: variables of the host, those of the program's first rank.
            told: ``specification``, ``log`` and ``environment`` of this rank.
            limit: seconds.
        """
        key = (device, *start, *map("=".join, sorted(environment.items())))
        with self._lock:
            if key not in self._hosts:
                self._hosts[key] = _Host(device, start, environment)
            host = self._hosts[key]
        return host.run(told, limit)

    def end(self) -> None:
        """End the host processes and the ranks that are still running."""
        with self._lock:
            for host in self._hosts.values():
                host.end()
            self._hosts.clear()


class _Host:
    def __init__(self, device: str, start: tuple[str, ...], environment: Mapping[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the process)
        with theirs:
            self._process = subprocess.Popen(
                python_child.module(_MODULE, [device, str(theirs.fileno()), *start]),
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,  # Ctrl-C is ours to handle
            )

    def run(self, told: Mapping[str, object], limit: float) -> tuple[int | None, str]:
        ours, theirs = socket.socketpair()
        with ours:
            ours.settimeout(limit)
            try:
                with theirs:
                    socket.send_fds(self._channel, [json.dumps(told).encode()], [theirs.fileno()])
                said = ours.recv(64)
            except TimeoutError:
                return None, ""
            except OSError:
                said = b""
        if said:
            return int(said), ""
        return self._process.wait(_ENDING), self._said()

    def _said(self) -> str:
        self._log.seek(0)
        return self._log.read().decode(errors="replace")

    def end(self) -> None:
        self._channel.close()
        try:
            self._process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
