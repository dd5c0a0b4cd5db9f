"""One rank that talks to the simulated HCCL through ctypes, without torch: starts in milliseconds.

Usage (environment as tests/sim/ranks.py sets it): hccl_raw.py LIBRARY SCENARIO. What the scenario returns is
printed as one line of JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ROOT_INFO_BYTES = 4108
INT8, INT16, INT32, FP32, UINT8, BF16 = 0, 1, 2, 4, 7, 11
SUM, PRODUCT, MAX = 0, 1, 2
SCENARIOS: dict[str, Callable[[], object]] = {}


def scenario(function: Callable[[], object]) -> Callable[[], object]:
    SCENARIOS[function.__name__] = function
    return function


class Item(ctypes.Structure):
    """HcclSendRecvItem."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("count", ctypes.c_uint64),
        ("dtype", ctypes.c_int),
        ("remote_rank", ctypes.c_uint32),
    )


library = ctypes.CDLL(sys.argv[1])
library.aclGetRecentErrMsg.restype = ctypes.c_char_p
ENDED = Path(os.environ["RENDEZVOUS"]).with_suffix(".ended")  # is there when rank 0 has its result


def set_timeout(seconds: str) -> None:
    library.sim_set(b"hccl_timeout", seconds.encode())


def floats(*values: float) -> ctypes.Array:
    return (ctypes.c_float * len(values))(*values)


def counts(*values: int) -> ctypes.Array:
    return (ctypes.c_uint64 * len(values))(*values)


def invite(file: Path) -> None:
    """Write the root info of a new communicator into ``file``, which appears complete."""
    info = ctypes.create_string_buffer(ROOT_INFO_BYTES)
    assert library.HcclGetRootInfo(info) == 0
    file.with_suffix(".part").write_bytes(info.raw)
    file.with_suffix(".part").rename(file)


def create() -> int:
    """Join the communicator of all ranks; return the code."""
    file = Path(os.environ["RENDEZVOUS"])
    if RANK == 0:
        invite(file)
    while not file.exists():
        time.sleep(0.001)
    info = ctypes.create_string_buffer(file.read_bytes(), ROOT_INFO_BYTES)
    return library.HcclCommInitRootInfo(WORLD, info, RANK, ctypes.byref(comm))


def call(function: str, *arguments: object, on: ctypes.c_void_p | None = None) -> int:
    """Call ``Hccl<function>(arguments..., communicator, stream)``; integers are passed as 64 bits."""
    kept.extend(arguments)  # the call runs later
    converted = [ctypes.c_uint64(value) if isinstance(value, int) else value for value in arguments]
    return getattr(library, f"Hccl{function}")(*converted, comm if on is None else on, stream)


def finish() -> tuple[int, str]:
    """Synchronise the stream; return the code and, if that is an error, the text for it."""
    code = library.aclrtSynchronizeStream(stream)
    return code, library.aclGetRecentErrMsg().decode() if code else ""


def wait_for_rank_0() -> None:
    while not ENDED.exists():
        time.sleep(0.01)


def all_reduce(count: int = 4, dtype: int = FP32, reduction: int = SUM) -> int:
    buffer = ctypes.create_string_buffer(8 * count)
    return call("AllReduce", buffer, buffer, count, dtype, reduction)


def refused(code: int) -> str:
    """Return why a call was refused on the calling thread."""
    assert code != 0
    return library.aclGetRecentErrMsg().decode()


comm, stream = ctypes.c_void_p(), ctypes.c_void_p()
kept: list[object] = []  # buffers of calls under way


# ---- calls that do not fit


@scenario
def other_count() -> object:
    all_reduce(4 + RANK)
    return finish()


@scenario
def other_type() -> object:
    all_reduce(4, (FP32, INT32)[RANK])
    return finish()


@scenario
def other_reduction() -> object:
    all_reduce(4, FP32, (SUM, MAX)[RANK])
    return finish()


@scenario
def other_operation() -> object:
    buffer = floats(1, 2)
    if RANK == 0:
        call("AllReduce", buffer, buffer, 2, FP32, SUM)
    else:
        call("Broadcast", buffer, 2, FP32, 1)
    return finish()


@scenario
def other_root() -> object:
    buffer = floats(1, 2)
    call("Broadcast", buffer, 2, FP32, RANK)
    return finish()


@scenario
def other_message_size() -> object:
    buffer = floats(1, 2, 3, 4)
    if RANK == 0:
        call("Send", buffer, 4, FP32, 1)
    else:
        call("Recv", buffer, 3, FP32, 0)
    return finish()


@scenario
def other_part_size() -> object:
    """An all-gather of unequal parts, about whose sizes the ranks disagree."""
    out, sizes = floats(*[0] * 8), counts(2, 3 if RANK else 2)
    own = (2, 3)[RANK]
    call("AllGatherV", floats(*[1] * own), own, out, sizes, counts(0, 2), FP32)
    return finish()


@scenario
def message_against_collective() -> object:
    buffer = floats(1, 2)
    if RANK == 0:
        call("Send", buffer, 2, FP32, 1)
    else:
        all_reduce(2)
    return finish()


@scenario
def third_rank_is_told() -> object:
    """Rank 2 waits for rank 0, whose message to rank 1 does not fit."""
    buffer = floats(1, 2, 3, 4)
    if RANK == 0:
        call("Send", buffer, 4, FP32, 1)
    else:
        call("Recv", buffer, 3, FP32, 0)
    return finish()


@scenario
def failed_communicator_refuses() -> object:
    all_reduce(4 + RANK)
    finish()
    return refused(all_reduce(4))


# ---- waiting in vain


@scenario
def alone_in_a_collective() -> object:
    all_reduce(4)
    if RANK == 0:
        all_reduce(1024, BF16)
    else:
        wait_for_rank_0()
    return finish()


@scenario
def unmatched_send() -> object:
    """HcclSend is no mailbox: without a receiver it does not return, however small the message."""
    if RANK == 0:
        call("Send", floats(1), 1, FP32, 1)
    else:
        wait_for_rank_0()
    return finish()


@scenario
def crossed_sends() -> object:
    """Both send first: this hangs on hardware, so it must not work here."""
    buffer = floats(1)
    call("Send", buffer, 1, FP32, 1 - RANK)
    call("Recv", buffer, 1, FP32, 1 - RANK)
    return finish()


@scenario
def dead_peer() -> object:
    if RANK == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    all_reduce(4)
    return finish()


@scenario
def peer_that_ended_normally() -> object:
    if RANK == 1:
        return 0, ""
    call("Recv", floats(0), 1, FP32, 1)
    return finish()


@scenario
def data_of_the_dead() -> object:
    """What a rank has sent before it died arrives."""
    buffer = floats(5, 6)
    if RANK == 1:
        call("Broadcast", buffer, 2, FP32, 1)
        finish()
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.3)
    call("Broadcast", buffer, 2, FP32, 1)
    return finish(), list(buffer)


# ---- creation


def host_dies() -> object:
    if RANK == 0:
        invite(Path(os.environ["RENDEZVOUS"]))
        os.kill(os.getpid(), signal.SIGKILL)
    return create_refused()


def create_refused() -> object:
    if RANK == WORLD - 1 and sys.argv[2] == "one_is_missing":
        return ""
    return refused(create())


@scenario
def leaves_nothing() -> object:
    """Return files in /dev/shm that this process maps, its open segments, its mappings before and after."""
    all_reduce(4)
    finish()
    numbers = [Path("/proc/self/fd", number) for number in os.listdir("/proc/self/fd")]
    files = [os.readlink(each) for each in numbers if each.is_symlink()]  # the listing's own is closed
    before = Path("/proc/self/maps").read_text()
    library.HcclCommDestroy(comm)
    after = Path("/proc/self/maps").read_text()
    return (
        before.count("/dev/shm/"),
        [name for name in files if "memfd" in name],
        before.count(SEGMENT),
        after.count(SEGMENT),
    )


SEGMENT = "memfd:megatron_npu_sim_hccl"


@scenario
def sub_communicators() -> object:
    """Two rounds of the same split; members in another order than in the parent; one rank in none."""
    sums = []
    for _ in range(2):
        members = {0: [2, 0], 2: [2, 0], 1: [1], 3: None}[RANK]
        sub, pointer = ctypes.c_void_p(), (ctypes.c_uint32 * len(members))(*members) if members else None
        own = members.index(RANK) if members else 0
        length = len(members) if members else 0
        code = library.HcclCreateSubCommConfig(
            ctypes.byref(comm), length, pointer, ctypes.c_uint64(77), own, None, ctypes.byref(sub)
        )
        if members is None:
            sums.append((code, sub.value))
            continue
        buffer = floats(RANK + 1)
        call("AllReduce", buffer, buffer, 1, FP32, SUM, on=sub)
        sums.append((code, finish()[0], buffer[0], rank_in(sub)))
    return sums


def rank_in(communicator: ctypes.c_void_p) -> tuple[int, int]:
    rank, size = ctypes.c_uint32(), ctypes.c_uint32()
    library.HcclGetRankId(communicator, ctypes.byref(rank))
    library.HcclGetRankSize(communicator, ctypes.byref(size))
    return rank.value, size.value


# ---- functions that torch.distributed does not reach on every chip


@scenario
def vector_functions() -> object:
    """Rank i sends rank j (i + j) % 3 elements; the parts of all-gather and reduce-scatter are uneven."""
    matrix = [[(i + j) % 3 for j in range(WORLD)] for i in range(WORLD)]
    sent = [float(RANK * 10 + j) for j in range(WORLD) for _ in range(matrix[RANK][j])]
    received = floats(*[0] * sum(row[RANK] for row in matrix))
    flat = counts(*[entry for row in matrix for entry in row])
    call("AlltoAllVC", floats(*sent), flat, FP32, received, FP32)
    code, _ = finish()
    sizes = counts(*range(1, WORLD + 1))
    starts = counts(*[rank * (rank + 1) // 2 for rank in range(WORLD)])
    total = WORLD * (WORLD + 1) // 2
    gathered = floats(*[0] * total)
    call("AllGatherV", floats(*[RANK] * (RANK + 1)), RANK + 1, gathered, sizes, starts, FP32)
    scattered = floats(*[0] * (RANK + 1))
    call("ReduceScatterV", floats(*range(total)), sizes, starts, scattered, RANK + 1, FP32, SUM)
    call("Barrier")
    return code, list(received), finish()[0], list(gathered), list(scattered)


@scenario
def group_of_calls() -> object:
    """Both send first, but in one group; with a collective in it, and a message to the sender itself."""
    incoming, own, total = floats(0), floats(0), floats(RANK)
    library.HcclGroupStart()
    library.HcclGroupStart()
    call("Send", floats(RANK + 10), 1, FP32, 1 - RANK)
    call("AllReduce", total, total, 1, FP32, SUM)
    library.HcclGroupEnd()
    call("Send", floats(RANK + 20), 1, FP32, RANK)
    call("Recv", incoming, 1, FP32, 1 - RANK)
    call("Recv", own, 1, FP32, RANK)
    queued = library.aclrtSynchronizeStream(stream), incoming[0]
    library.HcclGroupEnd()
    return queued, *finish(), incoming[0], own[0], total[0]


@scenario
def refusals() -> object:
    buffer = floats(1, 2)
    address = ctypes.addressof(buffer)
    twice = (Item * 2)(Item(0, address, 1, FP32, 1 - RANK), Item(0, address, 1, FP32, 1 - RANK))
    destroyed = ctypes.c_void_p(1234)
    return [
        refused(call("BatchSendRecv", twice, 2)),
        refused(call("AllReduce", buffer, buffer, 2, BF16, PRODUCT)),
        refused(call("AllReduce", buffer, buffer, 2, UINT8, SUM)),
        refused(call("Broadcast", buffer, 2, FP32, 2)),
        refused(call("Send", buffer, 2, FP32, 7)),
        refused(call("AllReduce", buffer, buffer, 2, 99, SUM)),
        refused(call("AllReduce", buffer, buffer, 2, FP32, SUM, on=destroyed)),
        refused(library.HcclGroupEnd()),
    ]


@scenario
def half_precision_rounds_like_numpy() -> object:
    """Every finite fp16 and bf16 number times one, and sums that must be rounded."""
    import numpy as np

    values = np.arange(1 << 16, dtype=np.uint16)
    half = values.view(np.float16)
    half = half[np.isfinite(half)]
    other = half[::-1] * np.float16(0.37) if RANK else half
    buffer = other.copy()
    call(
        "AllReduce",
        buffer.ctypes.data_as(ctypes.c_void_p),
        buffer.ctypes.data_as(ctypes.c_void_p),
        len(buffer),
        3,
        SUM,
    )
    code, _ = finish()
    with np.errstate(over="ignore"):
        expected = (half.astype(np.float32) + (half[::-1] * np.float16(0.37)).astype(np.float32)).astype(
            np.float16
        )
    return code, bool((buffer.view(np.uint16) == expected.view(np.uint16)).all())


def main() -> None:
    name = sys.argv[2]
    library.aclrtSetDevice(RANK)
    if (machines := int(os.environ["MACHINES"])) > 1:
        library.sim_set(b"host", f"machine{RANK % machines}".encode())
    library.aclrtCreateStream(ctypes.byref(stream))
    if name == "host_dies":
        result = host_dies()
    elif name == "one_is_missing":
        set_timeout(os.environ["TIMEOUT"])
        result = create_refused()
    else:
        # processes may start at very different times
        set_timeout("100")
        assert create() == 0, library.aclGetRecentErrMsg()
        set_timeout(os.environ["TIMEOUT"])
        result = SCENARIOS[name]()
    if RANK == 0:
        ENDED.touch()
    sys.stdout.write(json.dumps([RANK, result]) + "\n")  # in one piece: the ranks share the pipe
    sys.stdout.flush()
    os._exit(0)  # without waiting for calls that wait in vain


if __name__ == "__main__":
    main()
