"""``megatron.core.utils``."""

from megatron_npu.adaptors.megatron_lm.decorators import watch

watch(
    "megatron.core.utils:_kernel_make_viewless_tensor",
    why="assigning .data across shapes works on every device since torch 2.1 / torch_npu 2.1",
)
