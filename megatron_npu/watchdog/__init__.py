"""Find the rank that blocks a distributed run, report it, and end the other ranks.

Without a watchdog, a dead rank appears as "Connection reset by peer" in all other ranks, or has no visible
effect for half an hour; a stopped rank has no visible effect at all. In each rank, a thread writes to the
store of the run once a second where the main thread is (``place``, ``board``) and in which phase
(``phases``). The thread opens no port and runs no collective. It detects:

- a rank on the same machine that ended: the kernel reports it at once (``deaths``);
- a rank on another machine that ended: its peers fail and check whose heartbeat has stopped;
- a rank that is stopped or whose machine is lost: its heartbeat stops for ``MEGATRON_NPU_WATCHDOG`` seconds;
- ranks that wait for each other: none of them makes progress during that time;
- the end of the launcher (``launcher``): its ranks end too;
- a single-process run that makes no progress during that time (``alone``).

The first rank that detects a failure writes it to the store; all ranks print it and exit with code 1. Sending
SIGUSR1 to one rank makes all ranks print the stacks of their threads.
"""

from megatron_npu.watchdog.first_contact import tell as tell_others
from megatron_npu.watchdog.launcher import end_with_launcher, meeting
from megatron_npu.watchdog.open_files import require_open_files
from megatron_npu.watchdog.phases import LOADING, SAVING, WAITING, phase
from megatron_npu.watchdog.process_watch import begin, end, failed, step, watching
from megatron_npu.watchdog.restarts import require_fresh_store

__all__ = [
    "LOADING",
    "SAVING",
    "WAITING",
    "begin",
    "end",
    "end_with_launcher",
    "failed",
    "meeting",
    "phase",
    "require_fresh_store",
    "require_open_files",
    "step",
    "tell_others",
    "watching",
]
