"""Weights in half precision, logits as of a model that is in fp32 altogether."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.conversion import fp32_inference

transformers = pytest.importorskip("transformers")

SIZES = {
    "gpt2": {"vocab_size": 100, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2},
    "llama": {
        "vocab_size": 100,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    },
}


def models(kind: str, stored: torch.dtype) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Return the same random model twice."""
    config = transformers.AutoConfig.for_model(kind, **SIZES[kind], initializer_range=0.3)
    one = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(stored).eval()
    other = (
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(stored).eval()
    )
    other.load_state_dict(one.state_dict())
    return one, other


@pytest.mark.parametrize("kind", SIZES)
@pytest.mark.parametrize(
    ("stored", "rounded_to"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
    ],
)
@torch.no_grad()
def test_logits_are_those_of_fp32_on_rounded_weights(kind, stored, rounded_to):
    kept, wide = models(kind, stored)
    for parameter in wide.parameters():
        parameter.data = parameter.data.to(rounded_to).float()
    embeddings = [module for module in kept.modules() if isinstance(module, torch.nn.Embedding)]
    output = kept.get_output_embeddings()
    fp32_inference.run(kept, rounded_to, embeddings=embeddings, output=output, returns_bias=False)
    tokens = torch.arange(12)[None]
    expected = wide(tokens).logits
    found = kept(tokens).logits
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@torch.no_grad()
def test_one_matrix_is_widened_at_a_time(monkeypatch):
    kept, _ = models("llama", torch.bfloat16)
    sizes: list[int] = []
    real = fp32_inference.rounded

    def counted(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        wide = sum(p.numel() for p in kept.parameters() if p.dtype == torch.float32 and p.dim() > 1)
        sizes.append(wide)
        return real(tensor, dtype)

    monkeypatch.setattr(fp32_inference, "rounded", counted)
    monkeypatch.setattr(fp32_inference, "_ROWS", 7)
    embeddings = [kept.get_input_embeddings()]
    output = kept.get_output_embeddings()
    fp32_inference.run(kept, torch.bfloat16, embeddings=embeddings, output=output, returns_bias=False)
    logits = kept(torch.arange(12)[None]).logits
    assert logits.shape == (1, 12, 100)
    assert len(sizes) > 20
    assert max(sizes) == 0
    assert all(parameter.dtype == torch.bfloat16 for parameter in kept.parameters() if parameter.dim() > 1)
