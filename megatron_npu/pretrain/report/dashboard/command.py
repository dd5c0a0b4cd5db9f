"""``megatron-npu dashboard``: serve the dashboard of a finished or running job."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from megatron_npu.web.address import LOOPBACK, Address, address, listening, require_packages, url

METRICS = "metrics.jsonl"


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    result = Parser("megatron-npu dashboard", description=__doc__)
    result.add_argument(
        "run", metavar="DIR", help=f"folder given to --save, or the log file if it is not named {METRICS}"
    )
    result.add_argument(
        "--port",
        type=address,
        metavar="[HOST:]PORT",
        default=Address(LOOPBACK, 0),
        help=f"address to serve the dashboard at; port 0 selects any free port (default: {LOOPBACK}:0)",
    )
    result.add_argument(  # its former name
        "--at", dest="port", type=address, default=argparse.SUPPRESS, help=argparse.SUPPRESS
    )
    return result


def main(argv: Sequence[str]) -> int:
    """Serve the dashboard until Ctrl-C is pressed, and return the exit code.

    Raises:
        UsageError: the run does not exist, or the address cannot be used.
    """
    args = parser().parse_args(argv)
    metrics = find(args.run)
    require_packages("dashboard")
    from megatron_npu.pretrain.report.dashboard import server

    with listening(f"--port {args.port}", args.port) as sock:
        print(f" the dashboard of {metrics} is at {url(sock)} (Ctrl-C stops it)", flush=True)
        server.serve(metrics, name_of(metrics), sock, args.port)
    return 0


def find(run: str) -> Path:
    """Return the path of a run's JSON-lines file.

    Raises:
        UsageError: the file does not exist, or cannot be read.
    """
    path = Path(run)
    path = path / METRICS if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            f"the file {path} does not exist, but DIR must be the --save folder of a run, which contains "
            f"{METRICS}, or its --json-log file",
            remedy="Correct the path.",
        )
    try:
        files.regular(path).close()
    except OSError as error:
        raise UsageError(
            f"the file {path} cannot be read ({error.strerror}), but the dashboard must be able to read it",
            remedy="Let the file's owner give you access to it.",
        ) from error
    return path


def name_of(metrics: Path) -> str:
    """Return the title of a run: the name of its directory or, if that name is generic, of its JSON-lines
    file.
    """
    metrics = metrics.resolve()
    return metrics.parent.name if metrics.name == METRICS else metrics.stem
