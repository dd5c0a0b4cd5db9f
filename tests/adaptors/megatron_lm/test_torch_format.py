"""Checkpoints of 285068c8: what it saves is read here, what is written here it loads; logits are compared."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch

from megatron_npu.commands import cli
from tests.support import stock_lm

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
pytest.importorskip("safetensors")

from megatron_npu.pretrain.checkpoint.restore import restored  # noqa: E402

MODEL = f"{stock_lm.TOOL_MULTIPLE} --tokenizer-type GPT2BPETokenizer"
TRAINING = "--train-iters 10 --lr 5e-3 --eval-iters 0 --save-interval 10"
VOCABULARY = stock_lm.END + 1


def stock_logits(checkout: Path, folder: Path, flags: list[str], load: Path) -> torch.Tensor:
    """Return the logits [1, s, V] of 285068c8 itself on the numbers from 0 on."""
    file = folder / "logits.pt"
    line = [*flags, "--load", str(load), "--logits", str(file)]
    stock_lm.succeeded(
        stock_lm.run(Path(__file__).parent / "logits.py", line, MEGATRON_LM_PATH=str(checkout))
    )
    return torch.load(file)[..., :VOCABULARY]


@torch.no_grad()
def our_logits(load: Path, data: Path) -> torch.Tensor:
    with restored(str(load), str(data / "vocab.json"), str(data / "merges.txt")) as (args, gpt, _):
        tokens = torch.arange(args.seq_length)[None]
        return gpt(tokens, tokens, None)[..., :VOCABULARY]


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")


@pytest.fixture(scope="module")
def trained(checkout, data, tmp_path_factory) -> Path:
    """A model of 285068c8 saved by one process (``1x1``) and cut by its own tool (``2x2``)."""
    folder = tmp_path_factory.mktemp("trained")
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(data / name, folder / name)
    command = [*stock_lm.flags(data), *f"{MODEL} {TRAINING} --save {folder}/1x1".split()]
    stock_lm.succeeded(stock_lm.run(checkout / "pretrain_gpt.py", command))
    stock_lm.change_layout(checkout, folder / "1x1", folder / "2x2", 2, 2)
    return folder


def test_what_it_saves_has_the_same_logits_here(checkout, data, trained, tmp_path, capsys):
    """From one process, and from two tensor ranks in two stages; and as Hugging Face's model."""
    expected = stock_logits(checkout, tmp_path, [*stock_lm.flags(data), *MODEL.split()], trained / "1x1")
    for layout in ("1x1", "2x2"):
        found = our_logits(trained / layout, data)
        assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    files = f"--vocab-file {data}/vocab.json --merge-file {data}/merges.txt".split()
    line = [*"convert --from megatron --to hf".split(), *files, str(trained / "2x2"), str(tmp_path / "hf")]
    assert cli.main(line) == 0
    assert "logits of both models" in capsys.readouterr().out
    gpt = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    tokens = torch.arange(expected.size(1))[None]
    assert (gpt(tokens).logits - expected).abs().max() < 1e-5 * expected.abs().max()


def test_what_is_written_here_it_loads(checkout, data, tmp_path, capsys):
    """Its own tool joins the four files; the flags that were printed are its flags."""
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=2, n_head=4, initializer_range=0.3
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    source = tmp_path / "source"
    model.save_pretrained(source)
    for name in ("vocab.json", "merges.txt"):
        shutil.copyfile(data / name, source / name)
    sizes = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
    line = f"convert --from hf --to megatron --ckpt-format torch {sizes} {source} {tmp_path}/2x2".split()
    assert cli.main(line) == 0, capsys.readouterr().err
    assert "logits of both models" in capsys.readouterr().out
    shutil.copyfile(data / "vocab.json", tmp_path / "vocab.json")
    stock_lm.change_layout(checkout, tmp_path / "2x2", tmp_path / "1x1", 1, 1)
    (tmp_path / "1x1" / "iter_0000000").rename(tmp_path / "1x1" / "release")  # which no run has trained
    (tmp_path / "1x1" / "latest_checkpointed_iteration.txt").write_text("release")
    flags = shlex.split((tmp_path / "2x2" / "flags.txt").read_text())
    one = [
        *"--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1".split(),
        *stock_lm.TOOL_MULTIPLE.split(),
    ]
    training = "--micro-batch-size 1 --global-batch-size 1".split()
    expected = model(torch.arange(64)[None]).logits
    found = stock_logits(checkout, tmp_path, [*flags, *one, *training], tmp_path / "1x1")
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
