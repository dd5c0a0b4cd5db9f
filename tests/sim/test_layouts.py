"""Every layout of two simulated NPUs has the curve of one CPU process, with every megatron-core; run by hand.

The models are dense, of experts, and of multi-latent attention that predicts two further tokens; one NPU goes
on from a checkpoint of the last. ``TEST_EVERY_VERSION=1`` runs them, minutes a version (``-k 0.19.2``);
tests/sim/test_parallel_gpt.py has some of it for each run of the suite.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.support import curves, tiny, warm
from tests.support.curves import Curve, deviation
from tests.support.tiny_dataset import dataset

__all__ = ["dataset"]

if os.environ.get("TEST_EVERY_VERSION") != "1":
    pytest.skip("TEST_EVERY_VERSION=1 runs it", allow_module_level=True)

STEPS = 5
COMMON = (
    "--num-layers 4 --hidden-size 64 --micro-batch-size 2 --attention-dropout 0 --hidden-dropout 0 --lr 2e-3 "
    f"--train-iters {STEPS} --eval-iters 0 --no-plot"
)
_GATED = "--swiglu --disable-bias-linear --normalization RMSNorm"
MODELS = {
    "dense": "",
    "experts": f"{_GATED} --num-experts 4 --moe-ffn-hidden-size 24 --moe-token-dispatcher-type alltoall",
    "latent": "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 8 --qk-layernorm --position-embedding-type rope --mtp-num-layers 2 "
    f"--untie-embeddings-and-output-weights {_GATED}",
}
_STAGES = "--pipeline-model-parallel-size 2"
_LAYOUTS = {
    "pp2": _STAGES,
    "pp2-interleaved": f"{_STAGES} --num-layers-per-virtual-pipeline-stage 1",
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp2": "--context-parallel-size 2",
    "cp2-a2a": "--context-parallel-size 2 --cp-comm-type a2a",
    "dp2-distributed-optimizer": "--micro-batch-size 1 --use-distributed-optimizer",
}
TWO = {f"dense-{name}": words for name, words in _LAYOUTS.items()}
TWO |= {f"latent-{name}": words for name, words in _LAYOUTS.items() if not name.startswith("cp2")}
TWO["experts-ep2"] = "--expert-model-parallel-size 2"
# stages first: 0.12 forgets to forget which ranks have embeddings of positions
TWO = dict(sorted(TWO.items(), key=lambda case: _STAGES not in case[1]))
HERE = "installed"
VERSIONS = [HERE, *"0.12.1 0.13.1 0.14.0 0.15.3 0.17.1 0.18.2 0.19.2".split()]
COLUMNS = {"loss": 1e-4, "mtp_1_loss": 1e-4, "mtp_2_loss": 1e-4, "grad_norm": 1e-3}


def model_of(case: str) -> str:
    return case.partition("-")[0]


def variables(version: str) -> dict[str, str]:
    """Return the variables that find a version; the test is skipped where it is absent."""
    if version == HERE:
        return {}
    root = ROOT / "checkouts" / f"megatron_core-{version}"
    if not root.is_dir():
        pytest.skip(f"no {root.relative_to(ROOT)}: run scripts/get_megatron.sh")
    found = {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "MEGATRON_LM_PATH": str(root)}
    # 0.12's tensor-parallel ranks multiply gradients of what predicts further tokens: mtp_2_loss is 3e-3 off
    return found | ({"MEGATRON_NPU_BACKPORT": "1"} if version == "0.12.1" else {})


class Runs:
    """The curves of one version, each made when it is first asked for."""

    def __init__(self, simulated, flags: list[str], folder: Path, version: str) -> None:
        folder.mkdir()
        self.flags, self.folder, self.simulated, self.where = flags, folder, simulated, variables(version)

    @functools.cached_property
    def expected(self) -> dict[str, Curve]:
        """Curves of one CPU process, by model."""
        return {model: self.on_the_cpu(model) for model in MODELS}

    @functools.cached_property
    def found(self) -> dict[str, Curve]:
        """Curves of two NPUs, by the names of ``TWO``, from the checkpoints of the CPU."""
        return self.on_npus("two", {name: self.begun(name) for name in TWO}, 2)

    @functools.cached_property
    def halves(self) -> list[Curve]:
        """Curves of one NPU that ends, and of one that goes on."""
        save = f"{MODELS['latent']} --save {self.folder / 'saved'}"
        first = {"first": f"{save} {self.start('latent')} --exit-interval 2"}
        rest = {"rest": f"{save} --load {self.folder / 'saved'}"}
        return [
            *self.on_npus("first", first, 1).values(),
            *self.on_npus("rest", rest, 1).values(),
        ]

    def start(self, model: str) -> str:
        return " ".join(curves.begin_with(self.folder / model / "start"))

    def begun(self, name: str) -> str:
        return f"{MODELS[model_of(name)]} {TWO[name]} {self.start(model_of(name))}"

    def on_the_cpu(self, model: str) -> Curve:
        place = self.folder / model
        cases = curves.from_one_start(place / "start", {"one": ""}, MODELS[model])
        curves.run(place, self.flags, cases, env=tiny.environment() | self.where)
        return curves.read(place, "one")

    def on_npus(self, name: str, cases: dict[str, str], npus: int) -> dict[str, Curve]:
        place = self.folder / name
        place.mkdir()
        line = curves.command(place, self.flags, cases, npus)
        settings = {"MEGATRON_NPU_SIM_HCCL_TIMEOUT": "120", **self.where}
        done = self.simulated("python", *line, modules=warm.DRIVER, timeout=540, **settings)
        assert done.returncode == 0, done.stdout[-6000:]
        return {case: curves.read(place, case) for case in cases}


@pytest.fixture(scope="module")
def runs(simulated, dataset, tmp_path_factory):
    """Return a function: a version -> what runs of it."""
    folder, flags = tmp_path_factory.mktemp("layouts"), [*tiny.flags_for(dataset), *COMMON.split()]
    return functools.cache(lambda version: Runs(simulated, flags, folder / version, version))


def check(found: dict[str, list[float]], expected: Curve) -> None:
    losses = expected.of("loss")
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.005, "the run must learn, or curves say nothing"
    measured = {name: deviation(found[name], expected.of(name)) for name in COLUMNS if expected.of(name)}
    print(measured)
    for name, value in measured.items():
        assert value < COLUMNS[name], name


@pytest.mark.parametrize("case", TWO)
@pytest.mark.parametrize("version", VERSIONS)
def test_two_npus(runs, version, case) -> None:
    ran, model = runs(version), model_of(case)
    assert bool(ran.expected[model].of("mtp_2_loss")) == (model == "latent")
    check({name: ran.found[case].of(name) for name in COLUMNS}, ran.expected[model])


@pytest.mark.parametrize("version", VERSIONS)
def test_one_npu_goes_on(runs, version) -> None:
    ran = runs(version)
    expected = ran.expected["latent"]
    first, rest = ran.halves
    assert len(rest.of("loss")) == STEPS - 2
    check({name: [*first.of(name), *rest.of(name)] for name in COLUMNS}, expected)
