"""Programs in plain PyTorch for CUDA, with ``megatron-npu run --redirect``: no Megatron, on any device."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.adaptors.megatron_core.upstream_tests.ports import free_port
from tests.conftest import ROOT
from tests.end_to_end import ddp_document
from tests.sim.conftest import Run, simulated  # noqa: F401  a fixture

EXAMPLE = ROOT / "examples" / "ddp_from_scratch"
SIZES = """--vocabulary bytes --vocabulary-size 257 --context-len 16 --embedding-dim 32 --num-layers 1
--num-heads 4 --dropout 0 --num-epochs 1 --eval-freq 100 --warmup-steps 4 --learning-rate 0.01""".split()
# two processes may print onto one line
TRAIN_LOSS = re.compile(r"\[GPU(\d)\] Epoch \d+ \(Batch (\d+)\): Train loss (\d+\.\d+)")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The example's files, text, and a ``megatron`` that nobody must import."""
    for file in EXAMPLE.glob("*.py"):
        shutil.copy(file, tmp_path)
    for part, text in {
        "train_data": "To be, or not to be. " * 20,
        "val_data": "That is the question. " * 3,
    }.items():
        (tmp_path / part).mkdir()
        (tmp_path / part / "text.txt").write_text(text)
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron" / "__init__.py").write_text(
        "raise ImportError('a plain program needs no Megatron')\n"
    )
    return tmp_path


def run_on_cpu(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    clean = {name: text for name, text in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment = {**clean, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": "cpu"}
    return warm.run(
        [sys.executable, "-m", "megatron_npu", "run", "--redirect", *arguments],
        env=environment | variables,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
        check=False,
    )


def example(processes: int, *flags: str) -> list[str]:
    """Return the command line of our program: four samples a step, however many processes there are."""
    batch = ["--batch-size", str(4 // processes), "--master-port", str(free_port())]
    return [str(EXAMPLE / "ddp_train.py"), *SIZES, *batch, *flags]


def losses(output: str, processes: int) -> list[float]:
    """Return the training loss of each step: the mean over the processes."""
    found: dict[int, list[float]] = {}
    for _, batch, loss in TRAIN_LOSS.findall(output):
        found.setdefault(int(batch), []).append(float(loss))
    assert found, output
    assert all(len(of_ranks) == processes for of_ranks in found.values()), output
    return [sum(found[batch]) / processes for batch in sorted(found)]


def test_two_processes_train_as_one(folder: Path) -> None:
    """The model comes to both in shared memory, and each has to train a copy of its own."""
    one = run_on_cpu(folder, *example(1))
    two = run_on_cpu(folder, "--cpu-devices", "2", *example(2))
    assert one.returncode == two.returncode == 0, one.stdout + two.stdout
    expected = losses(one.stdout, 1)
    assert losses(two.stdout, 2) == pytest.approx(expected, abs=1e-4)
    assert expected[-1] < expected[0] - 1
    assert "devices: 2" in two.stdout
    assert two.stdout.count("Generated Sample Text: ") == 1


def test_a_run_goes_on_from_its_checkpoint(folder: Path) -> None:
    first = run_on_cpu(folder, *example(1))
    second = run_on_cpu(folder, *example(1, "--num-epochs", "2", "--resume"))
    assert first.returncode == second.returncode == 0, first.stdout + second.stdout
    assert "Epoch 1 " not in second.stdout
    assert losses(second.stdout, 1)[0] < losses(first.stdout, 1)[0] - 1


DOCUMENT_SIZES = {
    "master_addr": "127.0.0.1",
    "vocabulary": "bytes",
    "special_token_id": 256,
    "context_len": 16,
    "stride": 16,
    "embedding_dim": 32,
    "num_layers": 1,
    "num_heads": 4,
    "vocabulary_size": 257,
    "dropout": 0.0,
    "num_epochs": 1,
    "warmup_steps": 2,
    "eval_freq": 100,
}


def document(folder: Path, processes: int) -> str:
    """Write the document's own program for so many processes; return its path."""
    sizes = DOCUMENT_SIZES | {"world_size": processes, "batch_size": 4 // processes}
    text = ddp_document.corrected(ddp_document.with_chapters(ddp_document.program()))
    text = ddp_document.sized(text, **sizes, master_port=str(free_port()))
    return str(ddp_document.write(text, folder))


def test_the_document_s_program_on_a_cpu(folder: Path) -> None:
    one = run_on_cpu(folder, document(folder, 1))
    two = run_on_cpu(folder, "--cpu-devices", "4", document(folder, 2), CUDA_VISIBLE_DEVICES="0,2")
    assert one.returncode == two.returncode == 0, one.stdout + two.stdout
    assert "Number of GPUs available: 2" in two.stdout
    assert losses(two.stdout, 2) == pytest.approx(losses(one.stdout, 1), abs=1e-3)  # printed with 3 digits
    assert "[GPU0] Epoch 1 finished, checkpoint: 000002" in two.stdout
    assert (folder / "checkpoint" / "model_000002.pth").is_file()


def test_the_document_s_program_needs_its_corrections(folder: Path) -> None:
    """As printed it asks for the process group before there is one: on every device."""
    text = ddp_document.sized(ddp_document.with_chapters(ddp_document.program()), **DOCUMENT_SIZES)
    done = run_on_cpu(folder, str(ddp_document.write(text, folder)))
    assert done.returncode == 1
    assert "Default process group has not been initialized" in done.stdout


@pytest.mark.parametrize("program", ["example", "document"])
def test_on_simulated_npus(folder: Path, simulated: Run, program: str) -> None:  # noqa: F811
    """Of four NPUs the two that CUDA_VISIBLE_DEVICES chooses, with HCCL for nccl."""
    words = example(2) if program == "example" else [document(folder, 2)]
    line = [sys.executable, "-m", "megatron_npu", "run", "--redirect", *words]
    variables = {"MEGATRON_NPU_SIM_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "1,3"}
    variables["MEGATRON_NPU_AUTOLOAD"] = "0"  # a start from nothing: CANN reads its variables once
    done = simulated(*line, cwd=folder, **variables)
    assert done.returncode == 0, done.stdout
    assert re.search("(devices|GPUs available): 2$", done.stdout, re.MULTILINE)
    words = example(1) if program == "example" else [document(folder, 1)]
    expected = losses(run_on_cpu(folder, *words).stdout, 1)
    assert losses(done.stdout, 2) == pytest.approx(expected, abs=2e-3)
