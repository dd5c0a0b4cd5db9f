"""``megatron.core.utils``."""

from megatron_npu.hosts.megatron_lm.records import unnecessary

unnecessary(
    "megatron.core.utils:_kernel_make_viewless_tensor",
    why="assigning .data across shapes works on every device since torch 2.1 / torch_npu 2.1",
)
