"""The functions that Appendix A of the guide (the scripts of ``tests_gpt``) lists, and where they are now."""

from __future__ import annotations

_CROSS_ENTROPY = "megatron.core.tensor_parallel.cross_entropy:_VocabParallelCrossEntropy"
_DISTRIBUTED = "megatron.optimizer.distrib_optimizer:DistributedOptimizer"
_OPTIMIZER = "megatron.optimizer.optimizer"
_CHECK = f"{_OPTIMIZER}:MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan"

# the adaptor's file as the guide calls it -> function -> the room that connects it today, beside this
# upstream's others or in shared/
LISTED: dict[str, dict[str, str]] = {
    "adaptor_arguments": {
        "megatron.arguments:_add_training_args": "arguments",
    },
    "adaptor_core_cross_entropy": {
        f"{_CROSS_ENTROPY}.forward": "loss_and_embedding",
        f"{_CROSS_ENTROPY}.backward": "loss_and_embedding",
    },
    "adaptor_core_layers": {
        "megatron.core.tensor_parallel.layers:VocabParallelEmbedding.forward": "loss_and_embedding",
    },
    "adaptor_core_tensor_parallel": {
        "megatron.core.tensor_parallel.random:_set_cuda_rng_state": "shared/random",
    },
    "adaptor_core_utils": {
        "megatron.core.utils:_kernel_make_viewless_tensor": "unpatched",
    },
    "adaptor_data_gpt_dataset": {
        "megatron.data.gpt_dataset:_build_index_mappings": "unpatched",
    },
    "adaptor_initialize": {
        "megatron.initialize:set_jit_fusion_options": "shared/start",
    },
    "adaptor_model_fused_layer_norm": {
        "megatron.model.fused_layer_norm:MixedFusedLayerNorm.__init__": "norm",
        "megatron.model.fused_layer_norm:MixedFusedLayerNorm.forward": "norm",
    },
    "adaptor_model_fused_softmax": {
        "megatron.model.fused_softmax:FusedScaleMaskSoftmax.is_kernel_available": "shared/core_attention",
        "megatron.model.fused_softmax:FusedScaleMaskSoftmax.forward_fused_softmax": "shared/core_attention",
    },
    "adaptor_model_module": {
        "megatron.model.module:fp32_to_float16": "shared/mixed_precision",
        "megatron.model.module:float16_to_fp32": "shared/mixed_precision",
    },
    "adaptor_model_transformer": {
        "megatron.model.transformer:ParallelMLP.__init__": "unpatched",
        "megatron.model.transformer:ParallelMLP.forward": "unpatched",
        "megatron.model.transformer:CoreAttention.forward": "shared/core_attention",
        "megatron.model.transformer:FlashSelfAttention": "attention",
        "megatron.model.transformer:ParallelAttention.__init__": "attention",
        "megatron.model.transformer:ParallelAttention.forward": "unpatched",
    },
    "adaptor_optimizer_clip_grads": {
        "megatron.optimizer.clip_grads:clip_grad_norm_fp32": "unpatched",
    },
    "adaptor_optimizer_distrib_optimizer": {
        f"{_DISTRIBUTED}.__init__": "optimizer",
        f"{_DISTRIBUTED}.build_model_and_main_param_groups": "unpatched",
    },
    "adaptor_optimizer_optimizer": {
        _CHECK: "shared/mixed_precision",
        "megatron.optimizer:Adam": "unpatched",
        f"{_OPTIMIZER}:Float16OptimizerWithFloat16Params.__init__": "unpatched",
    },
    "adaptor_p2p_communication": {
        "megatron.p2p_communication:_communicate": "pipeline_parallel",
    },
    "adaptor_schedules": {
        "megatron.schedules:backward_step": "unpatched",
        "megatron.schedules:forward_backward_no_pipelining": "shared/mixed_precision",
        "megatron.schedules:deallocate_output_tensor": "unpatched",
    },
}
