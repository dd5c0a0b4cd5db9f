"""Multi-latent attention and multi-token prediction, in layouts and in one process: the same losses."""

from __future__ import annotations

import pytest

from tests.support import curves, tiny
from tests.support.curves import deviation

MODEL = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --position-embedding-type rope --mtp-num-layers 2 --swiglu "
    "--untie-embeddings-and-output-weights "
    "--disable-bias-linear --normalization RMSNorm --attention-dropout 0 --hidden-dropout 0 --lr 4e-3 "
    "--micro-batch-size 2 --num-layers 4 --train-iters 5 --eval-iters 0 --no-plot"
)
LAYOUTS = {  # stages first: 0.12 forgets to forget which ranks have embeddings of positions
    "pp2": "--pipeline-model-parallel-size 2",
    "pp2-interleaved": "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "tp2": "--tensor-model-parallel-size 2",
    "dp2-distributed-optimizer": "--micro-batch-size 1 --use-distributed-optimizer",
}


@pytest.fixture(scope="module")
def found(dataset, tmp_path_factory):
    """Return the curves of all layouts, and of one process, from one checkpoint."""
    folder = tmp_path_factory.mktemp("latent")
    flags = [*tiny.flags_for(dataset), *MODEL.split()]
    one = curves.train(folder / "one", flags, curves.from_one_start(folder / "start", {"one": ""}))
    begun = [*flags, *curves.begin_with(folder / "start")]
    return one | curves.train(folder / "two", begun, LAYOUTS, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_processes(found, layout) -> None:
    one, two = found["one"], found[layout]
    for name in ("loss", "mtp_1_loss", "mtp_2_loss"):
        assert len(one.of(name)) == 5
        assert one.of(name)[-1] < one.of(name)[0] - 0.005, "the run must learn, or curves say nothing"
        assert deviation(two.of(name), one.of(name)) < 1e-4, name
    assert deviation(two.of("grad_norm"), one.of("grad_norm")) < 1e-3
    assert two.sizes == one.sizes
    if layout.startswith("tp2"):  # where upstream forgets the heads of other ranks, or counts some twice
        assert (
            deviation(*([curve.first_layer[name] for name in one.first_layer] for curve in (two, one))) < 1e-5
        )
