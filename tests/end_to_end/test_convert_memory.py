"""The memory of a conversion: a little more than the weights, whichever way, proof included."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from megatron_npu.conversion import to_megatron
from megatron_npu.pretrain.run import host_memory
from tests.support import tiny

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

# A Llama: megatron-core cuts its gated MLP, and bf16 is half of what the proof computes in.
TINY = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
# About 50 MB; all matrices are above the size from which on malloc maps each by itself.
LARGE = {**TINY, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 3, "vocab_size": 3000}
# In a process of its own: the first conversions import everything, the others are measured.
MEASURE = """
import json, sys
from pathlib import Path
from megatron_npu.commands import cli

def resident(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

def convert(*words):
    assert cli.main(["convert", *map(str, words)]) == 0

place, peaks = Path(sys.argv[1]), []
for kind in ("tiny", "large"):
    for source, target, ends in (("hf", "megatron", ("", "-m")), ("megatron", "hf", ("-m", "-h"))):
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")
        convert("--from", source, "--to", target, *(place / f"{kind}{end}" for end in ends))
        peaks.append(resident("VmHWM") - before)
print(json.dumps(peaks[2:]))
"""


def model(folder: Path, sizes: dict[str, int]) -> None:
    config = transformers.LlamaConfig(**sizes)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a resident set is restarted on Linux only")
def test_a_conversion_holds_one_model(tmp_path):
    model(tmp_path / "tiny", TINY)
    model(tmp_path / "large", LARGE)
    size = sum(file.stat().st_size for file in (tmp_path / "large").glob("*.safetensors"))
    done = tiny.run_python([sys.executable, "-c", MEASURE, str(tmp_path)])
    assert done.returncode == 0, done.stderr
    peaks = json.loads(done.stdout.splitlines()[-1])
    # two models would be 2; of small ones, what is worked on is more than the 0.3 of large ones
    assert max(peaks) < 1.6 * size


def test_too_little_memory_is_one_line(tmp_path, refused, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    model(tmp_path / "tiny", TINY)
    capsys.readouterr()
    line = ("convert", "--from", "hf", "--to", "megatron", tmp_path / "tiny", tmp_path / "m")
    with monkeypatch.context() as patch:
        patch.setattr(host_memory, "available", lambda: 1000)
        assert "GB of memory" in refused(*line)
    for error in (MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried")):
        with monkeypatch.context() as patch:
            patch.setattr(to_megatron, "_save", lambda *given, error=error: raising(error))
            assert "does not fit into memory" in refused(*line)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def raising(error: Exception) -> None:
    raise error
