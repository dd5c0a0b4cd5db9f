"""Libraries on top of Megatron, unedited: a Transformers model in, trained with TP 2, and out again.

They are no requirement of the project: docs/how-to/libraries.md says how to install one into its own folder.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.support import tiny, warm
from tests.support.simulated import run_simulated, unavailable

LIBRARIES = {"mbridge": "mbridge", "mcore_bridge": "mcore_bridge", "megatron_bridge": "megatron.bridge"}
WITH_LORA = ("mcore_bridge", "megatron_bridge")  # the third offers none
CASES = [(name, "") for name in LIBRARIES] + [(name, "--lora") for name in WITH_LORA]
CASES += [(name, words) for name in LIBRARIES for words in ("--stages", "--bf16")]
EQUAL, NEAR = 1e-5, 5e-2  # of logits, which are about 1, in fp32 and in bf16


def installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Transformers model of Qwen2's kind, with biases; norms are not 1."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    made = Qwen2ForCausalLM(config).float()
    for name, parameter in made.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, float("norm" in name), 0.1)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(device: str, *arguments: str) -> tuple[int, str]:
    """Run two ranks of the worker; return the exit code and the output."""
    command = [sys.executable, *tiny.torchrun(2), str(Path(__file__).with_name("worker.py")), *arguments]
    if device == "npu":
        done = run_simulated(*command, MEGATRON_NPU_TE="local", MEGATRON_NPU_SIM_DEVICES="2")
        return done.returncode, done.stdout
    environment = tiny.environment() | {"MEGATRON_NPU_TE": "local"}
    done = warm.run(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize("device", ["cpu", "npu"])
@pytest.mark.parametrize(("library", "option"), CASES)
def test_a_model_goes_in_is_trained_and_comes_out(
    library: str, option: str, device: str, model: Path, tmp_path: Path
) -> None:
    """Two ranks: tensor parallel with sequence parallelism, or (``--stages``) a pipeline."""
    if not installed(LIBRARIES[library]):
        pytest.skip(f"{library} is not installed: see docs/how-to/libraries.md")
    if (library, option, device) == ("mcore_bridge", "--lora", "npu"):
        pytest.skip("the LoRA of mcore-bridge 1.6.5 takes layers on an NPU for MindSpeed's: not installed")
    if device == "npu" and unavailable():
        pytest.skip(unavailable())
    code, said = run(device, library, str(model), str(tmp_path), *option.split())
    assert code == 0, said[-3000:]
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))
    print(library, option, device, report)
    near = NEAR if option == "--bf16" else EQUAL
    assert report["device"] == device
    assert report["loaded"] < near
    assert len(report["losses"]) == 20
    assert report["losses"][-1] < report["losses"][0] - (0.5 if option == "--lora" else 2)
    assert report["moved"] > 0.1
    assert report["exported"] < near
