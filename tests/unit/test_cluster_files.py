"""examples/cluster: the launch files start what they say, with flags that their commands have."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from megatron_npu.finetune.run import arguments as of_train
from megatron_npu.pretrain.flags import arguments as of_pretrain
from tests.conftest import ROOT
from tests.support import processes

sys.path.insert(0, str(ROOT / "scripts"))
import cluster_schemas

FOLDER = ROOT / "examples" / "cluster"
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}

SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
SKY |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8"}


def written(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(f"#!/bin/bash\n{text}\n", encoding="utf-8")
    (folder / name).chmod(0o755)


def started(script: str, folder: Path) -> list[list[str]]:
    """Run a batch script where srun starts one task, and torchrun and megatron-npu only tell how."""
    text = (FOLDER / script).read_text(encoding="utf-8")
    if script.endswith(".yaml"):
        text = yaml.safe_load(text)["run"]
    written(folder, "job", text)
    written(folder, "srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"')
    written(folder, "scontrol", "echo n1; echo n2")
    for name in ("torchrun", "megatron-npu"):
        written(folder, name, f'printf "%q " {name} "$@" >> {folder}/told; echo >> {folder}/told')
    env = {**os.environ, **SLURM, **SKY, "PATH": f"{folder}:{os.environ['PATH']}"}
    processes.run(["bash", folder / "job"], cwd=folder, env=env, check=True)
    return [shlex.split(line) for line in (folder / "told").read_text(encoding="utf-8").splitlines()]


def test_srun_starts_the_ranks_behind_a_look_at_the_machines(tmp_path) -> None:
    first, second = started("srun.sbatch", tmp_path)
    assert first[:3] == ["megatron-npu", "doctor", "--cluster"]
    assert second[:2] == ["megatron-npu", "pretrain"]
    assert of_pretrain.parse(second[2:]).exit_signal_handler


def test_torchrun_is_told_where_machines_meet(tmp_path) -> None:
    (words,) = started("torchrun.sbatch", tmp_path)
    assert words[:5] == "torchrun --nnodes 2 --nproc-per-node 8".split()
    # the static rendezvous (--master-addr) keeps the store, so that every restart is refused
    assert words[7:11] == "--rdzv-backend c10d --rdzv-endpoint n1:20007".split()
    assert "--master-addr" not in words
    assert words[words.index("-m") :][:4] == [
        "-m",
        "megatron_npu",
        "run",
        f"{tmp_path}/Megatron-LM/pretrain_gpt.py",
    ]


def test_torchrun_is_told_its_machine_by_skypilot(tmp_path) -> None:
    (words,) = started("sky.yaml", tmp_path)
    meeting = (
        "torchrun --nnodes 2 --node-rank 1 --nproc-per-node 8 --master-addr 10.0.0.1 --master-port 29500"
    )
    assert words[:11] == meeting.split()
    at = words.index("pretrain")
    assert of_pretrain.parse(words[at + 1 :]).save == "/shared/checkpoints"


def containers(value: object) -> list[list[str]]:
    """Return the command lines in a manifest, wherever they are."""
    if isinstance(value, list):
        return [words for each in value for words in containers(each)]
    if not isinstance(value, dict):
        return []
    inner = [words for each in value.values() for words in containers(each)]
    return [[*value["command"], *value.get("args", [])], *inner] if "command" in value else inner


@pytest.mark.parametrize(
    "name", sorted(path.name for path in FOLDER.glob("*.yaml") if path.name != "sky.yaml")
)
def test_the_commands_of_a_manifest_can_be_read(name) -> None:
    manifest = yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))
    assert {"apiVersion", "kind", "metadata", "spec"} <= manifest.keys()
    found = containers(manifest)
    assert found
    for words in found:
        words = words[2].split() if words[0] == "bash" else words
        at = next(number for number, word in enumerate(words) if word in ("train", "pretrain"))
        parse = of_train.parse if words[at] == "train" else of_pretrain.parse
        assert parse(words[at + 1 :]).save == "/shared/checkpoints"


def test_a_manifest_is_compared_with_a_schema() -> None:
    """Those of the operators are too large to be kept here."""
    pods = {"type": "object", "required": ["replicas"], "properties": {"replicas": {"type": "integer"}}}
    schema = {"type": "object", "properties": {"spec": {"type": "object", "additionalProperties": pods}}}
    assert not list(cluster_schemas.faults({"spec": {"Worker": {"replicas": 1}}}, schema))
    wrong = {"spec": {"Master": {"replicas": "1"}, "Worker": {"replica": 1}}, "kin": "Job"}
    assert list(cluster_schemas.faults(wrong, schema)) == [
        "spec.Master.replicas is '1', not of type integer",
        "spec.Worker lacks replicas",
        "spec.Worker has no field replica",
        " has no field kin",
    ]


def test_every_launch_file_is_on_the_page() -> None:
    page = (ROOT / "docs" / "how-to" / "machines.md").read_text(encoding="utf-8")
    for path in FOLDER.iterdir():
        assert f"](../../examples/cluster/{path.name})" in page, path.name
