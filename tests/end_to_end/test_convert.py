"""Checkpoints from and to Hugging Face: random models of transformers, converted, run, and converted back."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.commands import cli
from megatron_npu.conversion import verify
from megatron_npu.conversion.weight_map import Heads
from megatron_npu.generation.generate import generate
from megatron_npu.pretrain.checkpoint.restore import restored
from tests.conftest import ROOT
from tests.support import tiny
from tests.support.tokenizers_made import byte_level, write_gpt2_files, write_json

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@st.composite
def gpt2(draw) -> transformers.PretrainedConfig:
    """Draw small GPT-2s."""
    heads = draw(st.sampled_from([2, 3, 4]))
    return transformers.GPT2Config(
        vocab_size=draw(st.integers(100, 300)),
        n_positions=32,
        n_embd=heads * draw(st.sampled_from([8, 16])),
        n_inner=draw(st.sampled_from([None, 40])),
        n_layer=2,
        n_head=heads,
        activation_function=draw(st.sampled_from(["gelu_new", "gelu"])),
        layer_norm_epsilon=draw(st.sampled_from([1e-5, 1e-3])),
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,  # so that every part moves the logits
    )


@st.composite
def llama(draw) -> transformers.PretrainedConfig:
    """Draw small Llamas."""
    groups, shared = draw(st.sampled_from([(1, 4), (2, 2), (4, 1), (2, 3)]))
    biased = draw(st.booleans())
    return transformers.LlamaConfig(
        vocab_size=draw(st.integers(100, 300)),
        hidden_size=groups * shared * 8,
        head_dim=draw(st.sampled_from([8, 16])),
        intermediate_size=draw(st.sampled_from([40, 64])),
        num_hidden_layers=2,
        num_attention_heads=groups * shared,
        num_key_value_heads=groups,
        max_position_embeddings=64,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        rope_parameters=draw(st.sampled_from([{"rope_type": "default", "rope_theta": 1e4}, LLAMA3])),
        attention_bias=biased,
        mlp_bias=biased,
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,
    )


def kin(draw, kind: type[transformers.PretrainedConfig], **more: object) -> transformers.PretrainedConfig:
    """Draw a small model that is nearly a Llama."""
    groups, shared = draw(st.sampled_from([(1, 4), (2, 2), (2, 3)]))
    return kind(
        vocab_size=draw(st.integers(100, 300)),
        hidden_size=groups * shared * 8,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=groups * shared,
        num_key_value_heads=groups,
        max_position_embeddings=64,
        rms_norm_eps=draw(st.sampled_from([1e-6, 1e-3])),
        rope_parameters={"rope_type": "default", "rope_theta": draw(st.sampled_from([1e4, 1e6]))},
        tie_word_embeddings=draw(st.booleans()),
        initializer_range=0.3,
        **more,
    )


@st.composite
def mistral(draw) -> transformers.PretrainedConfig:
    """Draw small Mistrals; 30 tokens are read, so that some windows limit and others do not."""
    window = draw(st.sampled_from([5, 64, None]))
    head = draw(st.sampled_from([8, 12]))
    return kin(draw, transformers.MistralConfig, sliding_window=window, head_dim=head)


@st.composite
def qwen2(draw) -> transformers.PretrainedConfig:
    """Draw small Qwen2s."""
    return kin(draw, transformers.Qwen2Config)


@st.composite
def qwen3(draw) -> transformers.PretrainedConfig:
    """Draw small Qwen3s; heads of 12 are no part of the hidden size."""
    return kin(draw, transformers.Qwen3Config, head_dim=draw(st.sampled_from([8, 12])))


@st.composite
def mixtral(draw) -> transformers.PretrainedConfig:
    """Draw small Mixtrals."""
    return kin(draw, transformers.MixtralConfig, num_local_experts=draw(st.sampled_from([3, 4])))


EXPERTS = {"moe_intermediate_size": 24, "num_experts": 4, "num_experts_per_tok": 2}


@st.composite
def qwen2_moe(draw) -> transformers.PretrainedConfig:
    """Draw small Qwen2-MoEs, with and without a dense layer."""
    return kin(
        draw,
        transformers.Qwen2MoeConfig,
        **EXPERTS,
        shared_expert_intermediate_size=16,
        decoder_sparse_step=draw(st.sampled_from([1, 2])),
        norm_topk_prob=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
    )


@st.composite
def qwen3_moe(draw) -> transformers.PretrainedConfig:
    """Draw small Qwen3-MoEs, with and without a dense layer."""
    return kin(
        draw,
        transformers.Qwen3MoeConfig,
        **EXPERTS,
        head_dim=draw(st.sampled_from([8, 12])),
        mlp_only_layers=draw(st.sampled_from([[], [1]])),
        norm_topk_prob=draw(st.booleans()),
    )


def model(folder: Path, config: transformers.PretrainedConfig, dtype: torch.dtype = torch.float32) -> Path:
    """Write a model with random weights, biases and norms included; return its folder."""
    made = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        if parameter.dim() == 1:
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    made.to(dtype).save_pretrained(folder)
    return folder


def hf_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    made = transformers.AutoModelForCausalLM.from_pretrained(folder).float().eval()
    with torch.no_grad():
        return made(tokens).logits


def megatron_logits(folder: Path, tokens: torch.Tensor) -> torch.Tensor:
    with restored(str(folder)) as (args, gpt, _), torch.no_grad():
        positions = torch.arange(tokens.size(1)).expand_as(tokens)
        return gpt(tokens, positions, None)[..., : args.tokenizer_vocab_size].float()


@pytest.fixture
def convert(monkeypatch, capsys) -> Callable[..., str]:
    """Return a function: arguments of the command -> what it prints, which must end well."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")

    def run(source: str, target: str, *arguments: object) -> str:
        code = cli.main(["convert", "--from", source, "--to", target, *map(str, arguments)])
        out, err = capsys.readouterr()
        assert code == 0, err
        return out

    return run


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = folder.glob("*.safetensors")
    return {name: tensor for file in files for name, tensor in safetensors.load_file(file).items()}


def meaning(folder: Path) -> dict:
    """Return what transformers reads from a config.json, without what says nothing of the model."""
    values = transformers.AutoConfig.from_pretrained(folder).to_dict()
    if values.get("n_inner") == 4 * values.get("n_embd", 0):
        values["n_inner"] = None
    return {
        key: value for key, value in values.items() if key not in ("_name_or_path", "transformers_version")
    }


@pytest.mark.parametrize("family", [gpt2, llama, mistral, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe])
@settings(max_examples=2)
@given(data=st.data())
def test_logits_are_equal_and_the_way_back_gives_the_same_bits(family, data, tmp_path_factory, convert):
    folder = tmp_path_factory.mktemp("convert")
    source = model(folder / "source", data.draw(family()))
    printed = convert("hf", "megatron", source, folder / "megatron")
    assert "bitwise identical on both sides" in printed
    assert "logits of both models in fp32" in printed
    tokens = torch.randint(100, (2, 30), generator=torch.Generator().manual_seed(1))
    expected = hf_logits(source, tokens)
    found = megatron_logits(folder / "megatron", tokens)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
    convert("megatron", "hf", folder / "megatron", folder / "back", "--max-shard-gb", "1e-5")
    before, after = tensors_of(source), tensors_of(folder / "back")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert len(list((folder / "back").glob("*.safetensors"))) > 1
    assert meaning(folder / "back") == meaning(source)
    written = json.loads((folder / "back" / "config.json").read_text())
    for key in ("dtype", "rope_parameters"):  # as the transformers that is installed writes them
        assert written.get(key) == json.loads((source / "config.json").read_text()).get(key)
    if "rope_parameters" in written:  # and as transformers 4 reads them
        scaled = {key: value for key, value in written["rope_parameters"].items() if key != "rope_theta"}
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
        assert (written["rope_scaling"] or {"rope_type": "default"}) == scaled
    assert written["torch_dtype"] == written["dtype"]
    assert (hf_logits(folder / "back", tokens) - expected).abs().max() == 0


@pytest.fixture
def source(tmp_path) -> Path:
    """A Llama with grouped queries and an odd vocabulary."""
    config = transformers.LlamaConfig(
        vocab_size=257,
        hidden_size=32,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        initializer_range=0.3,
    )
    return model(tmp_path / "source", config)


def test_half_precision_is_kept_and_rounded_on_demand(source, tmp_path, convert):
    tokens = torch.arange(20)[None]
    assert "tensors of type bf16" in convert("hf", "megatron", source, tmp_path / "m", "--dtype", "bf16")
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    rounded = {name: tensor.bfloat16() for name, tensor in tensors_of(source).items()}
    back = tensors_of(tmp_path / "h")
    assert all(torch.equal(back[name], tensor) for name, tensor in rounded.items())
    assert "--bf16" in (tmp_path / "m" / "flags.txt").read_text()
    expected = hf_logits(tmp_path / "h", tokens)
    found = megatron_logits(tmp_path / "m", tokens)  # in bf16
    assert (found - expected).abs().max() < 5e-2 * expected.abs().max()


def test_neighbours_become_halves(flags, tmp_path, convert):
    """A checkpoint of the driver with --rotary-interleaved, which Llama does not have."""
    changes = (
        "--position-embedding-type rope --rotary-interleaved --rotary-base 500 --disable-bias-linear "
        "--swiglu --normalization RMSNorm --group-query-attention --num-query-groups 2 --init-method-std 0.3 "
        f"--train-iters 0 --save {tmp_path / 'm'}"
    ).split()
    assert cli.main(["pretrain", *flags(*changes)]) == 0
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    tokens = torch.arange(20)[None]
    expected = megatron_logits(tmp_path / "m", tokens)
    assert (hf_logits(tmp_path / "h", tokens) - expected).abs().max() < 1e-5 * expected.abs().max()


ROTARY = "--position-embedding-type rope --swiglu"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ("--qk-layernorm", "--qk-layernorm"),
        ("--apply-layernorm-1p", "--apply-layernorm-1p"),
        ("--disable-bias-linear", "--disable-bias-linear"),
        ("--pre-tockens 4", "--pre-tockens"),
        ("--position-embedding-type none", "--position-embedding-type"),
        (ROTARY, "--normalization"),
        (f"{ROTARY} --normalization RMSNorm --rotary-percent 0.5", "--rotary-percent"),
    ],
)
def test_a_checkpoint_that_no_family_can_hold(flags, tmp_path, refused, capsys, changes, named):
    assert cli.main(["pretrain", *flags(*changes.split(), "--train-iters", 0, "--save", tmp_path / "m")]) == 0
    capsys.readouterr()
    assert named in refused("convert", "--from", "megatron", "--to", "hf", tmp_path / "m", tmp_path / "h")
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_pages_show_the_lines_that_are_printed(source, tmp_path, convert):
    """In every digit but the numbers."""

    def shape(line: str) -> str:
        return re.sub(r"type \w+|\d[\d.e+-]*", "#", line)

    printed = set(map(shape, convert("hf", "megatron", source, tmp_path / "m").splitlines()))
    for page in ("how-to/convert.md", "tutorials/codeparrot.md"):
        lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()
        shown = {shape(line) for line in lines if re.match(r"\d+ tensors of|logits of both models in", line)}
        assert len(shown) == 2
        assert shown <= printed


def test_the_formats_the_wrong_way_round(source, tmp_path, convert, refused):
    convert("hf", "megatron", source, tmp_path / "m")
    ways = {("megatron", "hf"): source, ("hf", "megatron"): tmp_path / "m"}
    for (origin, target), folder in ways.items():
        told = refused("convert", "--from", origin, "--to", target, folder, tmp_path / "x")
        assert f"Use --from {target} --to {origin}, or correct the path." in told


def test_a_wrong_mapping_is_found_by_the_logits_and_leaves_nothing(source, tmp_path, refused, monkeypatch):
    """The two directions of a mapping agree with each other, so that tensors alone would not tell."""
    for direction in ("to_megatron", "to_hf"):
        monkeypatch.setattr(Heads, direction, lambda self, rows: rows.flip(0))
    line = ["convert", "--from", "hf", "--to", "megatron", source, tmp_path / "m"]
    assert "the logits of the original and the converted model differ by" in refused(*line)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    assert cli.main([*map(str, line), "--proof", "tensors"]) == 0


def test_without_transformers_the_tensors_are_compared(source, tmp_path, convert, refused, monkeypatch):
    monkeypatch.setattr(verify, "has_reference", lambda: False)
    assert (
        'transformers is not installed, so the logits were NOT compared (pip install "megatron_npu[hf]")'
        in convert("hf", "megatron", source, tmp_path / "m")
    )
    again = ("convert", "--from", "hf", "--to", "megatron", source, tmp_path / "n", "--proof", "logits")
    assert "--proof logits requires the package transformers, which is not installed" in refused(*again)


def test_bad_input(source, tmp_path, refused):
    def line(*words: object, origin: str = "hf", target: str = "megatron") -> str:
        return refused("convert", "--from", origin, "--to", target, *words)

    assert "--from and --to must be different formats, but got --from" in line(
        source, tmp_path / "m", target="hf"
    )
    assert "config.json" in line(tmp_path / "nowhere", tmp_path / "m")
    told = line(source, tmp_path / "m", origin="megatron", target="hf")
    assert "requires latest_checkpointed_iteration.txt" in told
    assert "exists" in line(source, source)
    assert "--make-vocab" in line(source, tmp_path / "m", "--make-vocab-size-divisible-by", 0)
    (source / "model.safetensors").rename(tmp_path / "model.safetensors")
    assert "no weights" in line(source, tmp_path / "m")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.safetensors", "source"]


def test_training_goes_on_in_another_layout(source, tmp_path, dataset, convert, refused):
    """Two processes with tensor parallelism begin with the loss of one.

    The vocabulary of 257 is padded to 384 in the checkpoint and to 512 here: new rows must do no harm.
    """
    convert("hf", "megatron", source, tmp_path / "m")

    def flags(multiple: int, name: str) -> list[str]:
        return [
            *shlex.split((tmp_path / "m" / "flags.txt").read_text()),
            *"--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0".split(),
            *f"--split 90,10,0 --no-plot --data-path {dataset} --load {tmp_path / 'm'}".split(),
            *f"--make-vocab-size-divisible-by {multiple} --json-log {tmp_path / name}".split(),
        ]

    assert cli.main(["pretrain", *flags(512, "one")]) == 0
    two = tiny.run("pretrain", *flags(256, "two"), "--tensor-model-parallel-size", "2", processes=2)
    assert two.returncode == 0, two.stderr
    one = tiny.losses(tmp_path / "one")[1]
    assert tiny.losses(tmp_path / "two")[1] == pytest.approx(one, rel=1e-5)
    assert cli.main(["pretrain", *flags(1, "exact")]) == 0
    assert 0 <= one - tiny.losses(tmp_path / "exact")[1] <= math.log(512 / 257)
    line = refused("pretrain", *flags(1, "none"), "--rotary-base", "500", "--norm-epsilon", "0.001")
    assert "--norm-epsilon 0.001" in line
    assert "--rotary-base 500" in line


def test_text_of_gpt2_with_its_own_vocabulary(tmp_path, gpt2_vocab, convert):
    config = transformers.GPT2Config(
        vocab_size=50257, n_positions=64, n_embd=32, n_layer=1, n_head=2, initializer_range=0.3
    )
    source = model(tmp_path / "source", config)
    (source / "vocab.json").write_bytes(gpt2_vocab.vocab_file.read_bytes())
    (source / "merges.txt").write_bytes(gpt2_vocab.merge_file.read_bytes())
    convert("hf", "megatron", source, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "moved")  # with its tokenizer
    text = generate(str(tmp_path / "moved"), "To be, or not", num_tokens=8, temperature=0)
    tokenizer = transformers.GPT2Tokenizer(str(source / "vocab.json"), str(source / "merges.txt"))
    made = transformers.AutoModelForCausalLM.from_pretrained(source)
    ids = tokenizer("To be, or not", return_tensors="pt")
    expected = made.generate(**ids, max_new_tokens=8, do_sample=False, pad_token_id=50256)
    assert text == tokenizer.decode(expected[0])
    away = (tmp_path / "moved" / "hf").rename(tmp_path / "tokenizer")
    files = ["--vocab-file", away / "vocab.json", "--merge-file", away / "merges.txt"]
    convert("megatron", "hf", tmp_path / "moved", tmp_path / "h", *files)
    for name in ("vocab.json", "merges.txt", "generation_config.json"):
        assert (tmp_path / "h" / name).read_bytes() == (source / name).read_bytes()


def test_another_tokenizer_comes_along(source, tmp_path, convert, capsys):
    """Bytes, a begin and an end of a text, as a Llama has them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({symbol: number for number, symbol in enumerate(alphabet)}, []))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.save(str(source / "tokenizer.json"))
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<s>"}))
    printed = convert("hf", "megatron", source, tmp_path / "m")
    assert "HuggingFaceTokenizer; vocabulary 257" in printed
    assert "257 tokens; a text ends with <s> (256)" in printed
    ids = [256, *tokenizer.encode("To be", add_special_tokens=False).ids]
    made = transformers.AutoModelForCausalLM.from_pretrained(source)
    expected = made.generate(torch.tensor([ids]), max_new_tokens=5, do_sample=False, eos_token_id=256)
    text = generate(str(tmp_path / "m"), "To be", num_tokens=5, temperature=0)
    assert text == tokenizer.decode(expected[0].tolist())
    passages = tmp_path / "passages.json"
    passages.write_text(json.dumps({"text": "a b"}) + "\n")
    line = ["lambada", "--load", tmp_path / "m", "--valid-data", passages, "--strict-lambada"]
    assert cli.main([*map(str, line)]) == 0
    assert "total examples: 1.0000E+00" in capsys.readouterr().out
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    assert (tmp_path / "h" / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()


def test_added_tokens_and_the_end_of_a_text_survive_both_ways(tmp_path, convert, capsys):
    """A GPT-2 whose texts end with an added token, with the files of both forms."""
    made = byte_level(special=("<|endoftext|>", "<|user|>", "<|end|>"))
    size = made.get_vocab_size()
    end = made.token_to_id("<|end|>")
    config = transformers.GPT2Config(
        vocab_size=size, n_positions=32, n_embd=16, n_layer=1, n_head=2, eos_token_id=end
    )
    source = model(tmp_path / "source", config)
    made.save(str(source / "tokenizer.json"))
    write_gpt2_files(source, made)
    write_json(source / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    printed = convert("hf", "megatron", source, tmp_path / "m")
    assert f"a text ends with <|end|> ({end})" in printed
    with restored(str(tmp_path / "m")) as (_, _, tokenizer):
        assert tokenizer.encode("<|user|>") == [made.token_to_id("<|user|>")]
        assert tokenizer.eod == end
    prompt = "<|user|>a"
    assert generate(str(tmp_path / "m"), prompt, num_tokens=2, temperature=0).startswith(prompt)
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "h")
    assert (theirs.eos_token_id, len(theirs)) == (end, size)
    assert theirs.encode(prompt) == made.encode(prompt).ids
    assert transformers.AutoConfig.from_pretrained(tmp_path / "h").eos_token_id == end
    line = ["generate", "--load", str(tmp_path / "m"), "--prompt", os.fsdecode(b"caf\xe9")]
    assert cli.main(line) == 2
    error = capsys.readouterr().err
    assert "must be valid UTF-8" in error
    assert error.count("\n") == 1
