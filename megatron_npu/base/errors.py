"""Define ``UsageError``, which reports problems that a user can fix, and helpers for file-system errors."""

from __future__ import annotations

import errno
import unicodedata
from collections.abc import Iterable

# What a file system says no with, and what a user can do; its place in the code tells nothing.
_OTHER_PATH = "Give this account access to it, or use another path."
MOUNT_PROC = "Mount /proc (mount -t proc proc /proc)."
_FULL = "Free space there, or use another disk."
_OF_FILES = {
    errno.EACCES: _OTHER_PATH,
    errno.EBUSY: "End the program that uses it, or use another path.",
    errno.EDQUOT: _FULL,
    errno.EEXIST: "Move it away, or use another path.",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f), or use another disk.",
    errno.EIO: "Check the disk (dmesg), or use another one.",
    errno.EISDIR: "Pass the path of a file.",
    errno.ELOOP: "Replace the links that name each other.",
    errno.ENAMETOOLONG: "Use a shorter path: at most 255 bytes for each name, and 4,095 in all.",
    errno.ENOENT: "Check the path.",
    errno.ENOSPC: _FULL,
    errno.ENOTDIR: "Use a path whose parents are folders.",
    errno.ENOTEMPTY: "Move its content away, or use another path.",
    errno.EPERM: _OTHER_PATH,
    errno.EROFS: "Use a path on a disk that is not read-only.",
    errno.ESTALE: "Mount the file system again, or use another path.",
}


# What a system says no with that starts no process or thread more: of fork, of C++, and of Python's threads.
_NO_PROCESS = ("Resource temporarily unavailable", "can't start new thread")


# What the allocators of torch and C++ say.
_NO_MEMORY = ("can't allocate memory", "std::bad_alloc")


def is_of_processes(error: BaseException) -> bool:
    """Return True if an error means that the system refused to start a process or thread."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_PROCESS)


def no_processes() -> UsageError:
    """Return the error to raise when no process or thread can be started."""
    return UsageError(
        "the system cannot start more processes or threads; each rank needs several hundred of them, "
        "because process groups, kernels and data loaders start their own",
        remedy="Raise the limit (ulimit -u, limits.conf, docker run --pids-limit), or lower --num-workers.",
    )


def is_of_memory(error: BaseException) -> bool:
    """Return True if an error means that the host has run out of memory or that this process has reached
    its limit.
    """
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    allocators = isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
    return isinstance(error, MemoryError) or allocators


def is_of_files(error: OSError) -> bool:
    """Return True if an error comes from the file system, such as a full disk or missing permissions."""
    return error.errno in _OF_FILES


def told_of_files(error: OSError) -> str:
    """Return the line about an error for which ``is_of_files`` is True, with a remedy."""
    remedy = _OF_FILES[error.errno or 0]
    if str(error.filename).startswith("/proc/"):
        remedy = MOUNT_PROC
    elif "No usable temporary directory" in str(error):  # of tempfile, without a name
        remedy = "Set TMPDIR to a folder that this account can write to."
    return f"{printable(str(error))}. {remedy}"


def told_of_disk(error: Exception) -> str:
    """Return the line about an error of a file system, also of one that a compiler met; otherwise an empty
    text.
    """
    if isinstance(error, OSError) and is_of_files(error):
        return told_of_files(error)
    return _told_of_compiler(error)


def _told_of_compiler(error: Exception) -> str:
    line = next((each for each in str(error).splitlines() if "No space left on device" in each), "")
    is_of_compiler = "CompileError" in str(error) or "Inductor" in type(error).__name__
    if not line or not is_of_compiler:
        return ""
    return (
        f"torch.compile's C++ compiler failed: {printable(line.strip())}. Free space in the folder for "
        "temporary files, or set TMPDIR to another one."
    )


def either(names: Iterable[object]) -> str:
    """Join names with commas and "or" for use in a sentence, as in ``a``, ``a or b``, or ``a, b or c``."""
    *others, last = map(str, names)
    return f"{', '.join(others)} or {last}" if others else last


_LONGEST = 10_000  # characters of a message
_UNSEEN = ("Cc", "Cf", "Zl", "Zp")  # control characters, formats such as the direction of writing, line ends


def printable(text: str) -> str:
    """Return a text on which a terminal does not act: control characters as escapes, and not too long.

    Messages quote files of others, which could clear the screen, or write what looks like a message.
    """
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return "".join(
        ascii(each)[1:-1] if unicodedata.category(each) in _UNSEEN and each not in "\n\t" else each
        for each in text
    )


class UsageError(Exception):
    """Raised for invalid input, such as an option, a file, an environment variable or an installed package.

    The command line prints the error as one line and exits with code 2, without a traceback.

    Megatron's ``build_module`` re-raises an exception as ``type(error)(message)``, so a single argument must
    be accepted as the whole message.

    Args:
        given: a sentence that states the problem, with the name of the option or file and its value.
        expected: a description of what would be accepted; empty if ``given`` states it.
        remedy: an instruction that fixes the problem.

    Attributes:
        blames_caller: whether a library rejected its arguments; if so, the faulty line is in the user's
            program, and only the traceback shows it.
    """

    blames_caller = False

    def __init__(self, given: str, expected: str = "", remedy: str = "") -> None:
        self.given, self.expected, self.remedy = (printable(str(each)) for each in (given, expected, remedy))
        problem = self.problem
        end = "" if problem.endswith(".") else "."  # a library's message may be a sentence already
        super().__init__(f"{problem}{end} {self.remedy}" if remedy else problem)

    @property
    def problem(self) -> str:
        """The given value and the expected value in one sentence, without the advice."""
        return f"{self.given}; expected {self.expected}" if self.expected else self.given

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, str, str]]:
        """Return the data for pickling the error, because torch sends the error of a failed rank to the
        other ranks.
        """
        return UsageError, (self.given, self.expected, self.remedy)


class LoaderWorkerError(RuntimeError):
    """Raised when a data-loader worker was killed, usually because the machine ran out of memory.

    Args:
        what: torch's message, with the process number.
        remedy: an instruction that fixes the problem.
    """

    def __init__(
        self,
        what: str,
        remedy: str = "The machine may have run out of memory: lower --num-workers, and resume from the "
        "last checkpoint.",
    ) -> None:
        super().__init__(f"{what.rstrip('.')}. {remedy}")


class UnsavedStateError(RuntimeError):
    """Raised when a run ends at an invalid loss and no folder is given in which its state could be saved.

    Args:
        what: a sentence that states what was found, and where.
        remedy: an instruction for the next run.
    """

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what} {remedy}".rstrip())
