"""Several ranks of one program, without torchrun, which would import torch once more.

As a program: ``ranks.py COUNT PROGRAM ARGUMENTS...`` starts the ranks and returns the first failure. Each
rank gets RANK, WORLD_SIZE and LOCAL_RANK, and rendezvous through the file RENDEZVOUS.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path


def start(count: int, command: list[str], rendezvous: Path) -> list[subprocess.Popen[bytes]]:
    """Start ``count`` processes of one command."""
    common = {"WORLD_SIZE": str(count), "RENDEZVOUS": str(rendezvous)}
    return [
        subprocess.Popen(command, env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(count)
    ]


def main() -> int:
    count, command = int(sys.argv[1]), [sys.executable, *sys.argv[2:]]
    with tempfile.TemporaryDirectory() as folder:
        processes = start(count, command, Path(folder) / "store")
        signal.signal(signal.SIGTERM, lambda *_: [process.kill() for process in processes])
        return max(abs(process.wait()) for process in processes)


if __name__ == "__main__":
    sys.exit(main())
