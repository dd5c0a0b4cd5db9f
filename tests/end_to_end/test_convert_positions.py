"""Scaled positions, windows of some layers and biases of the attention: both ways, generated, and trained."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_npu.commands import cli
from megatron_npu.generation.generate import generate
from megatron_npu.pretrain.checkpoint.restore import restored
from megatron_npu.pretrain.flags import rotary_flags
from tests.end_to_end.test_convert import convert as convert
from tests.end_to_end.test_convert import hf_logits, meaning, megatron_logits, model, tensors_of
from tests.support import tiny

pytest.importorskip("megatron.core")
transformers = pytest.importorskip("transformers")

ORIGINAL, TOKENS = 16, 90  # the length before scaling; what is read
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Mistral": {"sliding_window": None},
    "Qwen2": {},
    "Qwen3": {"head_dim": 8},
    "Mixtral": {"num_local_experts": 4, "head_dim": 8},
    "Qwen2Moe": {**EXPERTS, "shared_expert_intermediate_size": 16},
    "Qwen3Moe": EXPERTS,
}


def config(kind: str, **changes: Any) -> transformers.PretrainedConfig:
    """Return a small model of a family: 2 query heads share a key."""
    made: transformers.PretrainedConfig = getattr(transformers, f"{kind}Config")(
        **{
            "vocab_size": 160,
            "hidden_size": 32,
            "intermediate_size": 40,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            "initializer_range": 0.3,
            "eos_token_id": None,
            **KINDS[kind],
            **changes,
        }
    )
    return made


@st.composite
def linear(draw: st.DrawFn) -> dict[str, Any]:
    return {"factor": draw(st.floats(1, 16))}


@st.composite
def dynamic(draw: st.DrawFn) -> dict[str, Any]:
    return {"factor": draw(st.floats(6, 16))}


@st.composite
def llama3(draw: st.DrawFn) -> dict[str, Any]:
    low = draw(st.floats(0.5, 2))
    keys = {"factor": draw(st.floats(1, 64)), "low_freq_factor": low}
    return {
        **keys,
        "high_freq_factor": draw(st.floats(low + 0.5, 8)),
        "original_max_position_embeddings": ORIGINAL,
    }


@st.composite
def yarn(draw: st.DrawFn) -> dict[str, Any]:
    more = st.sampled_from(
        [
            {},
            {"attention_factor": 1.0},
            {"attention_factor": 0.8},
            {"attention_factor": 1.7},
            {"mscale": 0.7, "mscale_all_dim": 1.2},
            {"truncate": False, "beta_fast": 8.0, "beta_slow": 0.5},
        ]
    )
    factor = draw(st.floats(1.5, 16))
    return {"factor": factor, "original_max_position_embeddings": ORIGINAL, **draw(more)}


SCALINGS = {"linear": linear, "dynamic": dynamic, "llama3": llama3, "yarn": yarn}


def there_and_back(source: Path, folder: Path, convert: Callable[..., str]) -> tuple[float, str]:
    """Convert a model both ways; return the worst difference of logits, of the largest, and the lines."""
    tokens = torch.randint(160, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    said = convert("hf", "megatron", source, folder / "m")
    expected, found = hf_logits(source, tokens), megatron_logits(folder / "m", tokens)
    # its own proof by logits: test_what_the_driver_has_trained
    convert("megatron", "hf", folder / "m", folder / "h", "--proof", "tensors")
    before, after = tensors_of(source), tensors_of(folder / "h")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    again = hf_logits(folder / "h", tokens)
    assert (again - expected).abs().max() < 1e-5 * expected.abs().max()
    return ((found - expected).abs().max() / expected.abs().max()).item(), said


@pytest.mark.parametrize("scaling", SCALINGS)
@settings(max_examples=2)
@given(data=st.data())
def test_scaled_positions_behind_the_original_length(scaling, data, tmp_path_factory, convert):
    kind = data.draw(st.sampled_from(list(KINDS)))
    keys = {"rope_type": scaling, "rope_theta": 1e4, **data.draw(SCALINGS[scaling]())}
    longest = {"max_position_embeddings": ORIGINAL} if scaling == "dynamic" else {}
    folder = tmp_path_factory.mktemp("positions")
    source = model(folder / "s", config(kind, rope_parameters=dict(keys), **longest))
    difference, said = there_and_back(source, folder, convert)
    assert difference < 2e-5
    assert "angles of both models at the end of" in said
    before, after = (meaning(folder / name)["rope_parameters"] for name in ("s", "h"))
    defaults = {"beta_fast": 32.0, "beta_slow": 1.0} if scaling == "yarn" else {}
    assert after == pytest.approx({**defaults, **before})
    written = json.loads((folder / "h" / "config.json").read_text())  # for transformers 4, too
    assert {"rope_theta": written["rope_theta"], **written["rope_scaling"]} == written["rope_parameters"]


WINDOWS = {"use_sliding_window": True, "sliding_window": 5}
SOME = ["sliding_attention", "full_attention", "sliding_attention"]
FEATURES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama, bias of the attention": ("Llama", {"attention_bias": True}),
    "Qwen3, bias of the attention": ("Qwen3", {"attention_bias": True}),
    "Qwen3-MoE, bias of the attention": ("Qwen3Moe", {"attention_bias": True}),
    "Qwen2, windows of late layers": ("Qwen2", {**WINDOWS, "max_window_layers": 1}),
    "Qwen2, windows of all layers": ("Qwen2", {**WINDOWS, "max_window_layers": 0}),
    "Qwen3, windows by layer_types": ("Qwen3", {**WINDOWS, "layer_types": SOME}),
    "Mixtral, windows": ("Mixtral", {"sliding_window": 5}),
    "Qwen2-MoE, windows of odd layers": ("Qwen2Moe", WINDOWS),
    "Qwen3-MoE, windows": ("Qwen3Moe", WINDOWS),
}


@pytest.mark.parametrize("feature", FEATURES)
def test_windows_and_biases(feature, tmp_path, convert):
    kind, changes = FEATURES[feature]
    source = model(tmp_path / "s", config(kind, **changes))
    difference, _ = there_and_back(source, tmp_path, convert)
    assert difference < 2e-5
    before, after = meaning(tmp_path / "s"), meaning(tmp_path / "h")
    assert after.pop("layer_types", None) == before.pop("layer_types", None)
    for said_otherwise in ("max_window_layers", "head_dim"):  # by layer_types, and by the other sizes
        before.pop(said_otherwise, None)
        after.pop(said_otherwise, None)
    assert after == before


@pytest.mark.parametrize("scaling", ["dynamic", "yarn"])
def test_text_that_grows_beyond_the_original_length(scaling, tmp_path, convert):
    """Dynamic scaling turns what is read at once by its length: with kept keys another text than without."""
    keys = {"rope_type": scaling, "rope_theta": 1e4, "factor": 6.0}
    changes = {"max_position_embeddings": ORIGINAL} if scaling == "dynamic" else {}
    if scaling == "yarn":
        keys["original_max_position_embeddings"] = ORIGINAL
    source = model(tmp_path / "s", config("Llama", rope_parameters=keys, **changes))
    convert("hf", "megatron", source, tmp_path / "m")
    prompt = list(range(3, 3 + ORIGINAL - 4))
    wanted = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    for cache in (True, False):
        made = transformers.AutoModelForCausalLM.from_pretrained(source).float().eval()
        expected = made.generate(torch.tensor([prompt]), use_cache=cache, **wanted)[0].tolist()
        text = " ".join(map(str, prompt))
        text = generate(str(tmp_path / "m"), text, num_tokens=30, temperature=0, recompute=not cache)
        assert [int(word) for word in text.split()] == expected, cache


def test_a_text_ends_where_the_model_says(tmp_path, convert):
    """Without a tokenizer in the folder ``eos_token_id`` of config.json counts."""
    source = model(tmp_path / "s", config("Llama"))
    made = transformers.AutoModelForCausalLM.from_pretrained(source).eval()
    wanted = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    whole = made.generate(torch.tensor([[5, 9]]), **wanted)[0].tolist()
    end = whole[6]
    values = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**values, "eos_token_id": [end, 3]}))
    said = convert("hf", "megatron", source, tmp_path / "m")
    assert f"texts end with {end}, the model's eos_token_id, but not with 3" in said
    assert "--null-tokenizer-eod-id" in said
    text = generate(str(tmp_path / "m"), "5 9", num_tokens=10, temperature=0)
    assert [int(word) for word in text.split()] == whole[: whole.index(end, 2)]
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    assert json.loads((tmp_path / "h" / "config.json").read_text())["eos_token_id"] == [end, 3]


ROTATED = (
    "--num-layers 2 --seq-length 32 --position-embedding-type rope --disable-bias-linear --swiglu "
    "--normalization RMSNorm --group-query-attention --num-query-groups 2 --init-method-std 0.3"
)
TRAINED = {
    "linear": "--rotary-seq-len-interpolation-factor 2.5",
    "dynamic": "--use-rope-scaling --rope-scaling-type dynamic --rope-scaling-factor 4 "
    "--rope-scaling-original-max-position-embeddings 8",
    "llama3": "--use-rope-scaling --rope-scaling-original-max-position-embeddings 8",
    "yarn": "--position-embedding-type yarn --rotary-scaling-factor 4 "
    "--yarn-original-max-position-embeddings 8",
    "bias": "--add-attention-bias",
    "windows": "--add-qkv-bias --pre-tockens 4 --window-attn-skip-freq [0,1]",
}


def require_upstreams_angles(args: Any, gpt: Any) -> None:
    """Check that megatron-core's own YaRN, which a script of 0.19 builds of the same flags, is the same."""
    from megatron.core.models.common.embeddings import yarn_rotary_pos_embedding as upstreams

    theirs = upstreams.YarnRotaryEmbedding(
        args.kv_channels,
        rotary_base=args.rotary_base,
        use_cpu_initialization=True,
        scaling_factor=args.rotary_scaling_factor,
        original_max_position_embeddings=args.yarn_original_max_position_embeddings,
        beta_fast=args.yarn_beta_fast,
        beta_slow=args.yarn_beta_slow,
        mscale=args.mscale,
        mscale_all_dim=args.mscale_all_dim,
        correction_range_round_to_int=args.yarn_correction_range_round_to_int,
    )
    angles, factor = theirs(32)
    assert torch.allclose(gpt.rotary_pos_emb(32), angles, rtol=1e-6)
    assert factor == pytest.approx(rotary_flags.concentration(args))
    scale = gpt.decoder.layers[0].self_attention.core_attention.softmax_scale
    assert scale == pytest.approx(factor**2 / args.kv_channels**0.5)


@pytest.mark.parametrize("feature", TRAINED)
def test_what_the_driver_has_trained(feature, flags, tmp_path, convert):
    line = flags(*ROTATED.split(), *TRAINED[feature].split(), "--train-iters", 2, "--save", tmp_path / "m")
    assert cli.main(["pretrain", *line]) == 0
    convert("megatron", "hf", tmp_path / "m", tmp_path / "h")
    tokens = torch.arange(32)[None]
    expected = megatron_logits(tmp_path / "m", tokens)
    assert (hf_logits(tmp_path / "h", tokens) - expected).abs().max() < 1e-5 * expected.abs().max()
    with restored(str(tmp_path / "m")) as (args, gpt, _):
        if feature == "yarn":
            require_upstreams_angles(args, gpt)
        assert any(name.endswith("linear_proj.bias") for name, _ in gpt.named_parameters()) == (
            feature == "bias"
        )


def test_a_run_goes_on_from_it_in_another_layout(dataset, tmp_path, convert, refused):
    """Biases behind a product that two ranks share are added once; what would be another model is refused."""
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": ORIGINAL,
    }
    made = config("Llama", vocab_size=256, attention_bias=True, rope_parameters=rope)
    convert("hf", "megatron", model(tmp_path / "s", made), tmp_path / "m")
    words = shlex.split((tmp_path / "m" / "flags.txt").read_text())

    def line(name: str, *more: str) -> list[str]:
        return [
            *words,
            *"--micro-batch-size 1 --global-batch-size 2 --train-iters 1 --lr 1e-3 --eval-iters 0".split(),
            *f"--split 90,10,0 --no-plot --data-path {dataset} --load {tmp_path / 'm'}".split(),
            *f"--seq-length 64 --json-log {tmp_path / name}".split(),
            *more,
        ]

    assert cli.main(["pretrain", *line("one")]) == 0
    two = tiny.run("pretrain", *line("two"), "--tensor-model-parallel-size", "2", processes=2)
    assert two.returncode == 0, two.stderr
    assert tiny.losses(tmp_path / "two")[1] == pytest.approx(tiny.losses(tmp_path / "one")[1], rel=1e-5)
    said = refused("pretrain", *line("none", "--yarn-beta-fast", "16", "--rotary-scaling-factor", "2"))
    assert "--yarn-beta-fast 16.0 (checkpoint: 32.0)" in said
    assert "--rotary-scaling-factor 2.0 (checkpoint: 4.0)" in said
