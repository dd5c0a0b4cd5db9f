"""A document's own program in plain PyTorch, by ``megatron-npu run --redirect``, without Megatron."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.end_to_end import ddp_document
from tests.end_to_end.plain_losses import losses
from tests.support import warm
from tests.support.ports import free_port
from tests.support.simulated import Run, simulated  # noqa: F401  a fixture

EXAMPLE = ROOT / "examples" / "ddp_from_scratch"
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example's files, text, and a ``megatron`` that nobody must import."""
    tmp_path = tmp_path_factory.mktemp("plain")
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
        check=False,
    )


def document(folder: Path, processes: int, **values: object) -> str:
    """Write the document's program for so many processes; return its path."""
    sizes = DOCUMENT_SIZES | {"world_size": processes, "batch_size": 4 // processes} | values
    text = ddp_document.corrected(ddp_document.with_chapters(ddp_document.program()))
    text = ddp_document.sized(text, **sizes, master_port=str(free_port()))
    return str(ddp_document.write(text, folder))


@pytest.fixture(scope="module")
def one_process(folder: Path) -> str:
    """The output of the document's program in one process on a CPU."""
    one = run_on_cpu(folder, document(folder, 1))
    assert one.returncode == 0, one.stdout
    return one.stdout


@pytest.fixture(scope="module")
def expected(one_process: str) -> list[float]:
    """Its losses."""
    return losses(one_process, 1)


def test_it_calls_what_the_document_s_text_calls() -> None:
    """Our words against the document's, where its text is."""
    text = ddp_document.printed()
    if text is None:
        pytest.skip("no text of the document in ../shared/seeds")
    names = "DDP|DataLoader|DistributedSampler|init_process_group|destroy_process_group"
    calls = rf"(?:torch|\bmp|\bos|\bmath)\.[\w.]+(?=[(\[])|(?:{names})\("
    settings = r"\b(?:pin_memory|drop_last|shuffle|device_ids|backend|nprocs|top_k)=[\w\"\[\]]+"
    for pattern in (calls, settings):
        expected = set(re.findall(pattern, text)) - {"os.path.exists"}  # makedirs asks this itself
        assert expected
        assert expected <= set(re.findall(pattern, ddp_document.program()))


def test_the_document_s_program_on_a_cpu(folder: Path, expected: list[float]) -> None:
    two = run_on_cpu(folder, "--cpu-devices", "4", document(folder, 2), CUDA_VISIBLE_DEVICES="0,2")
    assert two.returncode == 0, two.stdout
    assert "Number of GPUs available: 2" in two.stdout
    assert losses(two.stdout, 2) == pytest.approx(expected, abs=1e-3)  # printed with 3 digits
    assert "[GPU0] Epoch 1 finished, checkpoint: 000002" in two.stdout
    assert re.search(r"Epoch 1 \(Step \d+\): Train loss [\d.]+, Val loss [\d.]+", two.stdout)
    assert "Generated Sample Text: 萧炎,斗之力,三段" in two.stdout
    assert (folder / "checkpoint" / "model_000002.pth").is_file()


def test_the_document_s_program_goes_on_from_a_checkpoint(folder: Path, one_process: str) -> None:
    """Its first loss is that of the batch that was evaluated before the checkpoint was saved."""
    evaluated = re.findall(r"Epoch 1 \(Step \d+\): Train loss ([\d.]+), Val loss [\d.]+", one_process)
    again = run_on_cpu(folder, document(folder, 1, checkpoint=2))
    assert again.returncode == 0, again.stdout
    assert losses(again.stdout, 1)[0] == pytest.approx(float(evaluated[-1]), abs=1e-3)
    assert "[GPU0] Epoch 1 finished, checkpoint: 000005" in again.stdout


def test_the_document_s_program_needs_its_corrections(folder: Path) -> None:
    """As printed it asks for the process group before there is one: on every device."""
    text = ddp_document.sized(ddp_document.with_chapters(ddp_document.program()), **DOCUMENT_SIZES)
    done = run_on_cpu(folder, str(ddp_document.write(text, folder)))
    assert done.returncode == 1
    assert "Default process group has not been initialized" in done.stdout


def test_the_document_s_program_on_simulated_npus(
    folder: Path,
    simulated: Run,  # noqa: F811
    expected: list[float],
) -> None:
    """Of four NPUs the two that CUDA_VISIBLE_DEVICES chooses, with HCCL for nccl."""
    variables = {"MEGATRON_NPU_SIM_DEVICES": "4", "CUDA_VISIBLE_DEVICES": "1,3"}
    variables["MEGATRON_NPU_AUTOLOAD"] = "0"  # a start from nothing: CANN reads its variables once
    line = [sys.executable, "-m", "megatron_npu", "run", "--redirect", document(folder, 2)]
    done = simulated(*line, cwd=folder, **variables)
    assert done.returncode == 0, done.stdout
    assert "Number of GPUs available: 2" in done.stdout
    assert losses(done.stdout, 2) == pytest.approx(expected, abs=2e-3)
