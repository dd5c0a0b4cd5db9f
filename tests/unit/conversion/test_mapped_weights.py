"""Every tensor is used exactly once; what is missing, left over or misshapen is named."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

pytest.importorskip("safetensors")

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import hf_files, mapped_weights, verify
from megatron_npu.conversion.families import FAMILIES

GPT2, LLAMA = FAMILIES["gpt2"], FAMILIES["llama"]
ARGS = Namespace(
    num_layers=1,
    num_attention_heads=2,
    num_query_groups=2,
    kv_channels=2,
    tokenizer_vocab_size=5,
    padded_vocab_size=8,
    untie_embeddings_and_output_weights=False,
    add_bias_linear=False,
    rotary_interleaved=False,
)
H, POSITIONS = 4, 6


def gpt2() -> dict[str, torch.Tensor]:
    """Return the tensors of a GPT-2 as its files hold them."""
    shapes = {
        "wte.weight": (5, H),
        "wpe.weight": (POSITIONS, H),
        "h.0.ln_1.weight": (H,),
        "h.0.ln_1.bias": (H,),
        "h.0.attn.c_attn.weight": (H, 3 * H),
        "h.0.attn.c_attn.bias": (3 * H,),
        "h.0.attn.c_proj.weight": (H, H),
        "h.0.attn.c_proj.bias": (H,),
        "h.0.ln_2.weight": (H,),
        "h.0.ln_2.bias": (H,),
        "h.0.mlp.c_fc.weight": (H, 4 * H),
        "h.0.mlp.c_fc.bias": (4 * H,),
        "h.0.mlp.c_proj.weight": (4 * H, H),
        "h.0.mlp.c_proj.bias": (H,),
        "ln_f.weight": (H,),
        "ln_f.bias": (H,),
    }
    generator = torch.Generator().manual_seed(0)
    return {f"transformer.{name}": torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.fixture
def found(tmp_path):
    """Return a function: tensors -> the weights of a folder with them."""

    def stored(tensors: dict[str, torch.Tensor], family=GPT2) -> mapped_weights.MappedWeights:
        hf_files.write(tmp_path, tensors.items(), tensors, 1 << 30)
        return mapped_weights.open_folder(tmp_path, family)

    return stored


def targets() -> dict[str, torch.Tensor]:
    """Return parameters that are not filled yet, of the shapes that the whole files give."""
    tensors = gpt2()
    return {
        mapping.megatron: torch.full_like(
            mapping.to_megatron([tensors[name] for name in mapping.hf]), torch.nan
        )
        for mapping in GPT2.weight_map(ARGS)
    }


def test_whole_files_fill_every_parameter_and_come_back(found):
    stored, filled = found(gpt2()), targets()
    mapped_weights.check_names(stored, GPT2, ARGS)
    mapped_weights.fill(filled, stored, GPT2.weight_map(ARGS))
    assert not any(tensor.isnan().any() for tensor in filled.values())
    back = dict(mapped_weights.to_hf(filled, GPT2.weight_map(ARGS)))
    assert back.keys() == gpt2().keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in gpt2().items())


def test_names_without_the_prefix_masks_and_a_tied_copy(found):
    """As OpenAI's own files are, and as older transformers write them."""
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in gpt2().items()}
    tensors["h.0.attn.bias"] = torch.ones(6, 6).tril()[None, None]
    tensors["h.0.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"].clone()
    stored = found(tensors)
    mapped_weights.check_names(stored, GPT2, ARGS)
    mapped_weights.fill(targets(), stored, GPT2.weight_map(ARGS))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda t: t.pop("transformer.h.0.ln_1.bias"), "lacks transformer.h.0.ln_1.bias"),
        (lambda t: t.update({"score.weight": torch.ones(2, H)}), "has score.weight"),
        (lambda t: t.update({"transformer.h.1.ln_1.bias": torch.ones(H)}), "has transformer.h.1.ln_1.bias"),
        (lambda t: t.update({"lm_head.weight": torch.ones(5, H)}), "has lm_head.weight"),
        (
            lambda t: t.update({"transformer.h.0.attn.bias": torch.ones(1, 1, 6, 6)}),
            "has transformer.h.0.attn.bias",
        ),
        (lambda t: [t.pop(name) for name in list(t)[:9]], "and more"),
    ],
    ids=["missing", "a head", "a layer", "an untied copy", "another mask", "many"],
)
def test_what_is_missing_or_left_over_is_named(found, change, named):
    tensors = gpt2()
    change(tensors)
    with pytest.raises(UsageError, match=r"config\.json") as caught:
        mapped_weights.check_names(found(tensors), GPT2, ARGS)
    assert named in str(caught.value)


def test_layers_that_no_file_holds_are_not_counted_to_their_end(found):
    """config.json can describe a thousand million of them."""
    asked = 0

    class Counting:
        MODEL_TYPE = "gpt2"

        @staticmethod
        def weight_map(args: Namespace):
            nonlocal asked
            for mapping in GPT2.weight_map(args):
                asked += 1
                assert asked < 1000
                yield mapping

    with pytest.raises(UsageError, match=r"lacks .*h\.1\..* and more"):
        mapped_weights.check_names(found(gpt2()), Counting, Namespace(**{**vars(ARGS), "num_layers": 10**9}))


def test_the_proof_sees_the_last_number_of_a_tensor(found, monkeypatch):
    filled = targets()
    mapped_weights.fill(filled, found(gpt2()), GPT2.weight_map(ARGS))
    monkeypatch.setattr(hf_files, "_PIECE", 50)
    count = verify._compare_tensors(filled, found(gpt2()), GPT2, ARGS, torch.float32)
    assert count == len(gpt2())
    name = "transformer.h.0.mlp.c_fc.weight"
    changed = gpt2()
    changed[name][-1, -1] += 1e-3
    with pytest.raises(UsageError, match=f"{name} differs from the converted tensor"):
        verify._compare_tensors(filled, found(changed), GPT2, ARGS, torch.float32)


def test_what_is_asked_of_memory(found):
    """All weights, and the largest twice more: of this model the MLP's [4, 16]."""
    tensors = gpt2()
    numbers = sum(tensor.numel() for tensor in tensors.values()) + 2 * 4 * H * H
    assert (
        mapped_weights.memory_to_convert(found(tensors), GPT2.weight_map(ARGS), torch.bfloat16) == 2 * numbers
    )


def test_another_shape_is_named(found):
    name = "transformer.h.0.mlp.c_fc.weight"
    stored = found({**gpt2(), name: torch.ones(4 * H, H)})
    with pytest.raises(UsageError, match=rf"{name} must have the shape \[4, 16\] .* its shape is \[16, 4\]"):
        mapped_weights.fill(targets(), stored, GPT2.weight_map(ARGS))


def test_old_frequencies_of_llama_are_no_weights():
    assert LLAMA.is_buffer("model.layers.3.self_attn.rotary_emb.inv_freq", torch.ones(4))
    assert not LLAMA.is_buffer("model.layers.3.self_attn.q_norm.weight", torch.ones(4))


def test_one_type_for_all(found):
    tensors = gpt2()
    assert mapped_weights.common_dtype(found(tensors), GPT2.weight_map(ARGS)) == "fp32"
    mixed = {**tensors, "transformer.wte.weight": tensors["transformer.wte.weight"].half()}
    with pytest.raises(UsageError, match=r"float16, float32, .*--dtype"):
        mapped_weights.common_dtype(found(mixed), GPT2.weight_map(ARGS))
    halves = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    assert mapped_weights.common_dtype(found(halves), GPT2.weight_map(ARGS)) == "bf16"
