"""Stock scripts of the newest tags, unedited, where their trees are: GPT, experts, BERT and T5."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conftest import checkout
from tests.support import on_version, tiny, warm
from tests.support.simulated import unavailable
from tests.support.stock_core import final_loss, learns_from_sentences, losses, norms, pretrain

VERSIONS = ["0.17.1", "0.18.2", "0.19.1", on_version.MAIN]
ON_REQUEST = pytest.mark.skipif(
    os.environ.get("TEST_EVERY_VERSION") != "1", reason="TEST_EVERY_VERSION=1 runs it"
)
FEWER = [*VERSIONS[:-1], pytest.param(on_version.MAIN, marks=ON_REQUEST)]
OLDEST_AND_NEWEST = [FEWER[0], pytest.param("0.18.2", marks=ON_REQUEST), *FEWER[2:]]
# test_stock_tools.py has BERT with 0.12.1 and T5 with 0.16.1
OFTEN = {("0.17.1", "bert"), ("0.18.2", "t5"), ("0.19.1", "bert"), ("0.19.1", "t5")}
# Since 0.18 the end of document is one of the --vocab-size tokens of NullTokenizer, before it was one more;
# upstream's mock data count up to it.
TOKENS = {"0.17.1": "1023", "0.18.2": "1024", "0.19.1": "1024", "0.20.0": "1024"}
TOGETHER = (
    "--moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --moe-router-fusion".split()
)
EXPERTS = "--num-experts 4 --moe-router-topk 2 --swiglu --disable-bias-linear --train-iters 2".split()


@pytest.mark.parametrize("version", VERSIONS)
def test_it_trains_as_0_16_did_and_goes_on(version: str, tmp_path: Path) -> None:
    """The numbers are those that 0.16.1 prints with a vocabulary of 1023."""
    tree = checkout("megatron_core", version)
    tokens, place = ["--vocab-size", TOKENS[version]], str(tmp_path / "checkpoint")
    whole = pretrain(tree, tmp_path, *tokens, "--save", place, "--save-interval", "4")
    assert losses(whole)[:3] == [6.951518, 6.953021, 6.91659]
    rest = pretrain(tree, tmp_path, *tokens, "--load", place, "--ckpt-step", "4")
    assert norms(rest) == norms(whole)[4:]
    assert losses(rest)[0] == losses(whole)[4]
    assert final_loss(rest) == final_loss(whole)
    _converts(tree, Path(place), tmp_path / "hf")


def _converts(tree: Path, load: Path, into: Path) -> None:
    """Take a checkpoint of the tree's scripts to Hugging Face, with the core of the same tree."""
    command = tiny.command("convert", "--from", "megatron", "--to", "hf", str(load), str(into))
    env = tiny.environment() | {"MEGATRON_LM_PATH": str(tree)}
    done = warm.run(command, env=env, modules=warm.STOCK, tree=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "logits of both models in fp32" in done.stdout
    assert "GPT2LMHeadModel; NullTokenizer" in done.stdout


@pytest.mark.parametrize("version", OLDEST_AND_NEWEST)
def test_fused_experts_train_as_those_one_after_the_other(version: str, tmp_path: Path) -> None:
    tree = checkout("megatron_core", version)
    place = str(tmp_path / "checkpoint")
    each = pretrain(tree, tmp_path, *EXPERTS, "--save", place, "--save-interval", "1")
    first, mean = losses(each)  # the second line of a process is the mean of its first two iterations
    grouped = pretrain(tree, tmp_path, *EXPERTS, *TOGETHER, "--load", place, "--ckpt-step", "1")
    assert (first + losses(grouped)[0]) / 2 == pytest.approx(mean, abs=2e-6)
    assert norms(grouped) == norms(each)[1:]


@pytest.mark.parametrize(
    ("version", "script", "tokenizer"),
    [
        pytest.param(version, script, tokenizer, marks=() if (version, script) in OFTEN else ON_REQUEST)
        for version in VERSIONS
        for script, tokenizer in (("bert", "BertWordPieceLowerCase"), ("t5", "BertWordPieceCase"))
    ],
)
def test_bert_and_t5_learn(version: str, script: str, tokenizer: str, tmp_path: Path) -> None:
    tree, name = checkout("megatron_core", version), f"pretrain_{script}.py"
    (file,) = (*tree.glob(name), *tree.glob(f"examples/*/{name}"))
    learns_from_sentences(tree, tmp_path, str(file.relative_to(tree)), "--tokenizer-type", tokenizer)


@pytest.mark.parametrize("version", FEWER)
def test_an_npu_trains_like_the_cpu(version: str, tmp_path: Path) -> None:
    """Weights that are drawn on the host are the same on every device."""
    tree = checkout("megatron_core", version)
    if unavailable():
        pytest.skip(unavailable())
    model = "--position-embedding-type rope --swiglu --normalization RMSNorm --disable-bias-linear".split()
    changes = [*model, "--use-cpu-initialization", "--train-iters", "3", "--eval-iters", "0"]
    changes += ["--num-workers", "2"]  # upstream's default
    cpu, npu = (pretrain(tree, tmp_path, *changes, device=device) for device in ("cpu", "npu"))
    assert losses(npu) == pytest.approx(losses(cpu), rel=1e-6)
    assert norms(npu) == norms(cpu)
    assert len(losses(cpu)) == 3
