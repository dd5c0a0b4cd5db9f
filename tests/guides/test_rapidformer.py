"""docs/tutorials/rapidformer.md: its commands are read, name files that are there, and the first trains."""

from __future__ import annotations

import random
import shlex
from pathlib import Path

import pytest

pytest.importorskip("transformers")
library = pytest.importorskip("datasets")

from megatron_npu.finetune.run import arguments  # noqa: E402
from tests.conftest import ROOT  # noqa: E402
from tests.support import tiny_models, train_runs, walk  # noqa: E402

PAGE = (ROOT / "docs" / "tutorials" / "rapidformer.md").read_text(encoding="utf-8")
COMMANDS = [
    shlex.split(command)[1:] for command in walk.commands_of_page(PAGE) if command.startswith("rapidformer ")
]
SCRIPTS = sorted((ROOT / "examples" / "rapidformer").glob("rapidformer_*.py"))


@pytest.mark.parametrize("command", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_is_read(command: list[str]) -> None:
    args = arguments.parse(command)
    assert args.global_batch_size % args.micro_batch_size == 0
    if args.user_script:
        assert (ROOT / args.user_script).is_file()


def test_every_script_has_its_command() -> None:
    typed = {command[1] for command in COMMANDS if command[0] == "--user-script"}
    assert {ROOT / script for script in typed} == set(SCRIPTS)
    assert len(SCRIPTS) == 4
    for script in SCRIPTS:
        assert f"(../../examples/rapidformer/{script.name})" in PAGE


def test_the_black_box_trains(tmp_path: Path) -> None:
    """As typed but for graphs, which compile for minutes: a small model, few pairs, one process."""
    random.seed(3)
    tiny_models.bert(tmp_path / "bert-base-cased")
    train_runs.glue(tmp_path / "glue", train=64, validation=8)
    last = ["--save", str(tmp_path / "saved"), "--epochs", "1", "--data-path", str(tmp_path / "glue")]
    model = ["--pretrained-model-name-or-path", str(tmp_path / "bert-base-cased")]
    typed = [word for word in COMMANDS[0] if word != "--onnx-runtime-training"]
    done = train_runs.train(*typed, *last, *model, HF_HOME=str(tmp_path / "home"))
    assert done.returncode == 0, done.stderr
    assert len(train_runs.losses(tmp_path / "saved")) == 1
