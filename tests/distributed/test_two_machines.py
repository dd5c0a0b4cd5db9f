"""A run over two machines: one torchrun on each, which here are two on one, that meet at an address."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.pretrain.checkpoint import checkpoint_command
from tests.conftest import LONGEST, checkout
from tests.support import ports, stock_core, tiny, train_runs, warm

pytest.importorskip("megatron.core")


def test_two_machines_train_as_two_processes_of_one(tmp_path):
    dataset = tiny.write_dataset(tmp_path / "numbers")
    # in the default form a sharded optimizer has padding in which anything may be
    sharded = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    flags = [*tiny.flags_for(dataset), *sharded, "--eval-interval", "3"]
    one, two = tmp_path / "one", tmp_path / "two"
    together = tiny.run("pretrain", *flags, "--save", str(one), processes=2)
    assert together.returncode == 0, together.stderr
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    machines = [_machine(number, meeting, ["pretrain", *flags, "--save", str(two)]) for number in range(2)]
    try:
        told = [machine.communicate(timeout=LONGEST)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
    assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    assert "iteration        6/       6" in told[0]
    assert "iteration" not in told[1]  # the first machine speaks
    assert tiny.losses(two / "metrics.jsonl") == tiny.losses(one / "metrics.jsonl")
    assert tiny.rows(two / "metrics.jsonl", "start")[0]["world_size"] == 2
    assert tiny.differences(two / "iter_0000006", one / "iter_0000006") == []
    assert len(tiny.rows(two / "metrics.jsonl", "ranks")[0]["hosts"]) == 2
    assert all(len(row["forward_ms_of_ranks"]) == 2 for row in tiny.rows(two / "metrics.jsonl"))


def test_indices_of_the_data_on_a_disk_of_each_machine_are_built_on_each(tmp_path):
    """Upstream ends on the second machine: a file is not there, whose name ends in document_index.npy."""
    dataset = tiny.write_dataset(tmp_path / "numbers")
    words = ["pretrain", *tiny.flags_for(dataset), "--data-cache-path", "own", "--train-iters", "2"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    machines = [_machine(number, meeting, words, tmp_path / str(number)) for number in range(2)]
    try:
        told = [machine.communicate(timeout=LONGEST)[0] for machine in machines]
    finally:
        for machine in machines:
            machine.kill()
            machine.communicate()
    assert [machine.returncode for machine in machines] == [0, 0], told
    assert "own is not shared with rank 0; building its index on this machine as well" in told[1]
    built = [sorted(each.name for each in (tmp_path / number / "own").glob("*.npy")) for number in "01"]
    assert built[0] == built[1] != []


def _command(command: str, folder: Path) -> tuple[list[str], tuple[str, ...], dict[str, str]]:
    """Return a command that saves into ``save``, what it imports, and its variables."""
    save = ["--save", "save", "--save-interval", "1"]
    if command == "pretrain":
        dataset = tiny.write_dataset(folder / "numbers")
        return ["pretrain", *tiny.flags_for(dataset), *save], warm.DRIVER, {}
    if command == "train":
        script = folder / "mine.py"
        script.write_text("from rapidformer import RapidformerEngine\nRapidformerEngine()\n")
        return ["train", "--user-script", str(script), *save], train_runs.MODULES, {}
    tree = checkout("megatron_core", "0.16.1")
    words = ["run", str(tree / "pretrain_gpt.py"), "--mock-data", *stock_core.FLAGS, *save]
    return words, warm.STOCK, {"MEGATRON_LM_PATH": str(tree)}


def _machine(
    number: int,
    meeting: list[str],
    words: list[str],
    folder: Path | None = None,
    modules=warm.DRIVER,
    **variables,
) -> subprocess.Popen[str]:
    """Start a machine's launcher of the command ``words``, in a folder."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number), *meeting]
    command = [sys.executable, *launcher, "--nproc-per-node", "1", "-m", "megatron_npu", *words]
    command, env = warm.ready(command, {**tiny.environment(), **variables}, modules)
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, env=env, cwd=folder, text=True, **output)


def test_tasks_of_srun_train_one_model(tmp_path):
    """Each trained a model of its own, and ended well."""
    dataset = tiny.write_dataset(tmp_path / "numbers")
    step = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    meeting = {"SLURM_STEP_NODELIST": "localhost,elsewhere", "MASTER_PORT": str(ports.free_port())}
    words = [sys.executable, "-m", "megatron_npu", "pretrain", *tiny.flags_for(dataset)]
    words += ["--save", str(tmp_path / "save")]
    tasks = []
    for number in range(2):
        place = {"SLURM_PROCID": str(number), "SLURM_LOCALID": "0", "SLURM_NODEID": str(number)}
        command, env = warm.ready(words, {**tiny.environment(), **step, **meeting, **place}, warm.DRIVER)
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        tasks.append(subprocess.Popen(command, env=env, text=True, **output))
    told = [task.communicate(timeout=LONGEST)[0] for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(told)
    assert tiny.rows(tmp_path / "save" / "metrics.jsonl", "start")[0]["world_size"] == 2


@pytest.mark.parametrize("command", ["pretrain", "train", "run"])
def test_a_disk_on_each_machine_is_refused_in_one_line(command, tmp_path):
    """Half of the model was saved on each, and the run ended well."""
    words, modules, variables = _command(command, tmp_path)
    meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
    for number in range(2):
        (tmp_path / str(number)).mkdir()
    machines = [
        _machine(number, meeting, words, tmp_path / str(number), modules, **variables) for number in range(2)
    ]
    try:
        told = machines[0].communicate(timeout=LONGEST)[0]
    finally:
        for machine in machines:
            machine.terminate()
            machine.communicate()
    assert machines[0].returncode == 1
    line = r"error: --save save must be .* \(rank 0\) writes there are not visible on .* \(rank 1\)\. "
    assert re.search(line, told), told
    assert not [*tmp_path.glob("*/save/iter_*")]


TRAINS = Path(__file__).parents[1] / "finetune" / "scripts" / "dropout.py"
IN_EPOCHS = "--epochs 1 --micro-batch-size 4 --global-batch-size 8 --lr 1e-2 --no-plot".split()
PARTS = {
    "pipeline": ("pretrain", "--pipeline-model-parallel-size", "2", "--data-cache-path", "cache"),
    "train": ("train",),
    "stock-torch": ("run", "--ckpt-format", "torch", "--tensor-model-parallel-size", "2"),
}


@pytest.mark.parametrize("case", PARTS)
def test_machines_keep_parts_resume_from_them_and_join_them(case, tmp_path, capsys):
    """Half of a checkpoint lies on each disk: none is called whole, both resume, and joined they load."""
    command, *layout = PARTS[case]
    words, modules, variables = _command(command, tmp_path)
    ways = [["--save-interval", "4", "--exit-interval", "4"], []]
    if command == "train":
        words, ways = [*words[:2], str(TRAINS), *IN_EPOCHS, *words[3:]], [["--save-interval", "4"]] * 2
    words += [*layout, "--load", "save", "--save-per-machine", "--log-interval", "1"]
    parts = [tmp_path / str(number) / "save" for number in range(2)]
    for part in parts:
        part.parent.mkdir()
    for ending in ways:
        meeting = ["--master-addr", "127.0.0.1", "--master-port", str(ports.free_port())]
        machines = [
            _machine(number, meeting, [*words, *ending], part.parent, modules, **variables)
            for number, part in enumerate(parts)
        ]
        try:
            told = [machine.communicate(timeout=LONGEST)[0] for machine in machines]
        finally:
            for machine in machines:
                machine.kill()
        assert [machine.returncode for machine in machines] == [0, 0], "\n".join(told)
    assert re.search(
        r"resuming from iteration (4|6)|successfully loaded checkpoint .* at iteration 4", told[0]
    ), told
    for part in parts:
        assert checkpoint_command.main(["verify", str(part)]) == 0
        said = capsys.readouterr().out.splitlines()
        assert said
        assert all(
            re.search(
                r"only a part of a checkpoint, saved by .*; \d of its files are on .* \(its own files: whole",
                line,
            )
            for line in said
        )
    joined = tmp_path / "joined"
    assert checkpoint_command.main(["gather", *map(str, parts), "--into", str(joined)]) == 0
    assert checkpoint_command.main(["verify", str(joined)]) == 0
    assert capsys.readouterr().out.endswith(": whole\n")
    lacking = ["gather", str(parts[0]), "--into", str(tmp_path / "half")]
    with pytest.raises(UsageError, match=r"lack \d files of the checkpoint; one of them is .*, which is on"):
        checkpoint_command.main(lacking)
