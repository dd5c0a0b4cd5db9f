"""Generators: the device's behind the RNG tracker, the host's for initial weights."""

from __future__ import annotations

from megatron_npu.adaptors.megatron_deepspeed.decorators import replace
from megatron_npu.adaptors.shared.decorators import WITHOUT_CUDA
from megatron_npu.adaptors.shared.random import set_cuda_rng_state

replace(
    "megatron.mpu.random:_set_cuda_rng_state",
    devices=WITHOUT_CUDA,
    why="upstream queues the change until CUDA is initialised, which never happens: fork() would neither set "
    "nor restore a state, and nothing would fail",
)(set_cuda_rng_state)
