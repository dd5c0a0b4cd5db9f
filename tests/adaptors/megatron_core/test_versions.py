"""The embedded driver on every supported version of megatron-core: the curve is the installed one's."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests import warm
from tests.conftest import ROOT
from tests.end_to_end import tiny

VERSIONS = ["0.12.1", "0.13.1", "0.14.0", "0.15.3"]
NEWER = ["0.17.1", "0.18.2", "0.19.2"]  # than the installed one
EXACT = ["--attention-dropout", "0", "--hidden-dropout", "0", "--no-plot"]


@pytest.fixture(scope="session")
def numbers(tmp_path_factory) -> Path:
    return tiny.write_dataset(tmp_path_factory.mktemp("numbers") / "text")


def curve(
    numbers: Path, folder: Path, root: Path | None, *flags: str, processes: int = 1
) -> dict[int, float]:
    """Train with the megatron-core in ``root`` (None: the installed one); return loss by iteration."""
    log = folder / "log.jsonl"
    log.unlink(missing_ok=True)
    environment = tiny.environment()
    if root is not None:
        environment["MEGATRON_LM_PATH"] = str(root)
        environment["PYTHONPATH"] = os.pathsep.join([str(root), environment["PYTHONPATH"]])
    argv = [*tiny.flags_for(numbers), *EXACT, "--json-log", str(log), *flags]
    done = tiny.run_python(tiny.command("pretrain", *argv, processes=processes), environment)
    assert done.returncode == 0, done.stderr[-3000:]
    if root is not None:
        assert f"megatron_core {root.name.partition('-')[2]} " in done.stdout
        assert "0 drifted" in done.stdout
    return tiny.losses(log)


@pytest.fixture(scope="session")
def installed(numbers, tmp_path_factory) -> dict[int, float]:
    pytest.importorskip("megatron.core")
    return curve(numbers, tmp_path_factory.mktemp("installed"), None)


@pytest.fixture(params=VERSIONS)
def root(request) -> Path:
    return wheel(request.param)


def wheel(version: str) -> Path:
    """Return the folder that scripts/get_megatron.sh has put a version's wheel into."""
    path = ROOT / "checkouts" / f"megatron_core-{version}"
    if not path.is_dir():
        pytest.skip(f"no {path.relative_to(ROOT)}: run scripts/get_megatron.sh")
    return path


def test_one_process_and_its_resumption(numbers, tmp_path, root, installed) -> None:
    save = ["--save", str(tmp_path / "checkpoint"), "--load", str(tmp_path / "checkpoint")]
    first = curve(numbers, tmp_path, root, *save, "--exit-interval", "3")
    rest = curve(numbers, tmp_path, root, *save)
    assert first | rest == pytest.approx(installed, rel=1e-5)
    assert min(rest) == 4


@pytest.mark.parametrize("version", NEWER)
def test_a_newer_one_saves_and_resumes(version, numbers, tmp_path, installed) -> None:
    save = ["--save", str(tmp_path / "checkpoint"), "--load", str(tmp_path / "checkpoint")]
    first = curve(numbers, tmp_path, wheel(version), *save, "--exit-interval", "2")
    rest = curve(numbers, tmp_path, wheel(version), *save, "--exit-interval", "4")
    assert first | rest == {step: installed[step] for step in range(1, 5)}


def test_tensor_parallel_in_bf16_with_distributed_optimizer(numbers, tmp_path, root, installed) -> None:
    flags = ["--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"]
    tensor = curve(numbers, tmp_path, root, *flags, "--use-distributed-optimizer", processes=2)
    assert tensor == pytest.approx(installed, rel=1e-2)


WINDOW = """
import sys
import torch
import torch.distributed as dist
import megatron_npu

megatron_npu.install()
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig

dist.init_process_group("nccl", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=1, hidden_size=32, num_attention_heads=4, attention_dropout=0.0, window_size=(3, 0)
)
layer = DotProductAttention(config, 1, AttnMaskType.causal, "self")
query, key, value = torch.randn(3, 12, 2, 4, 8)
scores = torch.einsum("ibnd,jbnd->bnij", query, key) / 8**0.5
seen = torch.ones(12, 12).tril() * torch.ones(12, 12).triu(-3)
expected = torch.einsum("bnij,jbnd->ibnd", scores.masked_fill(seen == 0, -1e9).softmax(-1), value).flatten(2)
torch.testing.assert_close(layer(query, key, value, None), expected)
assert config.window_size == (3, 0)
"""


def test_windows_where_upstream_refuses_them(tmp_path, root) -> None:
    """The local attention has had windows since 0.15 only."""
    path = os.pathsep.join([str(root), tiny.environment()["PYTHONPATH"]])
    environment = tiny.environment() | {"PYTHONPATH": path, "MEGATRON_LM_PATH": str(root)}
    command = [sys.executable, "-c", WINDOW, str(tmp_path / "store")]
    warm.run(command, env=environment, modules=warm.DRIVER, check=True, timeout=120)


def test_interleaved_pipeline(numbers, tmp_path, root, installed) -> None:
    flags = ["--pipeline-model-parallel-size", "2", "--num-layers", "4"]
    plain = curve(numbers, tmp_path, root, "--num-layers", "4")
    interleaved = [*flags, "--num-layers-per-virtual-pipeline-stage", "1"]
    pipeline = curve(numbers, tmp_path, root, *interleaved, processes=2)
    assert pipeline[1] == pytest.approx(plain[1], rel=0.05)  # stages are initialised from other seeds
    assert pipeline[6] < pipeline[1]
