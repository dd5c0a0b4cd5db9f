"""Record the patches that this upstream has in common with others, which ``shared`` and ``deepspeed``
define.
"""

from __future__ import annotations

from megatron_npu.adaptors.deepspeed import deepspeed_engine
from megatron_npu.adaptors.deepspeed.flags_and_runs import connect_start
from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, records
from megatron_npu.adaptors.shared import data, questions, simulated
from megatron_npu.adaptors.shared.layers import fusions, linear_products
from megatron_npu.adaptors.shared.start import keep_fusers

data.connect(
    records,
    ("gpt_dataset", "dataset_utils", "blendable_dataset", "biencoder_dataset_utils", "realm_dataset_utils"),
    until=UNTIL,
)
deepspeed_engine.connect(records, "megatron.core.parallel_state")
fusions.connect(records)
fusions.connect_gelu(records)
linear_products.connect(records)
questions.connect(records, "tasks.orqa.unsupervised.nq", until=UNTIL)
simulated.connect_old_tree(records, "megatron:print_rank_last")
connect_start(records)
keep_fusers(records)
