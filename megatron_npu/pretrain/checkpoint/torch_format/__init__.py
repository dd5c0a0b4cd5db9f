"""Read and write checkpoints in the format ``torch``, which has one file ``model_optim_rng.pt`` per rank.

This is the only format of Megatron-LM 285068c8, NVIDIA's 345M model and Megatron-DeepSpeed's converted
models. megatron-core's scripts write it with ``--ckpt-format torch``. ``files`` finds and reads the files,
``names`` maps older weight names, ``shards`` defines how ranks partition weights, ``read`` assembles a model,
and ``write`` splits one.
"""

from megatron_npu.pretrain.checkpoint.torch_format.files import holds_ranks, untracked
from megatron_npu.pretrain.checkpoint.torch_format.read import Checkpoint, load_weights
from megatron_npu.pretrain.checkpoint.torch_format.write import (
    flags,
    is_of_285068c8,
    require_writable,
    write,
)

__all__ = [
    "Checkpoint",
    "flags",
    "holds_ranks",
    "is_of_285068c8",
    "load_weights",
    "require_writable",
    "untracked",
    "write",
]
