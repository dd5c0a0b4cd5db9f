"""The embedded driver on every supported version of megatron-core: the curve is the installed one's."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_npu.upstream import megatrons
from tests.support import curves, on_version, tiny, warm
from tests.support.curves import Curve

VERSIONS = ["0.12.1", "0.13.1", "0.14.0", "0.15.3"]
NEWER = ["0.17.1", "0.18.2", "0.19.2", on_version.MAIN]  # than the installed one
EXACT = ["--attention-dropout", "0", "--hidden-dropout", "0", "--no-plot"]
FOUR_LAYERS = "--num-layers 4"
LATENT = (
    "--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 --v-head-dim 8 "
    "--position-embedding-type rope --mtp-num-layers 1 --train-iters 3 --async-save --save-interval 1 "
    "--sample-prompt 1 --sample-tokens 2 --eval-interval 2"
)
# the first run of its process: no one has asked for TransformerEngine's version before
REMAINDERS = {"remainders": "--bf16 --use-distributed-optimizer --reuse-fp32-param --exit-interval 3"}
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
PP2 = "--pipeline-model-parallel-size 2"
# 0.12's destroy_model_parallel() leaves the ranks of position embeddings: stages must come first
TWO = {
    "interleaved": f"{FOUR_LAYERS} {PP2} --num-layers-per-virtual-pipeline-stage 1",
    "tensor": "--tensor-model-parallel-size 2 --sequence-parallel --bf16 --use-distributed-optimizer",
}


@pytest.fixture(scope="session")
def flags(tmp_path_factory) -> list[str]:
    dataset = tiny.write_dataset(tmp_path_factory.mktemp("numbers") / "text")
    return [*tiny.flags_for(dataset), *EXACT]


def train(
    flags: list[str], folder: Path, root: Path, cases: dict[str, str], processes: int
) -> dict[str, Curve]:
    """Train every case with the megatron-core in ``root``; return the curves by name."""
    printed = curves.run(folder, flags, cases, processes, tiny.environment_of(root))
    assert f"megatron_core {megatrons.find(root).version} " in printed
    assert "0 drifted" in printed
    return {name: curves.read(folder, name) for name in cases}


def latent(folder: Path) -> dict[str, str]:
    """Return the case of multi-latent attention that predicts two tokens and is saved as it goes on."""
    return {"latent": f"{LATENT} --save {folder / 'latent'}"}


def check_latent(found: Curve, expected: Curve) -> None:
    """Check that both losses are those of the installed megatron-core."""
    for name in ("loss", "mtp_1_loss"):
        assert found.of(name) == pytest.approx(expected.of(name), rel=1e-5)


@pytest.fixture(scope="session")
def on_installed(flags, tmp_path_factory) -> dict[str, Curve]:
    """Return the curves of the installed megatron-core."""
    pytest.importorskip("megatron.core")
    folder = tmp_path_factory.mktemp("installed")
    return curves.train(folder, flags, {"one": "", **latent(folder)})


@pytest.fixture(scope="session")
def installed(on_installed) -> list[float]:
    """Return the losses of the tiny run."""
    return on_installed["one"].losses()


@pytest.fixture(scope="module", params=VERSIONS)
def root(request) -> Path:
    return on_version.root_of(request.param)


@pytest.fixture(scope="module")
def one(flags, root, tmp_path_factory) -> dict[str, Curve]:
    """Return the curves of one process: of a run and its resumption, and of four layers."""
    folder = tmp_path_factory.mktemp("one")
    save = f"--save {folder / 'saved'} --load {folder / 'saved'}"
    cases = {"first": f"{save} --exit-interval 3", "rest": save, "four layers": FOUR_LAYERS}
    cases |= latent(folder)
    return train(flags, folder, root, cases, 1)


@pytest.fixture(scope="module")
def two(flags, root, tmp_path_factory) -> dict[str, Curve]:
    return train(flags, tmp_path_factory.mktemp("two"), root, TWO, 2)


def test_one_process_and_its_resumption(one, installed) -> None:
    first, rest = one["first"].losses(), one["rest"].losses()
    assert first + rest == pytest.approx(installed, rel=1e-5)
    assert len(rest) == 3


def test_latent_attention_that_predicts_is_saved_as_it_goes_on(one, on_installed) -> None:
    check_latent(one["latent"], on_installed["latent"])


@pytest.mark.parametrize("version", NEWER)
def test_a_newer_one_saves_and_resumes(version, flags, tmp_path, installed, on_installed) -> None:
    save = f"--save {tmp_path / 'checkpoint'} --load {tmp_path / 'checkpoint'}"
    found: list[float] = []
    for name, end in (("first", 2), ("rest", 4)):
        case = {name: f"{save} --exit-interval {end}"}
        further = REMAINDERS | latent(tmp_path) if name == "first" else {}
        trained = train(flags, tmp_path, on_version.root_of(version), further | case, 1)
        found += trained[name].losses()
        if further:
            check_latent(trained["latent"], on_installed["latent"])
            assert trained["remainders"].losses() == pytest.approx(installed[:3], rel=1e-2)
    assert found == installed[:4]


def test_a_predicting_layer_is_recomputed_in_0_18(flags, tmp_path, on_installed) -> None:
    cases = {name: f"{value} {RECOMPUTED}" for name, value in latent(tmp_path).items()}
    check_latent(
        train(flags, tmp_path, on_version.root_of("0.18.2"), cases, 1)["latent"], on_installed["latent"]
    )


def test_tensor_parallel_in_bf16_with_distributed_optimizer(two, installed) -> None:
    assert two["tensor"].losses() == pytest.approx(installed, rel=1e-2)


def test_interleaved_pipeline(one, two) -> None:
    plain, pipeline = one["four layers"].losses(), two["interleaved"].losses()
    assert pipeline[0] == pytest.approx(plain[0], rel=0.05)  # stages are initialised from other seeds
    assert pipeline[5] < pipeline[0]


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
    environment = tiny.environment_of(root)
    command = [sys.executable, "-c", WINDOW, str(tmp_path / "store")]
    warm.run(command, env=environment, modules=warm.DRIVER, check=True)
