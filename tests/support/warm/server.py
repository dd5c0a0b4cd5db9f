"""A warm parent: server.py SOCKET OWNER MODULE... imports modules and forks for each ``client.py`` that asks.

The fork runs what the client's arguments say as ``python`` would, and ends as an interpreter ends. The parent
tells the client its exit status, passes signals to it, and kills it when the client is gone. It ends with the
process OWNER, and on SIGTERM if no fork runs. A fork may be a warm parent itself, with further imports.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import inspect
import marshal
import multiprocessing.spawn
import os
import random
import runpy
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import types
import warnings
import weakref
from pathlib import Path
from typing import Any

import one_device
from fork_ending import Ending, end_before_the_libraries

COLD_SPAWN = "TEST_COLD_SPAWN"  # in the environment of a process: what it spawns is cold
WARM_CHILDREN = "TEST_WARM_CHILDREN"  # and: what it starts with sys.executable is a fork, too
AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"  # torch loads torch_npu unless it is 0
# what the environment was before the imports, which may add to it
_ENVIRONMENT = dict(os.environ)
# what a fork finds behind its first entry and PYTHONPATH
_given = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
_MOST_FILES = 64
_BASE = [entry for entry in sys.path[1:] if os.path.abspath(entry) not in _given]


def main() -> None:
    """Serve until the owner ends; in a fork, return when the fork's program has ended."""
    address, owner, *modules = sys.argv[1:]
    ending = Ending()  # before the imports: what registers first is called last
    gc.disable()  # what is imported stays
    for name in modules:
        _import(name)
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1:  # a fork would have locks that nobody gives back
        sys.exit(f"{threads} threads after the imports of {modules}")
    gc.collect()
    gc.freeze()
    gc.enable()
    if "torch" in modules:
        _shorten_torchs_ways()
        one_device.share()
    _shorten_megatrons_ways()
    server = socket.socket(socket.AF_UNIX)
    server.bind(address)
    server.listen(64)
    parent = Parent(server, Path(address).parent, os.pidfd_open(int(owner)))
    print("ready", os.getpid(), flush=True)
    ending.know_modules()
    # what this has made since: each collection in a fork would look at its tables of all modules
    gc.collect()
    gc.freeze()
    request = parent.serve()
    if request["argv"][0] == __file__:  # a parent with further imports
        os.setsid()
        ending.leave()
        run(request)
        return
    end_before_the_libraries()
    with ending.status_known():
        run(request)


def _import(name: str) -> None:
    """Import a module; if its name ends with ``?``, import it only if its file exists."""
    module = name.removesuffix("?")
    if module == name or _is_there(module):
        importlib.import_module(module)


def _is_there(module: str) -> bool:
    """Look for the file of a module, without importing the packages that it is in: they may not be whole."""
    top, *below = module.split(".")
    found = importlib.util.find_spec(top)
    if found is None or not below:
        return found is not None
    for place in map(Path, found.submodule_search_locations or ()):
        if (place / below[0]).is_dir():  # the first one counts: a tree's comes before what is installed
            file = place.joinpath(*below)
            return file.with_suffix(".py").is_file() or (file / "__init__.py").is_file()
    return len(below) == 1 and importlib.util.find_spec(module) is not None


class Parent:
    """The loop of the parent: new clients, their signals and ends, and the ends of the forks and the owner.

    It touches ``folder`` when it is used.
    """

    def __init__(self, server: socket.socket, folder: Path, owner: int) -> None:
        self._server, self._folder, self._owner = server, folder, owner
        self._asked_to_end = False
        self._clients: dict[int, socket.socket] = {}  # by the number of the process that runs for it
        self._selector = selectors.DefaultSelector()
        self._selector.register(server, selectors.EVENT_READ)
        self._selector.register(owner, selectors.EVENT_READ)  # it can be read from when the process has ended
        self._woken, self._waking = socket.socketpair()
        for end in (self._woken, self._waking):
            end.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._ask_to_end)
        signal.set_wakeup_fd(self._waking.fileno())

    def serve(self) -> dict[str, Any]:
        """Serve for ever; return in a fork, with the request that it is for."""
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._server:
                    request = self._fork(self._server.accept()[0])
                    if request is not None:
                        return request
                elif key.fileobj is self._woken:
                    self._woken.recv(4096)
                    self._reap()
                    if self._asked_to_end and not self._clients:
                        os._exit(0)
                    self._asked_to_end = False
                elif key.fileobj == self._owner:
                    shutil.rmtree(self._folder.parent, ignore_errors=True)  # it may have been killed
                    os._exit(0)
                else:
                    self._hear(key.data)

    def _ask_to_end(self, *_: object) -> None:
        self._asked_to_end = True

    def _fork(self, client: socket.socket) -> dict[str, Any] | None:
        """Fork for a client; return the client's request in the fork, and None in the parent."""
        files: list[int] = []
        text = None
        with contextlib.suppress(ConnectionResetError):
            message, files, _, _ = socket.recv_fds(client, 4, _MOST_FILES)
            if len(message) == 4:
                text = _received(client, struct.unpack("!I", message)[0])
        if text is None:  # it went away
            for end in (*files, client.detach()):
                os.close(end)
            return None
        os.utime(self._folder)
        process = os.fork()
        if process:
            for file in files:
                os.close(file)
            self._clients[process] = client
            self._selector.register(client, selectors.EVENT_READ, process)
            return None
        self._leave(client)
        request: dict[str, Any] = marshal.loads(text)
        _renumber(files, request["files"])
        return request

    def _leave(self, client: socket.socket) -> None:
        """In the fork, close the files that belong to the parent."""
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        self._selector.close()
        os.close(self._owner)
        for end in (self._server, self._woken, self._waking, client, *self._clients.values()):
            end.close()

    def _hear(self, process: int) -> None:
        client = self._clients.get(process)
        if client is None:  # its fork has ended in the same round
            return
        try:
            said = client.recv(64)
        except ConnectionResetError:
            said = b""
        for number in said or [signal.SIGKILL]:  # nothing: the client is gone
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        if not said:
            self._selector.unregister(client)

    def _reap(self) -> None:
        for process in list(self._clients):
            done, status = os.waitpid(process, os.WNOHANG)
            if not done:
                continue
            os.utime(self._folder)
            client = self._clients.pop(process)
            with contextlib.suppress(KeyError):
                self._selector.unregister(client)
            with contextlib.suppress(OSError):
                client.sendall(struct.pack("!i", status))
            client.close()


def _renumber(files: list[int], numbers: list[int]) -> None:
    """Give each file the descriptor number that it has in the client."""
    # out of the way first: one's number may be another's wish
    aside = [fcntl.fcntl(file, fcntl.F_DUPFD, max(numbers) + 1) for file in files]
    for file in files:
        os.close(file)
    for file, number in zip(aside, numbers, strict=True):
        os.dup2(file, number)
        os.close(file)


def _received(client: socket.socket, size: int) -> bytes | None:
    text = b""
    while len(text) < size:
        part = client.recv(size - len(text))
        if not part:
            return None
        text += part
    return text


def run(request: dict[str, Any]) -> None:
    """Be the ``python`` that was asked for.

    What multiprocessing spawns is a fork of the warm parent, too, unless ``COLD_SPAWN`` is set: such a
    child's parent, whose end the kernel may tell it, is the warm one.
    """
    os.chdir(request["cwd"])
    _spare_searches_for_modules()
    added = {name: value for name, value in os.environ.items() if name not in _ENVIRONMENT}
    os.environ.clear()
    os.environ.update({**added, **request["env"]})
    tempfile.tempdir = None  # TMPDIR counts again
    cold = os.environ.get(COLD_SPAWN)
    multiprocessing.spawn.set_executable(sys.executable if cold else request["program"])
    if os.environ.get(WARM_CHILDREN):
        sys.executable = request["program"]
    if _ENVIRONMENT.get(AUTOLOAD) == "0" and os.environ.get(AUTOLOAD) != "0":  # torch_npu sets it to 1
        _load_backends()
    elif "torch_npu" in sys.modules:
        sys.modules["megatron_npu.sim.counters"].write_report_at_exit()
        _tell_the_simulator()
    os.umask(request["umask"])
    _reseed()
    arguments = list(request["argv"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    elsewhere = False  # than in the working directory modules are looked for
    while arguments and arguments[0] in ("-u", "-B", "-P", "-W"):
        option = arguments.pop(0)
        if option == "-W":
            warnings.simplefilter(arguments.pop(0))
        sys.dont_write_bytecode |= option == "-B"
        elsewhere |= option == "-P"
        if option == "-u":
            for stream in (sys.stdout, sys.stderr):
                stream.reconfigure(write_through=True)
    sys.stdout.reconfigure(line_buffering=os.isatty(1))
    search = [os.path.abspath(entry) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kind = arguments[0]
    if kind == "-":
        arguments[:1] = ["-c", sys.stdin.read()]
        kind = "-c"
    if kind in ("-m", "-c"):
        name, *rest = arguments[1:]
        here = [] if elsewhere else [os.getcwd() if kind == "-m" else ""]
        sys.path[:] = [*here, *search, *_BASE]
        sys.argv = ["-m" if kind == "-m" else "-c", *rest]
        if kind == "-m":
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            main_module = sys.modules["__main__"] = types.ModuleType("__main__")
            exec(compile(name, "<string>", "exec"), vars(main_module))
    elif kind.startswith("-"):
        sys.exit(f"a warm interpreter knows -m, -c, -, -u, -B, -P and -W, not {kind}")
    else:
        sys.argv = arguments
        sys.path[:] = [str(Path(kind).resolve().parent), *search, *_BASE]
        runpy.run_path(kind, run_name="__main__")


def _spare_searches_for_modules() -> None:
    """Tell ``inspect`` which files in a fork's stack are no module's: for each it looks through all modules.

    torch's samples of operations read the stack: most of their time was these searches among 4,000 modules.
    """
    frozen = ("runpy", "importlib._bootstrap", "importlib._bootstrap_external")
    for file in (__file__, *(f"<frozen {name}>" for name in frozen)):
        inspect.modulesbyfile[os.path.abspath(file)] = ""  # type: ignore[attr-defined]


def _load_backends() -> None:
    """Do what ``import torch`` does at its end and the parent has put off, with the settings of this run."""
    import torch

    simulator = sys.modules["megatron_npu.sim.activate"]
    with simulator.unarmed():
        simulator.load_runtime()
    torch._import_device_backends()


def _tell_the_simulator() -> None:
    """Tell it the settings of this run; of those that it has asked for, the parent has the same."""
    runtime = sys.modules["megatron_npu.sim.build"].runtime_library()
    for name, value in sys.modules["megatron_npu.sim.settings"].simulator_values().items():
        runtime.sim_set(name.encode(), value.encode())


def _shorten_torchs_ways() -> None:
    """Spare forks what torch does in vain, and slowly in a process of 2,000 modules.

    torchrun names the method that it is in, for its log, by reading the sources of the whole stack; and at
    its end torch takes the operators apart that it has registered from Python.
    """
    dynamic_rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
    dynamic_rendezvous.get_method_name = lambda depth=2: sys._getframe(depth).f_code.co_name
    for each in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        if each.peek()[1].__module__ == "torch.library":
            each.atexit = False


def _shorten_megatrons_ways() -> None:
    """Spare forks that a stock script reads sources: a quarter of a short run.

    It takes the helps of its flags from the sources of its settings' classes, each time that it parses, which
    is done here once, and asks for the file of what checks a number together with the lines around it.
    """
    if module := sys.modules.get("megatron.core.rerun_state_machine"):
        change = {"getframeinfo": lambda frame: inspect.getframeinfo(frame, 0)}
        vars(module)["inspect"] = types.SimpleNamespace(**{**vars(inspect), **change})
    if module := sys.modules.get("megatron.training.argument_utils"):
        _remember_helps(module.ArgumentGroupFactory)
        sys.modules["megatron.training.arguments"].add_megatron_arguments(argparse.ArgumentParser())


def _remember_helps(factory: Any) -> None:
    known: dict[type, dict[str, str]] = {}
    stock = factory._get_field_docstrings

    def remembered(self: object, settings: type) -> dict[str, str]:
        if settings not in known:
            known[settings] = stock(self, settings)
        return dict(known[settings])

    factory._get_field_docstrings = remembered


def _reseed() -> None:
    """A new interpreter draws seeds of its own."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


if __name__ == "__main__":
    main()
