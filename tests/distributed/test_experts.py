"""A mixture of experts in the driver: every layout trains like one process, and goes on in another one."""

from __future__ import annotations

import pytest

from tests.support import curves, tiny
from tests.support.curves import deviation

pytest.importorskip("megatron.core")

MODEL = (
    "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-shared-expert-intermediate-size 16 "
    "--moe-shared-expert-gate --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.01 --init-method-std 0.1 "
    "--disable-bias-linear --swiglu --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 "
    "--train-iters 6 --eval-iters 1 --no-plot"
)
TWO = {
    "tp2": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
}
FOUR = {
    "ep2-dp2-fused": "--expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-permute-fusion --moe-router-fusion"
}
APART = "--hidden-dropout 0.1 --expert-model-parallel-size 2"  # each rank draws for its experts alone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def flags(dataset):
    return [*tiny.flags_for(dataset), *MODEL.split()]


@pytest.fixture(scope="module")
def one(flags, folder):
    """Return the curve of one process, from the checkpoint that all begin with."""
    return curves.train(folder / "one", flags, curves.from_one_start(folder / "start", {"one": ""}))["one"]


@pytest.fixture(scope="module")
def spread(flags, folder, one):
    """Return the curve of every layout; two processes also train with dropout, and save half-way."""
    load = " ".join(curves.begin_with(folder / "start"))
    two = {name: f"{words} {load}" for name, words in TWO.items()}
    two["whole"] = f"{APART} --save {folder / 'saved'} --save-interval 3"
    four = {name: f"{words} {load}" for name, words in FOUR.items()}
    return curves.train(folder / "two", flags, two, 2) | curves.train(folder / "four", flags, four, 4)


@pytest.mark.parametrize("layout", [*TWO, *FOUR])
def test_every_layout_trains_like_one_process(one, spread, layout):
    found = spread[layout]
    losses = one.of("loss")
    assert losses[5] < losses[0] - 0.1, "the run must learn, or curves say nothing"
    for name, limit in (
        ("loss", 1e-5),
        ("load_balancing_loss", 1e-5),
        ("z_loss", 1e-5),
        ("grad_norm", 1e-4),
    ):
        assert deviation(found.of(name), one.of(name)) < limit, name
    assert found.sizes == one.sizes
    # of each layer, two experts of three matrices are idle
    assert one.sizes["parameters"] - one.sizes["active_parameters"] == 2 * 2 * 3 * 32 * 24


def test_expert_parallelism_goes_on_bit_for_bit_and_in_another_layout(flags, folder, spread):
    """With dropout, whose generators each expert-parallel rank has for itself."""
    whole = spread["whole"].of("loss")
    load = f"{APART} --load {folder / 'saved'} --ckpt-step 3"
    tensor = "--tensor-model-parallel-size 2 --sequence-parallel --expert-tensor-parallel-size 1"
    found = curves.train(folder / "again", flags, {"rest": load, "other": f"{load} {tensor}"}, 2)
    assert found["rest"].of("loss") == whole[3:]
    assert deviation(found["other"].of("loss"), found["rest"].of("loss")) < 0.05
    refused = tiny.run("pretrain", *flags, *load.split(), "--expert-model-parallel-size", "1")
    assert refused.returncode == 2
    assert "the optimizer state of experts is stored differently" in refused.stderr
