"""torchrun's agent whose ranks are forks of it: agent.py RANKS RESTARTS ARGUMENTS... of ``megatron-npu``.

Where this process is a fork of one that has imported Megatron, so are the ranks, and a trial is cheap. They
are its children, as torchrun's are.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import time
from multiprocessing import synchronize

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from megatron_npu import watchdog
from megatron_npu.process import stacks

_PR_SET_PDEATHSIG = 1  # prctl(2)


def _wait(finished: synchronize.Event, timeout: float | None = None) -> bool:
    """Wait uncounted: the agent's ``set()`` waits for ever for a sleeper that was killed."""
    while not finished.is_set():
        time.sleep(0.02)
    return True


def rank(*arguments: str) -> None:
    """Be a rank, as ``python -m megatron_npu`` would be."""
    # torch has such functions interrupted when the agent dies; ranks of torchrun, which are programs, are not
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the agent's handlers are its own
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    synchronize.Event.wait = _wait  # type: ignore[method-assign]
    sys.argv = ["-m", *arguments]
    code: object = 0
    try:
        runpy.run_module("megatron_npu", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        code = 1
    watchdog.end()  # as at the end of an interpreter, which a fork of multiprocessing's leaves out
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (0, None):  # else the agent waits for the result
        os._exit(code if isinstance(code, int) else 1)


def main() -> int:
    stacks.print_on_signal()
    ranks, restarts, *arguments = sys.argv[1:]
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # docs/how-to/reliability.md, restarts
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id="campaign",
        max_restarts=int(restarts),
        monitor_interval=0.1,
        start_method="fork",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
    )
    try:
        elastic_launch(config, rank)(*arguments)
    except ChildFailedError as failed:
        print(f"agent: {sorted((each.local_rank, each.exitcode) for each in failed.failures.values())}")
        return 1
    except SignalException as stopped:
        return 128 + int(stopped.sigval)
    except KeyboardInterrupt:  # before torch has a handler: torchrun's traceback would be its own
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
