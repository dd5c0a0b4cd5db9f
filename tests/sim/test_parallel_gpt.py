"""A GPT on simulated NPUs, alone and over HCCL, has the curve of one CPU process.

It is dense, of experts, or of multi-latent attention that predicts two further tokens.
tests/sim/test_layouts.py has the other layouts.
"""

from __future__ import annotations

import json

import pytest

from tests.support import curves, tiny, warm
from tests.support.curves import Curve
from tests.support.tiny_dataset import dataset

__all__ = ["dataset"]

STEPS = 5
MODEL = (
    "--num-layers 4 --hidden-size 64 --attention-dropout 0 --hidden-dropout 0 "
    f"--train-iters {STEPS} --eval-iters 0 --lr 3e-3 --no-plot --num-workers 0"
).split()
LIMIT = 1e-4  # relative, fp32
OF_EXPERTS = ("loss", "grad_norm", "load_balancing_loss")
EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0.1 --init-method-std 0.1 "
    "--disable-bias-linear --swiglu --normalization RMSNorm --train-iters 3"
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 16 --kv-lora-rank 16 --qk-head-dim 8 --qk-pos-emb-head-dim 8 "
    "--v-head-dim 8 --qk-layernorm --position-embedding-type rope --mtp-num-layers 2 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --untie-embeddings-and-output-weights --num-layers 2 "
    "--init-method-std 0.1 --train-iters 3"
)
OF_LATENT = ("loss", "grad_norm", "mtp_1_loss", "mtp_2_loss")
MODELS = {"one": "", "experts": EXPERTS, "latent": LATENT}
TWO = {
    "tp2-sp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "fsdp": "--fsdp-memory-optimization",
    "ep2": f"{EXPERTS} --expert-model-parallel-size 2 --moe-token-dispatcher-type alltoall "
    "--moe-permute-fusion --moe-router-fusion",
    "latent-tp2-sp": f"{LATENT} --tensor-model-parallel-size 2 --sequence-parallel",
    "latent-pp2": f"{LATENT} --pipeline-model-parallel-size 2",
}
MOVED = (
    "--fine-grained-activation-offloading --min-offloaded-tensor-size 1024 "
    "--offload-modules core_attn attn_proj qkv_linear"
)


def model_of(words: str) -> str:
    """Return the name of the model that a case trains."""
    return max(MODELS, key=lambda name: len(MODELS[name]) if MODELS[name] in words else -1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("npus")


@pytest.fixture(scope="module")
def flags(dataset):
    return [*tiny.flags_for(dataset), *MODEL]


@pytest.fixture(scope="module")
def expected(flags, folder) -> dict[str, Curve]:
    """Return the curve of one CPU process of each model, from the checkpoint that all begin with."""
    cases = {}
    for name, words in MODELS.items():
        cases |= curves.from_one_start(folder / f"{name}-start", {name: ""}, words)
    return curves.train(folder / "cpu", flags, cases)


@pytest.fixture(scope="module")
def on_npus(simulated, flags, folder, expected):
    """Return a function: cases, number of NPUs -> the curve of each, and what each NPU has counted."""

    def train(cases: dict[str, str], npus: int) -> tuple[dict[str, Curve], list[dict]]:
        place = folder / str(npus)
        place.mkdir()
        report = {"MEGATRON_NPU_SIM_REPORT": str(place / "report.json")}
        begun = {
            name: f"{words} --load {folder / model_of(words)}-start --finetune"
            for name, words in cases.items()
        }
        line = curves.command(place, flags, begun, npus)
        report["MEGATRON_NPU_SIM_HCCL_TIMEOUT"] = "120"
        done = simulated("python", *line, modules=warm.DRIVER, **report)
        assert done.returncode == 0, done.stdout[-6000:]
        counted = [json.loads(file.read_text()) for file in sorted(place.glob("report*.json"))]
        assert len(counted) == npus
        assert all("npu::npu_fusion_attention" in counts["launches"] for counts in counted)
        return {name: curves.read(place, name) for name in cases}, counted

    return train


def check(found: Curve, expected: Curve, columns: tuple[str, ...] = ("loss", "grad_norm")) -> None:
    losses = expected.of("loss")
    assert len(losses) >= 3
    assert losses[-1] < losses[0] - 0.05, "the run must learn, or curves say nothing"
    for name in columns:
        deviation = curves.deviation(found.of(name), expected.of(name))
        print(name, "deviates by", deviation)
        assert deviation < LIMIT, name


def test_one_npu(on_npus, expected):
    cases = {name: MODELS[name] for name in ("one", "experts")} | {"moved": MOVED}
    found, _ = on_npus(cases, 1)
    check(found["one"], expected["one"])
    for name in ("loss", "grad_norm"):
        assert found["moved"].of(name) == found["one"].of(name)
    check(found["experts"], expected["experts"], OF_EXPERTS)


def test_two_npus(on_npus, expected):
    found, counted = on_npus(TWO, 2)
    for name in ("tp2-sp", "pp2", "fsdp"):
        check(found[name], expected["one"])
    check(found["ep2"], expected["experts"], OF_EXPERTS)
    for name in ("latent-tp2-sp", "latent-pp2"):
        check(found[name], expected["latent"], OF_LATENT)
    for counts in counted:
        for name in ("AllReduce", "AllGather", "ReduceScatter", "BatchSendRecv"):
            assert counts["communication"][name]["calls"] >= STEPS, (name, counts["communication"])
        assert counts["communication"]["AlltoAllV"]["calls"] >= 3, counts["communication"]
