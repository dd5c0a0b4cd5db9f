"""Several ranks of one program without torchrun: each of its processes would import torch anew.

``ranks.py COUNT PROGRAM ARGUMENTS...`` forks the ranks, with ``--torch`` in front after importing torch and
pytest once for all of them, and returns the worst of their results. Each rank gets RANK, WORLD_SIZE and
LOCAL_RANK, and rendezvous through the file RENDEZVOUS.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import tempfile
import traceback
from pathlib import Path


def run(program: list[str], rank: int, count: int, rendezvous: Path) -> int:
    """Be one rank: run the program in this process and return its result."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
    os.environ["RENDEZVOUS"] = str(rendezvous)
    sys.argv = program
    sys.path[0] = str(Path(program[0]).parent)
    try:
        runpy.run_path(program[0], run_name="__main__")
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def fork(program: list[str], rank: int, count: int, rendezvous: Path) -> int:
    """Start one rank; return its process."""
    process = os.fork()
    if process == 0:
        result = run(program, rank, count, rendezvous)
        sys.stdout.flush()
        os._exit(result)
    return process


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[0] == "--torch":
        import pytest  # noqa: F401
        import torch  # noqa: F401  (brings torch_npu with it)

        arguments = arguments[1:]
    count, program = int(arguments[0]), arguments[1:]
    with tempfile.TemporaryDirectory() as folder:
        processes = [fork(program, rank, count, Path(folder) / "store") for rank in range(count)]
        signal.signal(signal.SIGTERM, lambda *_: [os.kill(process, signal.SIGKILL) for process in processes])
        return max(abs(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
