"""Whoever asks for TransformerEngine's layers without it gets the local ones, and is told."""

from __future__ import annotations

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.ops.dispatch import FallbackForbiddenError
from tests.adaptors.megatron_core import te_fallback_worker as worker
from tests.adaptors.megatron_core.conftest import make_config
from tests.support import on_version
from tests.support.comparison import here

pytestmark = pytest.mark.usefixtures("single_process")


@pytest.mark.parametrize("case", worker.SAME, ids=lambda case: f"{case[1]}-{','.join(case[2])}")
def test_the_spec_is_the_local_one(case: worker.Same) -> None:
    asked = worker.heard()
    mine, local = worker.asked_and_local(case)
    assert mine == local
    assert asked()


def test_berts_layer_is_the_local_one() -> None:
    mine, local = worker.bert_layers()
    assert mine == local


@pytest.mark.parametrize("version", ["0.12.1", "0.13.1", "0.14.0", "0.15.3"])
def test_other_versions(version: str) -> None:
    on_version.run("te_fallback_worker", version)


@pytest.mark.parametrize("version", ["0.19.2", on_version.MAIN])
def test_since_0_17_our_provider_answers(version: str) -> None:
    """Fewer functions are patched: upstream's own ask the provider which modules to name."""
    on_version.run("spec_provider_worker", version)


def model(block, config):
    from megatron.core.models.gpt.gpt_model import GPTModel

    torch.manual_seed(3)
    return GPTModel(config, block, vocab_size=64, max_sequence_length=16).to(here())


@pytest.mark.parametrize(
    "changes",
    [
        {"normalization": "RMSNorm", "qk_layernorm": True},
        {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "moe_layer_freq": [1, 0]},
    ],
    ids=["dense", "experts"],
)
def test_a_model_is_that_of_the_local_block(changes) -> None:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = make_config(**changes)
    mine = model(get_gpt_decoder_block_spec(config, use_transformer_engine=True), config)
    local = get_gpt_decoder_block_spec(config, False, normalization=config.normalization)
    theirs = model(local, config)
    assert [(k, v.shape) for k, v in mine.named_parameters()] == [
        (k, v.shape) for k, v in theirs.named_parameters()
    ]
    tokens = torch.randint(64, (2, 16), device=here())
    positions = torch.arange(16, device=here()).expand(2, 16)
    torch.testing.assert_close(mine(tokens, positions, None), theirs(tokens, positions, None))


def test_other_seekers_of_a_backend() -> None:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.multi_token_prediction import get_mtp_layer_spec

    asked = worker.heard()
    provider, local = TESpecProvider(), LocalSpecProvider()
    assert provider.column_parallel_linear() is local.column_parallel_linear()
    assert provider.core_attention() is local.core_attention()
    config = make_config(mtp_num_layers=1)
    layer = worker.specified(worker.GPT, "get_gpt_layer_local_spec", {})
    assert get_mtp_layer_spec(layer, True) == get_mtp_layer_spec(layer, False)
    assert get_gpt_mtp_block_spec(config, layer, True) == get_gpt_mtp_block_spec(config, layer, False)
    assert asked() == 3


def test_patches_of_an_image_see_later_ones() -> None:
    from megatron.core.models.vision.clip_vit_model import CLIPViTModel
    from megatron.core.models.vision.vit_layer_specs import get_vit_layer_with_transformer_engine_spec

    torch.manual_seed(1)
    layer = get_vit_layer_with_transformer_engine_spec()
    vision = CLIPViTModel(make_config(), layer, img_h=28, img_w=28, add_class_token=False).to(here())
    image = torch.randn(1, 3, 28, 28, device=here(), requires_grad=True)
    (gradient,) = torch.autograd.grad(vision(image)[0, 0].square().sum(), image)
    assert gradient[..., 14:, 14:].abs().sum() > 0, "the first of four patches must see the last"


def test_the_norm_of_queries_in_llava_is_not_forgotten() -> None:
    from megatron.core.models.multimodal import llava_spec

    layer = llava_spec.decoder_model_with_transformer_engine_default_spec(qk_layernorm=True)
    attention = layer.submodules.self_attention.submodules
    assert attention.q_layernorm is attention.k_layernorm is layer.submodules.input_layernorm


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_a_block_of_t5_has_a_final_norm(part: str) -> None:
    block = worker.specified(worker.T5, f"get_t5_{part}_with_local_block_spec", {"num_layers": 2})
    assert block.layer_norm is block.layer_specs[0].submodules.input_layernorm


def test_t5_and_bert_compute() -> None:
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.T5.t5_model import T5Model

    config, sizes = make_config(), {"vocab_size": 64, "max_sequence_length": 8}
    tokens = torch.randint(64, (2, 8), device=here())
    mask = torch.zeros(2, 1, 8, 8, dtype=torch.bool, device=here())
    blocks = [
        worker.specified(worker.T5, f"get_t5_{part}_with_transformer_engine_block_spec", {"num_layers": 2})
        for part in ("encoder", "decoder")
    ]
    translator = T5Model(config, config, *blocks, **sizes).to(here())
    later = mask | torch.ones(8, 8, dtype=torch.bool, device=here()).triu(1)
    assert translator.encoder.final_layernorm is not None
    assert translator.decoder.final_layernorm is not None
    changed = tokens.clone()
    changed[:, -1] += 1
    ends = [translator(tokens, end % 64, mask, later, mask) for end in (tokens, changed)]
    torch.testing.assert_close(ends[0][:, :-1], ends[1][:, :-1])  # the decoder is causal
    named, _ = worker.bert_layers()
    bert = BertModel(config, 0, named, **sizes).to(here())
    logits, _ = bert(tokens, torch.ones(2, 8, device=here()))
    assert logits.shape[-1] == 64


def test_the_norm_alone() -> None:
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    asked = worker.heard()
    assert type(TENorm(make_config(), 32, 1e-6)) is WrappedTorchNorm
    assert asked() == 1


def test_strict_mode_refuses(monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    for module, asked, arguments, local, local_arguments in worker.SAME:
        with pytest.raises(FallbackForbiddenError, match=asked):
            worker.specified(module, asked, arguments)
        worker.specified(module, local, local_arguments)


def test_strict_mode_lets_a_script_import_a_name_that_it_may_not_use(monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_NPU_STRICT", "1")
    from megatron.core.models.bert.bert_layer_specs import bert_layer_with_transformer_engine_spec

    assert bert_layer_with_transformer_engine_spec.submodules


def test_fp8_is_refused_in_one_line() -> None:
    for name in ("get_gpt_layer_with_transformer_engine_spec", "get_mlp_module_spec"):
        with pytest.raises(
            UsageError,
            match=(
                "fp8='hybrid' requires TransformerEngine, because the local layers do not support this "
                "precision"
            ),
        ):
            worker.specified(worker.GPT, name, {"fp8": "hybrid"})
