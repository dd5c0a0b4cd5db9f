"""``python``, as a fork of a warm parent: client.py SOCKET PROGRAM ARGUMENTS... of the interpreter.

PROGRAM is the file by which this was called.

It lends the fork its files, folder and environment, hands signals on, and ends as the fork ends. Started
with ``-I -S``, it takes a hundredth of a second: of Python's modules it imports only what is there already
or written in C, as the others would take twice as long.
"""

import _signal
import _socket
import array
import marshal
import os
import sys

PASSED_ON = (
    *(_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP),
    *(_signal.SIGQUIT, _signal.SIGUSR1, _signal.SIGUSR2),
)


def _is_open(file: int) -> bool:
    try:
        os.fstat(file)
    except OSError:
        return False
    return True


def pass_on(parent: _socket.socket, number: int) -> None:
    """Send a signal's number to the parent, which may have closed the connection if the fork has ended."""
    try:  # noqa: SIM105  (contextlib is one of the others)
        parent.send(bytes([number]))
    except OSError:
        pass


def main() -> None:
    """Request a fork, wait for it, and end in the same way as the fork."""
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
    content = marshal.dumps(request)
    parent = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    parent.connect(sys.argv[1])
    lent = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", files))
    parent.sendmsg([len(content).to_bytes(4, "big")], [lent])
    parent.sendall(content)
    for number in PASSED_ON:  # one that came before ends this process, and the fork with it
        if _signal.getsignal(number) != _signal.SIG_IGN:
            _signal.signal(number, lambda number, _: pass_on(parent, number))
    answer = parent.recv(4)
    parent.close()
    if len(answer) < 4:
        sys.exit("the warm parent is gone")
    status = int.from_bytes(answer, "big", signed=True)
    if os.WIFSIGNALED(status):
        if os.WTERMSIG(status) != _signal.SIGKILL:
            _signal.signal(os.WTERMSIG(status), _signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.WEXITSTATUS(status))


main()
