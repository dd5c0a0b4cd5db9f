"""Find the Python that the shell's ``torchrun`` starts, and check whether this package is installed there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import megatron_npu

_NAME = "megatron_npu"
_TIMEOUT = 60  # seconds; a Python on a network file system starts slowly
_LINE = 512  # bytes; the kernel reads no more of a script's first line
_WHERE = (
    "import importlib.util, os; found = importlib.util.find_spec('{name}'); "
    "print(os.path.dirname(found.origin) if found and found.origin else '')"
)


def launcher() -> dict[str, str]:
    """Return the ``torchrun`` on PATH, the Python that it starts, and any problems with this Python.

    Returns:
        "torchrun": its file, or that there is none; "python": what it starts, if that is known; "lacks": set
        if that Python has no megatron_npu; "another": the copy that it has, if it is not the one in use.
    """
    script = shutil.which("torchrun")
    if script is None:
        return {"torchrun": "not on PATH; python -m torch.distributed.run does the same"}
    found = {"torchrun": script}
    python = _python_of(_behind_pyenv(script))
    if python is None:
        return found
    found["python"] = python
    if _folder(python) == _folder(sys.executable):
        return found
    copy = _copy_in(python)
    if copy == "":
        found["lacks"] = _NAME
    elif copy is not None and Path(copy).resolve() != Path(megatron_npu.__file__).resolve().parent:
        found["another"] = copy
    return found


def advice(found: dict[str, str]) -> list[str]:
    """Return the command to use instead of a ``torchrun`` that starts another Python."""
    if "lacks" in found:
        reason = "which does not have this package"
    elif "another" in found:
        reason = f"which imports another copy of this package ({found['another']})"
    else:
        return []
    return [
        f"torchrun ({found['torchrun']}) starts {found['python']}, {reason}. Instead of `torchrun`, use "
        f"`{shlex.quote(sys.executable)} -m torch.distributed.run`."
    ]


def _folder(executable: str) -> Path:
    """Return the folder of an executable, without resolving links to another folder."""
    return Path(executable).parent.resolve()


def _behind_pyenv(script: str) -> str:
    """Return the file that a pyenv shim runs, or the script itself if it is not a shim."""
    if "pyenv" not in _beginning(script):
        return script
    if Path(script).parent.name != "shims":
        return script
    return _output(["pyenv", "which", "torchrun"]) or script


def _beginning(script: str) -> str:
    """Return the beginning of a file, or an empty string if it cannot be read."""
    try:
        with open(script, "rb") as file:
            return file.read(_LINE).decode(errors="replace")
    except OSError:
        return ""


def _python_of(script: str) -> str | None:
    """Return the Python interpreter that the first line of a script names, or None."""
    line = _beginning(script).split("\n")[0]
    words = line.removeprefix("#!").split()
    if not line.startswith("#!") or not words:
        return None
    program = words[1] if words[0].endswith("/env") and len(words) > 1 else words[0]
    if not re.match(r"python", os.path.basename(program)):
        return None
    return shutil.which(program)


def _copy_in(python: str) -> str | None:
    """Return the folder from which ``python`` imports this package.

    The result is empty without a copy, and None if Python does not run.
    """
    return _output([python, "-c", _WHERE.format(name=_NAME)])


def _output(command: list[str]) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=os.sep, capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
