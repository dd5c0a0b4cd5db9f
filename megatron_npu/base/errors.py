"""``UsageError``, an error that a user can fix (given, expected, remedy), and errors of the file system."""

from __future__ import annotations

import errno

# What a file system says no with: a reason that a user can act on, whose place in the code tells nothing.
_OF_FILES = (
    errno.EACCES,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.EISDIR,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
)


# What a system says no with that starts no process or thread more: of fork, of C++, and of Python's threads.
_NO_PROCESS = ("Resource temporarily unavailable", "can't start new thread")


def is_of_processes(error: BaseException) -> bool:
    """Return whether the system has refused to start a process or a thread."""
    if isinstance(error, OSError):
        return error.errno == errno.EAGAIN
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_PROCESS)


def no_processes() -> UsageError:
    """Return the error for that."""
    return UsageError(
        "the system cannot start more processes or threads",
        "several hundred for each rank (process groups, kernels and data loaders start their own)",
        "Raise the limit: ulimit -u, limits.conf, docker run --pids-limit. Or lower --num-workers.",
    )


def is_of_files(error: OSError) -> bool:
    """Return whether an error is the file system's: a full disk, a folder without permission."""
    return error.errno in _OF_FILES


class UsageError(Exception):
    """Bad input from outside: an option, a file, an environment variable, an installed package.

    The command line prints it as one line and exits with code 2, without a traceback.

    Megatron's ``build_module`` raises what it caught again as ``type(error)(message)``: with one argument,
    that is the whole message.

    Args:
        given: what was found, with the name of the option or file and its value.
        expected: what would have been accepted.
        remedy: what the user can do about it, as an instruction.

    Attributes:
        blames_caller: a library has refused what it was called with; in a user's own program the line at
            fault is his, and only the traceback names it.
    """

    blames_caller = False

    def __init__(self, given: str, expected: str = "", remedy: str = "") -> None:
        self.given, self.expected, self.remedy = given, expected, remedy
        super().__init__(f"{given}; expected {expected}. {remedy}" if expected else given)

    def __reduce__(self) -> tuple[type[UsageError], tuple[str, str, str]]:
        """Let ranks send it to each other, as torch does when one of them fails."""
        return UsageError, (self.given, self.expected, self.remedy)


class LoaderWorkerError(RuntimeError):
    """A process that prepares batches was killed: for want of memory, as a rule, and wherever this one was.

    Args:
        what: torch's line, with the number of the process.
        remedy: what the user can do about it.
    """

    def __init__(
        self,
        what: str,
        remedy: str = "Was there not enough memory? Lower --num-workers, and go on from the last checkpoint.",
    ) -> None:
        super().__init__(f"{what.rstrip('.')}. {remedy}")
