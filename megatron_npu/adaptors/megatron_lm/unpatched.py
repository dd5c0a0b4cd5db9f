"""List the upstream functions that are deliberately not patched.

Only their pins are compared.
"""

from megatron_npu.adaptors.megatron_lm.decorators import watch

watch(
    "megatron.core.utils:_kernel_make_viewless_tensor",
    why="assigning .data across shapes works on every device since torch 2.1 / torch_npu 2.1",
)
watch(
    "megatron.data.gpt_dataset:_build_index_mappings",
    why="megatron.data.helpers and the module's np are ours "
    "(megatron_npu/standins/datasets/dataset_helpers.py)",
)
watch(
    "megatron.model.transformer:ParallelMLP.__init__",
    why=(
        "the class only builds the two linear layers; the activation is adapted in "
        "megatron.model.fused_bias_gelu"
    ),
)
watch(
    "megatron.model.transformer:ParallelMLP.forward",
    why="the activation is adapted where it is defined, in megatron.model.fused_bias_gelu",
)
watch(
    "megatron.model.transformer:ParallelAttention.forward",
    why="the class splits heads and manages the key-value cache; all arithmetic is in CoreAttention",
)
watch(
    "megatron.optimizer.clip_grads:clip_grad_norm_fp32",
    why="amp_C's multi_tensor_l2norm and multi_tensor_scale are operations here, and a tensor's type() "
    "reports torch.cuda inside Megatron",
)
watch(
    "megatron.optimizer.distrib_optimizer:DistributedOptimizer.build_model_and_main_param_groups",
    why="upstream groups parameters by type(), which reports torch.cuda inside Megatron",
)
watch(
    "megatron.optimizer:Adam",
    why=(
        "the name refers to apex's FusedAdam if apex is installed, and otherwise to our operation under "
        "that name"
    ),
)
watch(
    "megatron.optimizer.optimizer:Float16OptimizerWithFloat16Params.__init__",
    why="upstream groups parameters by type(), which reports torch.cuda inside Megatron",
)
watch(
    "megatron.schedules:backward_step",
    why="overflow is checked once per step, in the schedules and the optimizer, not once per micro batch",
)
watch(
    "megatron.schedules:deallocate_output_tensor",
    why="shrinking .data works on every device; a pending gloo send keeps the memory it reads alive",
)
