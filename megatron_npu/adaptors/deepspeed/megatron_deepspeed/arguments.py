"""``megatron.arguments``: what torch's launchers pass today."""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import around
from megatron_npu.adaptors.shared.arguments import accept_local_rank_with_a_dash

around(
    "megatron.arguments:_add_distributed_args",
    why="torch.distributed.launch passes --local-rank since torch 2.0; upstream knows --local_rank",
)(accept_local_rank_with_a_dash)
