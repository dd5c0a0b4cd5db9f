"""``python``, as a fork of a warm parent: client.py SOCKET PROGRAM ARGUMENTS... of the interpreter.

PROGRAM is the file by which this was called.

It lends the fork its files, folder and environment, hands signals on, and ends as the fork ends. Started
with ``-I -S``, it takes a hundredth of a second.
"""

import contextlib
import json
import os
import signal
import socket
import struct
import sys

PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def pass_on(parent: socket.socket, number: int) -> None:
    """Send the number of a signal to the parent, which may have closed: the fork has ended."""
    with contextlib.suppress(OSError):
        parent.send(bytes([number]))


def main() -> None:
    """Ask, wait, and end in the same way."""
    umask = os.umask(0)
    os.umask(umask)
    files = [int(name) for name in os.listdir("/proc/self/fd")]
    files = [file for file in files if _is_open(file)]  # not the one that listed them
    request = {
        "program": sys.argv[2],
        "argv": sys.argv[3:],
        "env": dict(os.environ),
        "cwd": os.getcwd(),
        "umask": umask,
        "files": files,
    }
    text = json.dumps(request).encode("utf-8", "surrogateescape")
    with socket.socket(socket.AF_UNIX) as parent:
        parent.connect(sys.argv[1])
        socket.send_fds(parent, [struct.pack("!I", len(text))], files)
        parent.sendall(text)
        for number in PASSED_ON:  # one that came before ends this process, and the fork with it
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda number, _: pass_on(parent, number))
        answer = parent.recv(4)
    if len(answer) < 4:
        sys.exit("the warm parent is gone")
    status = struct.unpack("!i", answer)[0]
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != signal.SIGKILL:
            signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


main()
