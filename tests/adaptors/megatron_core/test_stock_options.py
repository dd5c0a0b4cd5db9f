"""Options of the stock pretrain_gpt.py of core_v0.16.1 that upstream leaves to TransformerEngine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support.stock_core import losses, pretrain


@pytest.fixture(scope="module")
def tree() -> Path:
    pytest.importorskip("megatron.core")
    return checkout("megatron_core", "0.16.1")


EXPERTS = [
    *"--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --bf16 --moe-grouped-gemm".split(),
    *"--train-iters 3 --eval-iters 0".split(),
]


@pytest.fixture(scope="module")
def experts_of_one(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    # the second is left out with upstream's default dispatcher, allgather, and said
    fused = ["--moe-router-fusion", "--moe-permute-fusion"]
    done = pretrain(tree, tmp_path_factory.mktemp("experts"), *EXPERTS, *fused)
    assert "moe-permute-fusion is ignored" in done.stdout
    return losses(done)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_grouped_experts_on_two_ranks_equal_one(
    tree: Path, tmp_path: Path, experts_of_one: list[float], dispatcher: str
) -> None:
    spread = ["--expert-model-parallel-size", "2", "--moe-token-dispatcher-type", dispatcher]
    curve = losses(pretrain(tree, tmp_path, *EXPERTS, *spread, processes=2))
    assert curve == pytest.approx(experts_of_one, rel=1e-3)  # the experts' initial weights are other draws


@pytest.mark.parametrize(
    "options",
    [
        "--position-embedding-type rope --rotary-interleaved --qk-l2-norm --window-size 8,0",
        "--position-embedding-type rope --multi-latent-attention --softmax-type learnable",
    ],
)
def test_attention_options_train(tree: Path, tmp_path: Path, options: str) -> None:
    curve = losses(pretrain(tree, tmp_path, *options.split()))
    assert len(curve) == 6
    assert curve[-1] < curve[0] - 0.03
