"""What launchers export, and which rank a process is for it: understood, or refused."""

from __future__ import annotations

import contextlib
import json
import os

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.process import launchers

ANOTHER = 12345  # some other user
SRUN = {
    **{"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "77", "SLURM_STEP_NUM_TASKS": "5", "SLURM_PROCID": "4"},
    **{"SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
    "SLURM_STEP_NODELIST": "gpu[07-09]",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
MEETING = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456"}
POD = {**MEETING, "RANK": "1", "WORLD_SIZE": "2"}  # PyTorchJob, Volcano, PAI-DLC
ASCEND = {**POD, "WORLD_SIZE": "16", "LOCAL_RANK": "0,1,2,3,4,5,6,7", "LOCAL_WORLD_SIZE": "8"}
TRAINER = {"PET_NNODES": "2", "PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "node-0-0"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another account")
def test_without_a_table_a_working_directory_that_is_closed_does_not_matter(tmp_path) -> None:
    """As of ``sudo -u user`` in /root: ``pretrain`` and ``train`` ended because of the path "."."""
    if not (child := os.fork()):
        code = 1
        with contextlib.suppress(OSError):
            tmp_path.chmod(0)
            os.chdir(tmp_path)
            os.setuid(ANOTHER)
            os.environ.pop("RANK_TABLE_FILE", None)
            launchers.settle(["pretrain"])
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.fixture
def settled(monkeypatch):
    """Settle a command under given variables; return those that say where the process is."""

    def settle(given: dict[str, str], *argv: str, devices: int = 1) -> dict[str, str]:
        monkeypatch.setattr(os, "environ", dict(given))
        monkeypatch.setattr(launchers, "_devices", lambda: devices)
        launchers.settle(argv)
        names = (*launchers.RANKS, "MASTER_ADDR", "MASTER_PORT", "NNODES", "NODE_RANK")
        return {name: os.environ[name] for name in names if name in os.environ}

    return settle


def ranks(rank: int, ranks: int, local: int, locals_: int, machine: int) -> dict[str, str]:
    return dict(zip(launchers.RANKS, map(str, (rank, ranks, local, locals_, machine)), strict=True))


def test_a_task_of_srun_is_a_rank(settled) -> None:
    """Each trained a model of its own."""
    for command in ("pretrain", "train", "generate", "run"):
        found = settled({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x3)"}, command)
        assert 20000 <= int(found.pop("MASTER_PORT")) < 40000
        assert found == ranks(4, 5, 0, 2, 2) | {"MASTER_ADDR": "gpu07"}
    assert settled({**SRUN, **MEETING}, "pretrain") == ranks(4, 5, 0, 1, 2) | MEETING
    assert (
        settled(SRUN, "pretrain")["MASTER_PORT"]
        == settled({**SRUN, "SLURM_PROCID": "1"}, "run")["MASTER_PORT"]
    )


def test_the_only_task_of_a_machine_starts_the_ranks_of_a_fine_tuning(settled) -> None:
    found = settled({**SRUN, **MEETING, "SLURM_STEP_TASKS_PER_NODE": "1(x5)"}, "train")
    assert found == {"NNODES": "5", "NODE_RANK": "4", **MEETING}


def test_a_batch_script_and_a_shell_of_slurm_are_no_ranks(settled) -> None:
    batch = {name: value for name, value in SRUN.items() if not name.startswith("SLURM_STEP")}
    assert settled({**batch, "SLURM_NTASKS": "5"}, "pretrain") == {}
    assert settled({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}, "generate") == {}


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("gpu[03-07,9],login1", "gpu03"), ("a1,a2", "a1"), ("r[1-2]n[4,6]", "r1n4"), ("one", "one")],
)
def test_the_first_of_slurm_s_hosts(nodes, first) -> None:
    assert launchers.first_host(nodes) == first


def test_tasks_of_mpi_are_ranks(settled) -> None:
    found = settled({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, "pretrain")
    assert found.pop("MASTER_PORT")
    assert found == ranks(3, 4, 1, 4, 0) | {"MASTER_ADDR": "127.0.0.1"}
    several = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert settled({**several, **MEETING}, "run", "pretrain_gpt.py") == ranks(3, 4, 1, 2, 1) | MEETING
    with pytest.raises(UsageError, match=r"4 tasks on several machines.*MASTER_ADDR.*-x MASTER_ADDR=HOST"):
        settled(several, "pretrain")
    assert settled(HYDRA, "evaluate")["RANK"] == "1"


def test_a_pod_of_one_device_is_a_rank(settled) -> None:
    for argv in (["pretrain"], ["run", "pretrain_gpt.py"]):
        assert settled(POD, *argv) == ranks(1, 2, 0, 1, 1) | MEETING


def test_one_process_in_a_pod_of_several_devices_is_refused(settled) -> None:
    for given in (POD, ASCEND):
        with pytest.raises(
            UsageError, match=r"describes 2 machines with several devices each, .*torchrun --nnodes 2 "
        ):
            settled(given, "pretrain", devices=8)
    with pytest.raises(UsageError, match=r"PET_NNODES describes 2 machines .*which reads PET"):
        settled(TRAINER, "run", "pretrain_gpt.py", devices=4)
    assert settled(POD, "run", "tools/preprocess_data.py", devices=8)["RANK"] == "1"  # no training


def test_a_fine_tuning_starts_the_ranks_of_its_pod(settled) -> None:
    for given in (POD, ASCEND):
        assert settled(given, "train", devices=8) == {"NNODES": "2", "NODE_RANK": "1", **MEETING}
    assert settled(TRAINER, "train") == {
        **{"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "node-0-0", "MASTER_PORT": "29500"}
    }


@pytest.mark.parametrize("command", ["generate", "serve", "lambada", "evaluate", "convert", "bench"])
def test_what_is_typed_into_a_pod_s_shell_waits_for_nobody(command, settled, capsys) -> None:
    for given in (POD, ASCEND, TRAINER):
        assert not {*launchers.RANKS} & settled(given, command).keys()
        assert "the command runs only in this process" in capsys.readouterr().err


def test_what_torchrun_and_others_say_stays(settled) -> None:
    told = ranks(1, 2, 1, 2, 0) | MEETING
    assert settled({**told, **SRUN}, "pretrain") == told
    assert settled({**told, "TORCHELASTIC_RUN_ID": "none", **SRUN, "PET_NNODES": "2"}, "generate") == told
    assert settled({}, "pretrain") == {}


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({**ASCEND, "WORLD_SIZE": "15"}, "each pod must have as many NPUs as LOCAL_RANK lists"),
        ({**POD, "RANK": "2"}, "machine 2 of 2"),
        ({**POD, "RANK": "x"}, "RANK must be an integer, but got x"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "are set, but MASTER_ADDR is not"),
        ({**SRUN, "SLURM_STEP_TASKS_PER_NODE": "two"}, "task counts such as 4"),
    ],
)
def test_what_cannot_be_is_refused(given, line, settled) -> None:
    with pytest.raises(UsageError, match=line):
        settled(given, "pretrain")


def test_a_rank_table_is_waited_for(settled, tmp_path, monkeypatch, capsys) -> None:
    table = tmp_path / "hccl.json"
    states = iter(["", '{"status": "initializing"}', json.dumps({"status": "completed"})])
    table.write_text(next(states))
    monkeypatch.setattr(launchers.time, "sleep", lambda seconds: table.write_text(next(states)))
    monkeypatch.setattr(launchers, "_SAY", -1.0)
    settled({**POD, "RANK_TABLE_FILE": str(table)}, "pretrain")
    assert [*states] == []
    assert "not all pods are running yet" in capsys.readouterr().err
    table.write_text('{"status": "initializing"}')
    monkeypatch.setattr(launchers, "_WAIT", -1.0)
    with pytest.raises(
        UsageError,
        match=r"hccl.json has had the status initializing for .* only when the status is completed",
    ):
        settled({**POD, "RANK_TABLE_FILE": str(table)}, "train")


@pytest.mark.parametrize("port", ["abc", "0", "65536", "-1"])
def test_what_is_no_port_is_refused(settled, port: str) -> None:
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": port}
    with pytest.raises(UsageError, match=f"MASTER_PORT must be a port from 1 to 65535, but got {port}. Ex"):
        settled(rank, "pretrain")


@pytest.mark.parametrize("given", [{}, {"MASTER_PORT": ""}])
def test_a_port_that_is_empty_is_torchruns(settled, given: dict[str, str]) -> None:
    """An empty one was a traceback of torch's."""
    rank = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "node1"}
    assert settled(rank | given, "pretrain")["MASTER_PORT"] == "29500"
