"""Files of ranks as checkpoints to train on, and those of megatron-core's scripts."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest
import torch

from megatron_npu.checkpoint_files import checksums
from megatron_npu.commands import cli
from tests.conftest import checkout
from tests.support import stock_core, stock_lm, tiny

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")


@pytest.fixture
def source(tmp_path) -> Path:
    """A GPT-2 of Hugging Face with 257 tokens."""
    config = transformers.GPT2Config(
        vocab_size=stock_lm.END + 1, n_positions=32, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    torch.manual_seed(0)
    folder = tmp_path / "source"
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    stock_lm.write_vocabulary(folder)
    return folder


def ours(*words: object) -> None:
    assert cli.main([str(word) for word in words]) == 0


def test_training_goes_on_from_files_of_ranks(source, tmp_path, flags, refused, capsys):
    """Two tensor ranks of four files begin with the loss of the same model in torch_dist."""
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    ours(*"convert --from hf --to megatron --proof tensors".split(), source, tmp_path / "dist")
    line = [*"convert --from hf --to megatron --proof tensors --ckpt-format torch".split(), *sizes]
    ours(*line, source, tmp_path / "torch")
    run = "--train-iters 1 --eval-iters 0 --attention-dropout 0 --hidden-dropout 0 --vocab-size 256".split()

    def first_loss(name: str, *words: str, processes: int = 1) -> float:
        rows = ["--make-vocab-size-divisible-by", 256 // processes]  # padding costs, so that it is the same
        log = tmp_path / f"{name}{processes}.json"
        line = flags(*run, "--load", tmp_path / name, "--json-log", log, "--no-plot", *rows, *words)
        done = tiny.run("pretrain", *line, processes=processes)
        assert done.returncode == 0, done.stderr
        return tiny.losses(log)[1]

    expected = first_loss("dist")
    assert first_loss("torch", *sizes[:2], processes=2) == pytest.approx(expected, rel=1e-6)
    (tmp_path / "torch" / "release").rename(tmp_path / "torch" / "iter_0000003")
    (tmp_path / "torch" / "latest_checkpointed_iteration.txt").write_text("3")
    line = flags(*run, "--load", tmp_path / "torch")
    assert "it requires --finetune or --no-load-optim" in refused("pretrain", *line)
    assert "--num-layers 3 (checkpoint: 2)" in refused("pretrain", *line, "--finetune", "--num-layers", 3)
    assert "a vocabulary of 512 tokens" in refused("pretrain", *line, "--finetune", "--vocab-size", 600)
    torn = Path(shutil.copytree(tmp_path / "torch" / "iter_0000003", tmp_path / "torch" / "iter_0000005"))
    path = min(torn.glob("mp_rank_*/*.pt"))
    path.write_bytes(path.read_bytes()[:-100])
    (tmp_path / "torch" / "latest_checkpointed_iteration.txt").write_text("5")
    capsys.readouterr()
    ours("pretrain", *line, "--finetune", "--load-last-good", "--no-plot")
    assert "damaged checkpoints of iterations 5; loading 3" in capsys.readouterr().out


def test_models_and_sizes_that_285068c8_does_not_have(source, tmp_path, refused, monkeypatch, capsys):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    line = "convert --from hf --to megatron --proof tensors".split()
    tensor, target = "--tensor-model-parallel-size", tmp_path / "m"
    assert "can be used only with --to megatron --ckpt-format torch" in refused(
        *line, tensor, 2, source, target
    )
    line += ["--ckpt-format", "torch"]
    assert "must divide num_attention_heads 4" in refused(*line, tensor, 3, source, target)
    assert "must divide the 2 layers" in refused(*line, "--pipeline-model-parallel-size", 4, source, target)
    for name in ("vocab.json", "merges.txt"):
        (source / name).unlink()
    assert "requires GPT-2's vocab.json and merges.txt" in refused(*line, source, target)
    shutil.rmtree(source)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    dynamic = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4}
    linear = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for config, named in (
        (transformers.LlamaConfig(vocab_size=100, rope_parameters=linear, **sizes), "interpolation-factor"),
        (transformers.LlamaConfig(vocab_size=100, rope_parameters=dynamic, **sizes), "dynamic"),
        (transformers.MixtralConfig(vocab_size=100, **sizes, **experts), "experts"),
    ):
        shutil.rmtree(source, ignore_errors=True)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(source)
        capsys.readouterr()  # a bar of progress
        assert named in refused(*line, source, target)
        assert not target.exists()


def test_a_llama_for_the_scripts_of_megatron_core(dataset, tmp_path, monkeypatch, capsys):
    """Tied, gated, with grouped queries, cut in four: a script begins with the loss of the driver."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=0.1,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    source, target = tmp_path / "source", tmp_path / "torch"
    transformers.LlamaForCausalLM(config).save_pretrained(source)
    line = "convert --from hf --to megatron --ckpt-format torch --make-vocab-size-divisible-by 64".split()
    line += "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2".split()
    ours(*line, source, target)
    assert "logits of both models in fp32" in capsys.readouterr().out
    assert len(list(target.glob("release/mp_rank_0?_00?/model_optim_rng.pt"))) == 4
    run = (
        "--train-iters 1 --eval-iters 0 --split 90,10,0 --micro-batch-size 1 --global-batch-size 2 --lr 1e-9"
    )
    flags = [
        *shlex.split((target / "flags.txt").read_text()),
        *run.split(),
        "--load",
        str(target),
        "--finetune",
    ]
    one = ["--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1", "--no-plot"]
    one += ["--make-vocab-size-divisible-by", "128"]
    ours("pretrain", *flags, *one, "--data-path", dataset, "--json-log", tmp_path / "log")
    tree = checkout("megatron_core", "0.16.1")
    done = stock_core.pretrain(tree, tmp_path, *flags, "--ckpt-format", "torch", processes=4, data=dataset)
    assert stock_core.losses(done) == [pytest.approx(tiny.losses(tmp_path / "log")[1], rel=1e-5)]
    ours("convert", "--from", "megatron", "--to", "hf", target, tmp_path / "back")
    back = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "back").state_dict()
    before = transformers.AutoModelForCausalLM.from_pretrained(source).state_dict()
    assert before.keys() == back.keys()
    assert all(torch.equal(before[name], back[name]) for name in before)


@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])
def test_training_goes_on_where_a_stock_script_saved(version, dataset, tmp_path, monkeypatch):
    """A gated, rotary model of two tensor ranks: the loss of the next iteration is the script's own."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    model = (
        "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention "
        "--num-query-groups 2 --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope "
        "--swiglu --normalization RMSNorm --disable-bias-linear --untie-embeddings-and-output-weights "
        "--make-vocab-size-divisible-by 64 --vocab-size 255 --tokenizer-type NullTokenizer"
    )
    run = (
        "--micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 3 --eval-iters 0 --split 90,10,0"
    )
    saved = tmp_path / "saved"
    saving = f"--ckpt-format torch --save {saved} --save-interval 1 --tensor-model-parallel-size 2"
    retains = version != "0.12.1"  # which has no such flag
    words = f"{model} {run} {saving} {'--save-retain-interval 2' * retains}".split()
    tree = checkout("megatron_core", version)
    expected = stock_core.losses(stock_core.pretrain(tree, tmp_path, *words, processes=2, data=dataset))
    tracker = saved / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "3"
    kept = [f"iter_000000{number}" for number in (1, 2, 3) if number > 1 or not retains]
    assert sorted(path.name for path in saved.glob("[!.]*")) == [*kept, tracker.name]
    tracker.write_text("2")
    sums = json.loads((saved / "iter_0000002" / checksums.NAME).read_text())["files"]
    assert [*sums] == [f"mp_rank_0{rank}/model_optim_rng.pt" for rank in (0, 1)]
    log = tmp_path / "log.json"
    ours("pretrain", *f"{model} {run} --no-plot --log-interval 1 --json-log {log}".split(),
         *f"--attention-dropout 0 --hidden-dropout 0 --data-path {dataset}".split(),
         *f"--load {saved} --no-load-optim".split())  # fmt: skip
    assert tiny.losses(log)[3] == pytest.approx(expected[2], rel=1e-5)
