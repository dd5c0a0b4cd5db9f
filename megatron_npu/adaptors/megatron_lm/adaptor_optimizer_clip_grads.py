"""``megatron.optimizer.clip_grads``."""

from megatron_npu.adaptors.megatron_lm.decorators import watch

watch(
    "megatron.optimizer.clip_grads:clip_grad_norm_fp32",
    why="amp_C's multi_tensor_l2norm and multi_tensor_scale are operations here, and a tensor's type() names "
    "torch.cuda inside Megatron",
)
