"""Record the patches that this upstream has in common with others, which ``shared`` and ``deepspeed``
define.
"""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed import deepspeed_engine
from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_start
from megatron_npu.adaptors.deepspeed.megatron_deepspeed.decorators import around, records
from megatron_npu.adaptors.shared import data, mixed_precision, questions, random, simulated
from megatron_npu.adaptors.shared.arguments import accept_local_rank_with_a_dash

around(
    "megatron.arguments:_add_distributed_args",
    why="torch.distributed.launch passes --local-rank since torch 2.0; upstream defines only --local_rank",
)(accept_local_rank_with_a_dash)

data.connect(
    records,
    (
        "gpt_dataset",
        "dataset_utils",
        "biencoder_dataset_utils",
        "realm_dataset_utils",
        "decoder_packed_mtf_dataset",
    ),
    until="never: 8387ae17 is the last commit",
)
deepspeed_engine.connect(records, "megatron.mpu")
mixed_precision.connect(records, "Float16OptimizerWithFloat16Params")
random.connect(records, "megatron.mpu.random")
questions.connect(records, "tasks.orqa.natural_questions.nq", until="never: 8387ae17 is the last commit")
simulated.connect_old_tree(records, "megatron:print_rank_last")
connect_start(records)
