"""Add the metadata that DeepSpeed's ``ds_to_universal`` requires to the checkpoints of GPT models.

The model is that of ``megatron.model.gpt_model``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from megatron_npu.adaptors.deepspeed.megatron_deepspeed_core.decorators import UNTIL, around

_PROJECTION = r"\d+.self_attention.query_key_value."


@around(
    "megatron.model.gpt_model:UniversalCheckpointInfo._build_universal_checkpoint_info",
    why=(
        "upstream does not record that a rank's rows of the fused projection are queries, keys and "
        "values: resuming from a universal checkpoint with another --tensor-model-parallel-size silently "
        "mixes them up"
    ),
    upstream_bug=True,
    until=UNTIL,
)
def with_parts_of_the_projection(original: Callable[..., dict[str, Any]], self: Any) -> dict[str, Any]:
    """Declare that the fused QKV weight consists of three parts ``[n d, h]``, and the QKV bias of three
    parts.
    """
    info = original(self)
    given = self.args
    if given.num_key_value_heads != given.num_attention_heads:
        return info
    names: Any = importlib.import_module("deepspeed.checkpoint")
    rows, ranks = given.num_attention_heads * given.kv_channels, given.tensor_model_parallel_size
    shapes: dict[str, tuple[Any, ...]] = {"weight": ((rows,) * 3, given.hidden_size)}
    if given.add_bias_linear:
        shapes["bias"] = ((rows,) * 3,)
    parts = info.setdefault(names.PARAMETER_WITH_SUB_PARAMS, [])
    widths = info.setdefault(names.SUB_PARAM_SHARD_WIDTHS, {})
    for name, shape in shapes.items():
        pattern = self._layers_prefix() + _PROJECTION + name
        parts.append({"patterns": [pattern], "shape": shape, "partition_dim": 0})
        widths[pattern] = [[rows // ranks] * ranks] * 3
    return info
