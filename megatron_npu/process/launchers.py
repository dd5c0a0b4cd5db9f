"""Determine the rank of this process under any supported launcher.

No other module reads the launchers' environment variables.

All other modules read torchrun's names: RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. ``settle`` sets these for processes of Slurm or MPI. Kubernetes operators (PyTorchJob, Volcano,
PAI-DLC, AscendJob) number machines with the variables that torchrun uses for ranks; Kubeflow's Trainer sets
torchrun's. Ambiguous settings are rejected, because a task that does not know of the other tasks would train
a separate model.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import re
import sys
import time
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_npu.base import digits
from megatron_npu.base.errors import UsageError

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
_JOBS = (
    "run",
    "pretrain",
    "train",
)  # of all machines of a job; other commands are typed into a shell
_UNTOUCHED = ("sim",)  # hands its environment on
_ELASTIC = "TORCHELASTIC_RUN_ID"  # torchrun's, and that of `train`
_PORT = 29500  # torch's default
_TABLE = "RANK_TABLE_FILE"
_WAIT, _SAY, _PAUSE = 900.0, 30.0, 1.0  # seconds for the rank table, between two lines, between two looks


@dataclass(frozen=True)
class Task:
    """One process of a group of processes that a launcher started.

    Attributes:
        launcher: the launcher's name.
        rank, ranks: the number of the process, and the total number of processes.
        local, locals: the number of the process on its machine, and the number of processes there.
        machine: the number of its machine.
        address: the address of the first machine, or None if unknown.
        job: a number that is the same for all tasks of the job.
    """

    launcher: str
    rank: int
    ranks: int
    local: int
    locals: int
    machine: int
    address: str | None
    job: int


@dataclass(frozen=True)
class Machine:
    """One machine or pod of a job that a Kubernetes operator started.

    Attributes:
        launcher: the variables that identify the operator.
        number, count: the number of the machine, and the number of machines.
        processes: the number of processes per machine, or None if it is not specified.
        address, port: the rendezvous address.
    """

    launcher: str
    number: int
    count: int
    processes: int | None
    address: str | None
    port: str | None


def settle(argv: Sequence[str]) -> None:
    """Set the environment variables of torchrun for this process, whichever launcher started it.

    A second call has no effect.

    Args:
        argv: the command and its arguments.

    Raises:
        UsageError: the launcher's variables are inconsistent, or do not match the running processes.
    """
    command, is_job = argv[0], argv[0] in _JOBS or "--cluster" in argv
    if _ELASTIC in os.environ or command in _UNTOUCHED:
        return
    machine = _of_trainer() or _of_operator()
    if not is_job:
        return _be_alone(command, machine) if machine else _settle_task(command)
    _wait_for_table()
    if machine is not None:
        _settle_machine(argv, machine)
    else:
        _settle_task(command)
    return _require_address()


def _is_told() -> bool:
    """Return True if torchrun's variables already define this process's rank.

    DeepSpeed's launcher and accelerate set these variables.
    """
    return all(
        digits.number(os.environ.get(name, "")) is not None for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )


# -- tasks: one process each


def _settle_task(command: str) -> None:
    task = None if _is_told() else _of_slurm() or _of_open_mpi() or _of_hydra()
    if task is None:
        return
    port = str(20000 + zlib.crc32(str(task.job).encode()) % 20000)
    address = os.environ.get("MASTER_ADDR") or task.address
    if address is None:
        raise UsageError(
            f"{task.launcher} started {task.ranks} tasks on several machines, but MASTER_ADDR is "
            "not set; it must contain the first machine's address",
            remedy="Add -x MASTER_ADDR=HOST -x MASTER_PORT=29500 to mpirun, or start torchrun on each "
            "machine.",
        )
    if command == "train" and task.locals == 1:  # which starts the ranks of its machine by itself
        given = {"NNODES": task.ranks, "NODE_RANK": task.rank}
    else:
        ranks = (task.rank, task.ranks, task.local, task.locals, task.machine)
        given = dict(zip(RANKS, ranks, strict=True))
    os.environ.update({name: str(value) for name, value in given.items()})
    os.environ["MASTER_ADDR"] = address
    os.environ.setdefault("MASTER_PORT", port)


def _of_slurm() -> Task | None:
    """Return the ``srun`` task that this process belongs to.

    Return None in a batch script and in a step with a single task.
    """
    tasks = _number("SLURM_STEP_NUM_TASKS", _number("SLURM_NTASKS", 1))
    if "SLURM_PROCID" not in os.environ or "SLURM_STEP_ID" not in os.environ or tasks < 2:
        return None
    node = _number("SLURM_NODEID", 0)
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "1")
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_NODELIST", "")
    return Task(
        "srun",
        _number("SLURM_PROCID", 0),
        tasks,
        _number("SLURM_LOCALID", 0),
        _tasks_of(per_node, node),
        node,
        first_host(nodes) or None,
        _number("SLURM_JOB_ID", 0) * 1000 + _number("SLURM_STEP_ID", 0),
    )


def _tasks_of(per_node: str, node: int) -> int:
    """Return a node's number of tasks from Slurm's notation, in which ``4(x2),2`` stands for 4, 4 and 2."""
    counts: list[int] = []
    for word in per_node.split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", word.strip())
        if found is None:
            raise UsageError(
                f"SLURM_TASKS_PER_NODE must contain task counts such as 4(x2),2, but got {per_node}",
                remedy="Start torchrun.",
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts[node] if node < len(counts) else counts[-1]


def first_host(nodes: str) -> str:
    """Return the first host in a node list of Slurm, such as gpu03 for ``gpu[03-07,9],login1``."""
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)[0])  # type: ignore[index]


def _of_open_mpi() -> Task | None:
    if "OMPI_COMM_WORLD_RANK" not in os.environ or _number("OMPI_COMM_WORLD_SIZE", 1) < 2:
        return None
    rank, ranks = _number("OMPI_COMM_WORLD_RANK", 0), _number("OMPI_COMM_WORLD_SIZE", 1)
    local, locals_ = _number("OMPI_COMM_WORLD_LOCAL_RANK", 0), _number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid")  # of version 5, and before
    job = next((os.environ[name] for name in names if name in os.environ), str(os.getppid()))
    return _of_mpi("mpirun (Open MPI)", rank, ranks, local, locals_, job)


def _of_hydra() -> Task | None:
    """Return the MPI task of this process if MPICH's or Intel's mpiexec started it, or None if not."""
    if not {"PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"} <= os.environ.keys():
        return None
    ranks, locals_ = _number("PMI_SIZE", 1), _number("MPI_LOCALNRANKS", 1)
    if ranks < 2:
        return None
    job = str(os.getppid())
    return _of_mpi("mpiexec", _number("PMI_RANK", 0), ranks, _number("MPI_LOCALRANKID", 0), locals_, job)


def _of_mpi(launcher: str, rank: int, ranks: int, local: int, locals_: int, job: str) -> Task:
    """Return the MPI task that this process belongs to.

    MPI provides no addresses, so the master address is known only on a single machine.
    """
    address = "127.0.0.1" if ranks == locals_ else None
    return Task(launcher, rank, ranks, local, locals_, rank // locals_, address, zlib.crc32(job.encode()))


# -- machines: an operator's pods


def _of_trainer() -> Machine | None:
    """Return the machine that Kubeflow's Trainer or PyTorchJob describes in torchrun's variables."""
    if "PET_NNODES" not in os.environ:
        return None
    address = os.environ.get("PET_MASTER_ADDR") or os.environ.get("MASTER_ADDR")
    port = os.environ.get("PET_MASTER_PORT") or os.environ.get("MASTER_PORT")
    processes = os.environ.get("PET_NPROC_PER_NODE", "")
    each = digits.number(processes)
    number, count = _number("PET_NODE_RANK", 0), _number("PET_NNODES", 1)
    return Machine("PET_NNODES", number, count, each, address, port)


def _of_operator() -> Machine | None:
    """Return the machine that an operator describes by variables that usually number ranks, or None.

    If LOCAL_RANK is a number, RANK is the rank of a process. AscendJob sets it to a list of the pod's NPUs.
    """
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or _is_told():
        return None
    place = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    listed = [word for word in os.environ.get("LOCAL_RANK", "").split(",") if word.strip()]
    number, count = _number("RANK", 0), _number("WORLD_SIZE", 1)
    if not listed:
        return Machine("RANK", number, count, None, *place)
    return Machine("LOCAL_RANK", number, _pods(count, len(listed)), len(listed), *place)


def _pods(npus: int, each: int) -> int:
    """Return the number of pods of an AscendJob.

    The job's WORLD_SIZE counts NPUs.

    Raises:
        UsageError: the job's numbers contradict each other.
    """
    if _number("LOCAL_WORLD_SIZE", each) != each or npus % each:
        names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
        given = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise UsageError(
            f"each pod must have as many NPUs as LOCAL_RANK lists, but got {given}",
            remedy="Correct the job, or unset these variables and start torchrun.",
        )
    return npus // each


def _settle_machine(argv: Sequence[str], machine: Machine) -> None:
    command, several = argv[0], (machine.processes or 1) > 1 or _devices() > 1
    if machine.number >= machine.count:
        raise UsageError(
            f"the number of a machine must be less than the number of machines, but {machine.launcher} "
            f"describes machine {machine.number} of {machine.count}",
            remedy="Correct the job.",
        )
    if command == "train":
        for name in RANKS:
            os.environ.pop(name, None)
        os.environ["NNODES"], os.environ["NODE_RANK"] = str(machine.count), str(machine.number)
        _meet_at(machine)
    elif several and _trains(argv):
        raise UsageError(
            f"{machine.launcher} describes {machine.count} machines with several devices each, "
            "but started only one process on this machine; each device requires its own process",
            remedy="Start torchrun -m megatron_npu, which reads PET_…"
            if machine.launcher.startswith("PET")
            else f"Start torchrun --nnodes {machine.count} --node-rank $RANK --nproc-per-node N "
            "--master-addr $MASTER_ADDR --master-port $MASTER_PORT -m megatron_npu " + command,
        )
    else:
        given = (machine.number, machine.count, 0, 1, machine.number)
        os.environ.update({name: str(value) for name, value in zip(RANKS, given, strict=True)})
        _meet_at(machine)


def _meet_at(machine: Machine) -> None:
    if machine.address:
        os.environ["MASTER_ADDR"] = machine.address
        os.environ["MASTER_PORT"] = machine.port or str(_PORT)


def _trains(argv: Sequence[str]) -> bool:
    """Return True if a command line starts training.

    Scripts are recognized by Megatron's naming scheme.
    """
    script = next((Path(word).name for word in argv[1:] if word.endswith(".py")), "")
    return argv[0] == "pretrain" or script.startswith(("pretrain", "finetune", "train"))


def _devices() -> int:
    """Count the NPUs or GPUs of the pod by their device files, because torch is not imported yet."""
    return len(glob.glob("/dev/davinci[0-9]*")) or len(glob.glob("/dev/nvidia[0-9]*"))


def _be_alone(command: str, machine: Machine) -> None:
    """Run a command that was typed in a pod's shell as a single process, outside the distributed job."""
    for name in RANKS:
        os.environ.pop(name, None)
    if machine.count > 1:
        told = f"machine {machine.number} of {machine.count} of a job ({machine.launcher})"
        print(
            f"megatron-npu {command}: this is {told}; the command runs only in this process", file=sys.stderr
        )


def _wait_for_table() -> None:
    """Wait until the rank table of an AscendJob is complete.

    The table is written while pods start.

    Raises:
        UsageError: the table is still incomplete after a long wait.
    """
    path = Path(named := os.environ.get(_TABLE, ""))  # of an empty one: the working directory
    if not os.path.isfile(named):  # HCCL says so, if it wants it
        return
    began = said = time.monotonic()
    while (status := _status(path)) == "initializing":
        now = time.monotonic()
        if now - began > _WAIT:
            raise UsageError(
                f"{_TABLE}={path} has had the status {status} for {_WAIT:.0f} s; the job starts only when "
                "the status is completed",
                remedy="Check that all pods are running.",
            )
        if now - said > _SAY:
            said = now
            print(
                f"megatron_npu: waiting for {path} (status: {status}); not all pods are running yet",
                file=sys.stderr,
            )
        time.sleep(_PAUSE)


def _status(path: Path) -> str | None:
    """Return the ``status`` field of a rank table.

    The result is ``initializing`` while the file is being written.
    """
    with contextlib.suppress(OSError):
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            return "initializing"
        return str(content.get("status")) if isinstance(content, dict) else None
    return None


def _require_address() -> None:
    """Check that the launcher has provided a rendezvous address for the ranks.

    Raises:
        UsageError: there are several ranks, and MASTER_ADDR is not set or MASTER_PORT is not a port.
    """
    if "RANK" not in os.environ or _number("WORLD_SIZE", 1) == 1:
        return
    if not os.environ.get("MASTER_ADDR"):
        raise UsageError(
            f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are set, but MASTER_ADDR "
            "is not; MASTER_ADDR must contain the first machine's address, and MASTER_PORT its port",
            remedy="Export both, or use torchrun.",
        )
    port = os.environ.get("MASTER_PORT", "").strip() or str(_PORT)
    if not 0 < (digits.number(port) or 0) < 65536:
        raise UsageError(
            f"MASTER_PORT must be a port from 1 to 65535, but got {port}",
            remedy="Export the port that the first machine uses.",
        )
    os.environ["MASTER_PORT"] = port


def _number(name: str, default: int) -> int:
    """Return the number that a launcher's environment variable contains.

    Raises:
        UsageError: the value is not a number.
    """
    text = os.environ.get(name, "").strip()
    number = digits.number(text)
    if text and number is None:
        raise UsageError(f"{name} must be an integer, but got {text}", remedy=f"Correct it, or unset {name}.")
    return default if number is None else number
