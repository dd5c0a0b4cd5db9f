"""Names the rank that a run of several processes waits for without success, and ends the others.

Without it a dead rank is "Connection reset by peer" in all others, or nothing for half an hour; a stopped one
is nothing at all. Each rank has a thread that says once a second, in the store of the run, where the main
thread stands (``place``, ``board``), and in which phase, which who is in it enters by name (``phases``); no
port is opened, and no collective is made. What it notices:

- a rank of the same machine that ended: the kernel says so at once (``deaths``);
- a rank elsewhere that ended: its peers fail, and look whose word has stopped;
- a rank that is stopped, or whose machine is gone: its word stops for ``MEGATRON_NPU_WATCHDOG`` seconds;
- ranks that wait for each other: none has moved for as long;
- the launcher that ended (``launcher``): its ranks do too;
- a run of one process that has not moved for as long (``alone``).

The first rank that knows writes it into the store for all; they print it and end with exit code 1. SIGUSR1 to
one rank lets each print where all its threads stand.
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
