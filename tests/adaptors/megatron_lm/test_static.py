"""What can be said of the patches of this upstream without importing Megatron."""

from __future__ import annotations

import shutil

import pytest

from megatron_npu import cli, upstream
from megatron_npu.adaptors import megatron_lm
from megatron_npu.patching.registry import registry

# The adaptors of the guide's list, and the functions that each is to adapt.
LISTED = {
    "adaptor_arguments": ("megatron.arguments:_add_training_args",),
    "adaptor_core_cross_entropy": (
        "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy.forward",
        "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy.backward",
    ),
    "adaptor_core_layers": ("megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward",),
    "adaptor_core_tensor_parallel": ("megatron.core.tensor_parallel.random:_set_cuda_rng_state",),
    "adaptor_core_utils": ("megatron.core.utils:_kernel_make_viewless_tensor",),
    "adaptor_data_gpt_dataset": ("megatron.data.gpt_dataset:_build_index_mappings",),
    "adaptor_initialize": ("megatron.initialize:set_jit_fusion_options",),
    "adaptor_model_fused_layer_norm": (
        "megatron.model.fused_layer_norm:MixedFusedLayerNorm.__init__",
        "megatron.model.fused_layer_norm:MixedFusedLayerNorm.forward",
    ),
    "adaptor_model_fused_softmax": (
        "megatron.model.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available",
        "megatron.model.fused_softmax:FusedScaleMaskSoftmax.forward_fused_softmax",
    ),
    "adaptor_model_module": (
        "megatron.model.module:fp32_to_float16",
        "megatron.model.module:float16_to_fp32",
    ),
    "adaptor_model_transformer": (
        "megatron.model.transformer:ParallelMLP.__init__",
        "megatron.model.transformer:ParallelMLP.forward",
        "megatron.model.transformer:CoreAttention.forward",
        "megatron.model.transformer:FlashSelfAttention",
        "megatron.model.transformer:ParallelAttention.__init__",
        "megatron.model.transformer:ParallelAttention.forward",
    ),
    "adaptor_optimizer_clip_grads": ("megatron.optimizer.clip_grads:clip_grad_norm_fp32",),
    "adaptor_optimizer_distrib_optimizer": (
        "megatron.optimizer.distrib_optimizer:DistributedOptimizer.__init__",
        "megatron.optimizer.distrib_optimizer:DistributedOptimizer.build_model_and_main_param_groups",
    ),
    "adaptor_optimizer_optimizer": (
        "megatron.optimizer.optimizer:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan",
        "megatron.optimizer:Adam",
        "megatron.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    ),
    "adaptor_p2p_communication": ("megatron.p2p_communication:_communicate",),
    "adaptor_schedules": (
        "megatron.schedules:backward_step",
        "megatron.schedules:forward_backward_no_pipelining",
        "megatron.schedules:deallocate_output_tensor",
    ),
}


@pytest.mark.parametrize("adaptor", LISTED)
def test_listed_functions_have_their_adaptor(adaptor):
    megatron_lm.register()
    for target in LISTED[adaptor]:
        upstreams = ("", "megatron_lm")
        patches = [
            patch for patch in registry.patches if patch.target == target and patch.upstream in upstreams
        ]
        assert patches, target
        assert {patch.origin.split(".")[3] for patch in patches} == {adaptor}


def test_pins_are_those_of_the_checkout(checkout, capsys):
    assert cli.main(["check", "--strict", "--megatron", str(checkout)]) == 0
    assert "0 fail" in capsys.readouterr().out


def test_an_altered_function_is_named(checkout, tmp_path, capsys):
    shutil.copytree(
        checkout / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = tmp_path / "megatron" / "model" / "transformer.py"
    text = file.read_text()
    old = "def forward(self, query_layer, key_layer,\n                value_layer, attention_mask):"
    assert text.count(old) == 1
    file.write_text(text.replace(old, old.replace("attention_mask)", "attention_mask, bias=None)")))
    assert upstream.find(tmp_path).version == "unknown"
    assert cli.main(["check", "--megatron", str(tmp_path)]) == 1
    failing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILS")]
    assert len(failing) == 1
    assert failing[0].endswith("megatron.model.transformer:CoreAttention.forward")
