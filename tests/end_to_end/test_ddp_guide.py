"""docs/tutorials/ddp-from-scratch.md: its commands, in order, with a smaller model and fewer steps."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, ROOT
from tests.end_to_end.plain_losses import losses
from tests.support import processes, warm
from tests.support.ports import free_port
from tests.support.simulated import unavailable

PAGE = ROOT / "docs" / "tutorials" / "ddp-from-scratch.md"
HEADING = re.compile(r"^###? (.+?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
BASH = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALLER = {
    "--context-len 128": "--context-len 16",
    "--embedding-dim 128": "--embedding-dim 32",
    "--num-layers 4": "--num-layers 1",
    "--max-steps 200": "--max-steps 5",
    "--learning-rate 2e-3": "--learning-rate 2e-2",
}


def sections() -> dict[str, str]:
    """Return the commands of each section, by its heading."""
    text = PAGE.read_text(encoding="utf-8")
    return {title: found[1] for title, body in HEADING.findall(text) if (found := BASH.search(body))}


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each section's commands print."""
    root = tmp_path_factory.mktemp("guide")
    (root / "examples").symlink_to(ROOT / "examples")
    _put_texts(root)
    _put_command(root / "bin")
    script = ["set -e"]
    for title, commands in sections().items():
        if title != "Ascend NPUs" or unavailable() is None:
            script += [f"echo {shlex.quote(f'=== {title}')}", commands]
    text = "\n".join(script)
    for old, new in SMALLER.items():
        assert old in text, old
        text = text.replace(old, new)
    text = text.replace("--num-epochs 1", f"--num-epochs 1 --master-port {free_port()}")
    clean = {name: value for name, value in os.environ.items() if not name.endswith("VISIBLE_DEVICES")}
    done = processes.run(
        ["bash", "-c", text],
        env={**clean, "PATH": f"{root / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LONGEST,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    parts = re.split(r"^=== (.+)\n", done.stdout, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _put_texts(root: Path) -> None:
    """Write what stands for our documentation: the losses must not change with a word of it."""
    (root / "docs" / "how-to").mkdir(parents=True)
    text = "Two processes with half the batch each train as one.\n" * 100
    (root / "docs" / "how-to" / "page.md").write_text(text)
    (root / "README.md").write_text("One process trains as two.\n" * 20)


def _put_command(folder: Path) -> None:
    """Write the ``megatron-npu`` command; what has no NPUs is forked by a warm parent."""
    folder.mkdir()
    clean = {name: value for name, value in os.environ.items() if name != "MEGATRON_NPU_DEVICE"}
    (warmed,), _ = warm.ready([sys.executable], clean | {"PYTHONPATH": str(ROOT)})
    cold, warmed = shlex.quote(sys.executable), shlex.quote(warmed)
    choice = f'case "$1$MEGATRON_NPU_SIM" in sim*|*1) python={cold};; *) python={warmed};; esac'
    command = 'exec "$python" -m megatron_npu "$@"'
    (folder / "megatron-npu").write_text(f"#!/bin/sh\n{choice}\n{command}\n")
    (folder / "megatron-npu").chmod(0o755)
    (folder / "python").write_text(f'#!/bin/sh\nexec {cold} "$@"\n')
    (folder / "python").chmod(0o755)


def test_two_processes_train_as_one(said: dict[str, str]) -> None:
    """The model comes to both in shared memory, and each has to train a copy of its own."""
    one = losses(said["One process"], 1)
    assert len(one) == 5
    assert one[-1] < one[0]
    assert losses(said["Two processes"], 2) == pytest.approx(one, abs=1e-4)
    assert "devices: 2" in said["Two processes"]
    assert said["Two processes"].count("Generated Sample Text: ") == 1


def test_as_the_document_types_it_with_some_of_the_devices(said: dict[str, str]) -> None:
    output = said["The original command, and a choice of devices"]
    assert "devices: 2" in output
    assert losses(output, 2) == losses(said["Two processes"], 2)


def test_going_on_from_a_checkpoint(said: dict[str, str]) -> None:
    output = said["Resuming from a checkpoint"]
    assert "Epoch 1 " not in output
    assert losses(output, 1)[0] < losses(said["One process"], 1)[0]


def test_several_servers(said: dict[str, str]) -> None:
    assert losses(said["Several servers"], 2) == losses(said["Two processes"], 2)


def test_simulated_npus(said: dict[str, str]) -> None:
    if unavailable():
        pytest.skip(unavailable())
    output = said["Ascend NPUs"]
    assert "CUDA available: True, devices: 2" in output
    assert losses(output, 2) == pytest.approx(losses(said["Two processes"], 2), abs=1e-3)
