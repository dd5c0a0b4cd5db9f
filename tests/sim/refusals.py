"""For every operation a call that its limits allow, and changes to it that they forbid, each by one limit.

A change names the argument that the message must blame and the arguments it replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu_(1)
PREFIX = torch.cat([TRIANGLE, (torch.arange(2048) >= 1024).expand(1024, 2048)])


@dataclass(frozen=True)
class Change:
    """One forbidden call: ``argument`` is to blame; ``given`` replaces arguments of the allowed call."""

    argument: str
    given: dict[str, Any]


@dataclass
class Case:
    """An operation, its allowed call and the forbidden changes."""

    operation: str
    allowed: dict[str, Any]
    changes: list[Change] = field(default_factory=list)

    def but(self, argument: str, **given: Any) -> Case:
        """Add a forbidden change; without ``given`` nothing but the blamed argument is said, as None."""
        self.changes.append(Change(argument, given))
        return self


CASES: dict[str, Case] = {}


def case(operation: str, **allowed: Any) -> Case:
    """Start the cases of one operation."""
    return CASES.setdefault(operation, Case(operation, allowed))


def full(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    """Return zeros of any size over the memory of one element."""
    return torch.zeros(1, dtype=dtype).expand(shape)


def zeros(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


# --- norms ---

case("npu_rms_norm", input=zeros(2, 3, 8), gamma=zeros(8)).but("input", input=zeros(2, 3, 8, dtype=FP64)).but(
    "input", input=zeros(8)
).but("input", input=zeros(*[1] * 8, 8)).but("gamma", gamma=zeros(8, dtype=BF16)).but(
    "gamma", gamma=zeros(4)
).but("gamma", gamma=zeros(2, 3, 8))
case(
    "npu_rms_norm_backward", dy=zeros(2, 3, 8), input=zeros(2, 3, 8), gamma=zeros(8), rstd=zeros(2, 3, 1)
).but("input", input=zeros(2, 3, 8, dtype=FP64)).but("input", input=zeros(8)).but(
    "gamma", gamma=zeros(8, dtype=BF16)
).but("gamma", gamma=zeros(4)).but("dy", dy=zeros(2, 8)).but("dy", dy=zeros(2, 3, 8, dtype=BF16)).but(
    "rstd", rstd=zeros(2, 3, 1, dtype=BF16)
)
case("npu_add_rms_norm", x1=zeros(2, 8), x2=zeros(2, 8), gamma=zeros(8)).but(
    "x1", x1=zeros(2, 8, dtype=FP64)
).but("x1", x1=zeros(*[1] * 8, 8)).but("x2", x2=zeros(2, 8, dtype=BF16)).but("x2", x2=zeros(3, 8)).but(
    "gamma", gamma=zeros(8, dtype=FP16)
).but("gamma", gamma=zeros(2))
for _name, _more in (
    ("npu_add_layer_norm", {"beta": zeros(8)}),
    ("npu_add_layer_norm_backward", {"dy_opt": zeros(2, 8), "rstd": zeros(2, 1), "mean": zeros(2, 1)}),
):
    _case = case(_name, x1=zeros(2, 8), x2=zeros(2, 8), gamma=zeros(8), **_more)
    _case.but("x1", x1=zeros(2, 8, dtype=FP64)).but("x1", x1=zeros(*[1] * 8, 8)).but(
        "x2", x2=zeros(2, 8, dtype=BF16)
    ).but("x2", x2=zeros(3, 8)).but("gamma", gamma=zeros(8, dtype=FP16)).but("gamma", gamma=zeros(2))
CASES["npu_add_layer_norm"].but("beta", beta=zeros(4)).but("beta", beta=zeros(8, dtype=FP16)).but(
    "epsilon", epsilon=1e-6
)
CASES["npu_add_layer_norm_backward"].allowed["dsum_opt"] = None
CASES["npu_add_layer_norm_backward"].but("dy_opt", dy_opt=zeros(2, 4)).but(
    "dy_opt", dy_opt=zeros(2, 8, dtype=FP16)
).but("dsum_opt", dsum_opt=zeros(2, 4)).but("dsum_opt", dsum_opt=zeros(2, 8, dtype=FP16)).but(
    "rstd", rstd=zeros(2, 1, dtype=BF16)
).but("mean", mean=zeros(2, 1, dtype=BF16))

# --- softmax ---

for _name, _x, _more in (
    ("npu_scaled_masked_softmax", "x", {}),
    ("npu_scaled_masked_softmax_backward", "y", {"scale": 1.0, "fixed_triu_mask": False}),
):
    _allowed = {_x: zeros(1, 2, 32, 64), "mask": zeros(1, 1, 32, 64, dtype=torch.bool), **_more}
    if _x == "y":
        _allowed["y_grad"] = zeros(1, 2, 32, 64)
    _softmax = case(_name, **_allowed)
    _softmax.but(_x, **{_x: zeros(1, 2, 32, 64, dtype=FP64)}).but(_x, **{_x: zeros(2, 32, 64)})
    for _sides in ((31, 64), (32, 48), (16, 64), (32, 4128)):
        _softmax.but(_x, **{_x: full(1, 2, *_sides)})
    _softmax.but("mask", mask=zeros(1, 1, 32, 64)).but("mask", mask=zeros(1, 1, 32, 64, dtype=torch.uint8))
    _softmax.but("mask", mask=zeros(1, 3, 32, 64, dtype=torch.bool))
CASES["npu_scaled_masked_softmax_backward"].but("y_grad", y_grad=zeros(1, 2, 32, 32)).but(
    "y_grad", y_grad=zeros(1, 2, 32, 64, dtype=BF16)
)

# --- activations ---

for _name, _more in (("npu_swiglu", {}), ("npu_swiglu_backward", {"grad_output": zeros(2, 4)})):
    case(_name, input=zeros(2, 8), **_more).but("input", input=zeros(2, 8, dtype=FP64)).but(
        "input", input=torch.tensor(1.0)
    ).but("input", input=zeros(*[1] * 8, 8)).but("dim", dim=2).but("dim", input=zeros(2, 7)).but(
        "dim", input=zeros(3, 8), dim=0
    )
CASES["npu_swiglu_backward"].but("grad_output", grad_output=zeros(2, 4, dtype=BF16))

for _name, _more in (("npu_gelu", {}), ("npu_gelu_backward", {"grad_output": zeros(2, 8)})):
    case(_name, input=zeros(2, 8), **_more).but("input", input=zeros(2, 8, dtype=torch.int32)).but(
        "input", input=zeros(2, 8, dtype=FP64)
    ).but("input", input=zeros(*[1] * 9)).but("approximate", approximate="sigmoid")
CASES["npu_gelu_backward"].but("grad_output", grad_output=zeros(2, 4)).but(
    "grad_output", grad_output=zeros(2, 8, dtype=BF16)
)

# --- rotary ---

_cos = zeros(1, 4, 1, 8)
for _name, _more in (("npu_rotary_mul", {}), ("npu_rotary_mul_backward", {"grad": zeros(2, 4, 3, 8)})):
    _rotary = case(_name, input=zeros(2, 4, 3, 8), r1=_cos, r2=_cos, **_more)
    _rotary.but("input", input=zeros(2, 4, 3, 8, dtype=FP64)).but("input", input=zeros(4, 3, 8))
    for _size in (7, 896):
        _wide = full(1, 4, 1, _size)
        _rotary.but("input", input=full(2, 4, 3, _size), r1=_wide, r2=_wide)
    _rotary.but("rotary_mode", rotary_mode="quarter")
    _rotary.but("r1", r1=_cos.double()).but("r1", r1=_cos[0]).but("r1", r1=zeros(1, 4, 1, 4))
    _rotary.but("r1", r1=zeros(1, 5, 1, 8)).but("r1", r1=zeros(2, 4, 1, 8), rotary_mode="interleave")
    _rotary.but("r2", r2=_cos.double()).but("r2", r2=zeros(2, 4, 1, 8))
    _rotary.but("input", input=full(1000, 4, 3, 8)).but("input", input=full(2, 4, 1000, 8))
    _rotary.but("input", input=full(100, 4, 10, 8), rotary_mode="interleave")
CASES["npu_rotary_mul"].but("rotate", rotate=zeros(8, 8, dtype=FP64)).but("rotate", rotate=zeros(8, 4))
CASES["npu_rotary_mul_backward"].but("grad", grad=zeros(2, 4, 3, 4))

_flat = {"cos": zeros(2, 4, 1, 64), "sin": zeros(2, 4, 1, 64)}
case("npu_apply_rotary_pos_emb", query=zeros(2, 4, 3, 64), key=zeros(2, 4, 1, 64), **_flat).but(
    "layout", layout="SBND"
).but("rotary_mode", rotary_mode="interleave").but("query", query=zeros(2, 4, 3, 64, dtype=FP64)).but(
    "query", layout="TND"
).but("query", query=zeros(2, 4, 3, 32)).but("query", query=zeros(2, 0, 3, 64)).but(
    "key", key=zeros(2, 4, 1, 64, dtype=BF16)
).but("cos", cos=zeros(2, 4, 1, 64, dtype=BF16)).but("sin", sin=zeros(2, 4, 1, 64, dtype=BF16)).but(
    "key", key=zeros(2, 5, 1, 64)
).but("cos", cos=zeros(1, 4, 1, 64)).but("sin", sin=zeros(2, 4, 3, 64))

# --- optimizer, status, casts, transpose, linear, dropout ---

_scalars = dict.fromkeys("beta1_power beta2_power lr weight_decay beta1 beta2 epsilon".split(), 0.5)
case(
    "npu_apply_adam_w.out",
    **_scalars,
    grad=zeros(4),
    max_grad_norm=None,
    amsgrad=False,
    maximize=False,
    out=[zeros(4), zeros(4), zeros(4)],
).but("out", out=[zeros(4), zeros(4)]).but("out", out=[zeros(4, dtype=FP64)] * 3).but(
    "out", out=[torch.tensor(0.0)] * 3
).but("out", out=[zeros(4, dtype=BF16), zeros(4), zeros(4)]).but(
    "out", out=[zeros(4), zeros(4), zeros(5)]
).but("grad", grad=zeros(4, dtype=BF16)).but("grad", grad=zeros(2, 2)).but(
    "amsgrad", amsgrad=True, max_grad_norm=zeros(4)
)

for _name in ("npu_get_float_status", "npu_clear_float_status"):
    case(_name, input=zeros(8)).but("mode", mode=2)

case("npu_dtype_cast", input=zeros(4), dtype=15).but("dtype", dtype=7).but("dtype", dtype=285).but(
    "input_dtype", input_dtype=296
)
case("npu_dtype_cast_backward", grad=zeros(4), dtype=FP32).but("grad_dtype", grad_dtype=290).but(
    "input_dtype", input_dtype=290
)
for _name in ("npu_format_cast", "npu_format_cast_.acl_format"):
    case(_name, input=zeros(4), acl_format=2).but("customize_dtype", customize_dtype=1).but(
        "input_dtype", input_dtype=1
    )

case("npu_linear", input=zeros(4, 8), weight=zeros(3, 8)).but(
    "input", input=zeros(4, 8, dtype=torch.int8)
).but("input", input=zeros(1, 4, 8)).but("weight", weight=zeros(3, 8, dtype=BF16)).but(
    "weight", weight=zeros(8)
).but("weight", weight=zeros(8, 3))

case("_npu_dropout", input=zeros(4), p=0.5).but("input", input=zeros(4, dtype=FP64)).but("p", p=1.5).but(
    "p", p=-0.1
)

case("_npu_dropout_gen_mask.Tensor", input=zeros(1), size=[2, 3], p=0.5, seed=1, offset=0).but("p", p=1.5)

# --- cross entropy ---

case("npu_cross_entropy_loss", input=zeros(2, 5), target=ints(0, 4)).but(
    "input", input=zeros(2, 5, dtype=FP64)
).but("input", input=zeros(2, 5, 1)).but("input", input=full(200001, 1), target=ints(0).expand(200001)).but(
    "target", target=ints(0, 4, dtype=torch.int32)
).but("target", target=ints(0, 4).view(2, 1)).but("weight", weight=zeros(5, dtype=BF16)).but(
    "reduction", reduction="batchmean"
).but("lse_square_scale_for_zloss", lse_square_scale_for_zloss=0.1).but("target", target=ints(0, 1, 2)).but(
    "target", target=ints(0, -100)
).but("target", target=ints(0, 5)).but("weight", weight=zeros(4)).but("weight", weight=zeros(5)).but(
    "weight", weight=torch.full((5,), 2.0)
).but("ignore_index", ignore_index=5).but("label_smoothing", label_smoothing=1.0).but(
    "return_zloss", return_zloss=True
)
case("npu_cross_entropy_loss_backward", grad_loss=zeros(1), log_prob=zeros(2, 5), target=ints(0, 4)).but(
    "target", target=ints(0, 4, dtype=torch.int32)
).but("target", target=ints(0, 4).view(2, 1)).but("weight", weight=torch.ones(5, dtype=BF16)).but(
    "reduction", reduction="batchmean"
).but("lse_square_scale_for_zloss", lse_square_scale_for_zloss=0.1).but(
    "label_smoothing", label_smoothing=0.1
).but("weight", weight=torch.ones(5)).but("ignore_index", ignore_index=3)

_x, _w, _ids = zeros(3, 8, dtype=BF16), zeros(128, 8, dtype=BF16), ints(0, 5, 127)
case(
    "npu_fused_linear_online_max_sum",
    input=_x,
    weight=_w,
    target=_ids,
    vocab_start_index=0,
    vocab_end_index=127,
).but("input", input=zeros(3, 8)).but("input", input=_x[None]).but("weight", weight=zeros(128, 8)).but(
    "weight", weight=_w[None]
).but("weight", weight=_w[:, :4]).but(
    "input", input=zeros(3, 1, dtype=BF16).expand(3, 65535), weight=zeros(1, 1, dtype=BF16).expand(128, 65535)
).but("weight", weight=_w[:0]).but("target", target=_ids.short()).but("target", target=_ids[None]).but(
    "target", target=_ids[:2]
).but("vocab_start_index", vocab_start_index=-1).but("vocab_end_index", vocab_start_index=128).but(
    "target", target=_ids + 1, vocab_end_index=128
)
_rows = zeros(3)
case(
    "npu_fused_cross_entropy_loss_with_max_sum",
    logits_max=_rows,
    sum_exp_logits=_rows,
    predicted_logits=_rows,
).but("logits_max", logits_max=_rows.half()).but("sum_exp_logits", sum_exp_logits=_rows.half()).but(
    "predicted_logits", predicted_logits=_rows.half()
).but("logits_max", logits_max=_rows[None]).but("sum_exp_logits", sum_exp_logits=_rows[:2]).but(
    "predicted_logits", predicted_logits=_rows[:2]
).but("label_smoothing", label_smoothing=0.1).but("input", input=_x).but("weight", weight=_w)
case(
    "npu_fused_linear_cross_entropy_loss_with_max_sum_backward",
    grad=_rows,
    input=_x,
    weight=_w,
    target_mask=zeros(1, dtype=torch.uint8),
    masked_target=_ids,
    logits_max=_rows,
    sum_exp_logits=_rows,
).but("input", input=zeros(3, 8)).but("input", input=_x[None]).but("weight", weight=zeros(128, 8)).but(
    "weight", weight=_w[None]
).but("weight", weight=_w[:, :4]).but("weight", weight=_w[:127]).but("grad", grad=_rows.half()).but(
    "grad", grad=_rows[None]
).but("grad", grad=_rows[:2]).but("target_mask", target_mask=zeros(1)).but(
    "target_mask", target_mask=zeros(2, dtype=torch.uint8)
).but("masked_target", masked_target=_ids.short()).but("masked_target", masked_target=_ids[:2]).but(
    "label_smoothing", label_smoothing=0.1
).but("softmax", logits_max=None).but("logits_max", logits_max=_rows.half()).but(
    "sum_exp_logits", sum_exp_logits=_rows.half()
).but("softmax", softmax=zeros(3, 128, dtype=BF16))

# --- mixture of experts ---

_tokens, _indices = zeros(3, 8), ints(0, 1, 2, 0, 1, 2).view(3, 2)
case("npu_moe_token_permute", tokens=_tokens, indices=_indices).but("tokens", tokens=_tokens.double()).but(
    "tokens", tokens=zeros(3, 8, 1)
).but("indices", indices=_indices.to(torch.int16)).but("indices", indices=_indices.view(3, 2, 1)).but(
    "indices", indices=_indices[:2]
).but("indices", indices=full(3, 513, dtype=torch.int64)).but("indices", indices=-_indices).but(
    "num_out_tokens", num_out_tokens=-7
).but("padded_mode", padded_mode=True)

_positions = ints(0, 2, 4, 1, 3, 5, dtype=torch.int32)
for _name, _more in (
    ("npu_moe_token_permute_grad", {"tokens": _tokens, "indices": _indices}),
    ("npu_moe_token_permute_grad_v2", {"tokens_size_0": 3, "tokens_dtype": FP32, "num_topK": 2}),
):
    case(_name, grad_permuted_tokens=zeros(6, 8), sorted_indices=_positions, **_more).but(
        "grad_permuted_tokens", grad_permuted_tokens=zeros(6, 8, dtype=FP64)
    ).but("grad_permuted_tokens", grad_permuted_tokens=zeros(6, 8, 1)).but(
        "sorted_indices", sorted_indices=_positions.long()
    ).but("sorted_indices", sorted_indices=_positions.view(3, 2)).but("padded_mode", padded_mode=True)

_probs = zeros(3, 2)
for _name in ("npu_moe_token_unpermute", "_npu_moe_token_unpermute"):
    case(_name, permuted_tokens=zeros(6, 8), sorted_indices=_positions, probs=_probs).but(
        "permuted_tokens", permuted_tokens=zeros(6, 8, dtype=FP64)
    ).but("permuted_tokens", permuted_tokens=zeros(6, 8, 1)).but(
        "sorted_indices", sorted_indices=_positions.long()
    ).but("sorted_indices", sorted_indices=_positions.view(3, 2)).but("padded_mode", padded_mode=True).but(
        "restore_shape", restore_shape=[3, 8]
    ).but("probs", probs=_probs.double()).but("probs", probs=_probs.view(3, 2, 1)).but(
        "probs", probs=zeros(1, 513)
    ).but("probs", probs=zeros(2, 2)).but("sorted_indices", sorted_indices=torch.zeros_like(_positions))
for _name, _more in (
    ("npu_moe_token_unpermute_grad", {"permuted_tokens": zeros(6, 8)}),
    (
        "npu_moe_token_unpermute_grad_v2",
        {"permuted_tokens": zeros(6, 8), "permuted_tokens_size_0": 6, "permuted_tokens_dtype": FP32},
    ),
):
    case(_name, grad_unpermuted_tokens=zeros(3, 8), sorted_indices=_positions, probs=_probs, **_more).but(
        "grad_unpermuted_tokens", grad_unpermuted_tokens=zeros(3, 8, dtype=FP64)
    ).but("grad_unpermuted_tokens", grad_unpermuted_tokens=zeros(3, 8, 1)).but(
        "sorted_indices", sorted_indices=_positions.long()
    ).but("sorted_indices", sorted_indices=_positions.view(3, 2)).but("padded_mode", padded_mode=True).but(
        "restore_shape", restore_shape=[3, 8]
    ).but("probs", probs=_probs.double()).but("probs", probs=_probs.view(3, 2, 1))

_map = torch.tensor([[1, 1, 0], [0, 1, 1], [1, 0, 1]], dtype=torch.bool)
case("npu_moe_token_permute_with_routing_map", tokens=_tokens, routing_map=_map, num_out_tokens=6).but(
    "tokens", tokens=_tokens.double()
).but("tokens", tokens=zeros(3, 8, 1)).but("routing_map", routing_map=_map.int()).but(
    "routing_map", routing_map=_map.view(1, 3, 3)
).but("routing_map", routing_map=_map.to(torch.int8) * 2).but("routing_map", routing_map=_map[:2]).but(
    "probs", probs=zeros(3, 3, dtype=BF16)
).but("probs", probs=zeros(3, 2)).but("drop_and_pad", drop_and_pad=True).but(
    "num_out_tokens", num_out_tokens=10
).but("routing_map", num_out_tokens=3)
case(
    "npu_moe_token_permute_with_routing_map_grad",
    permuted_token_out_grad=zeros(6, 8),
    probs_grad=None,
    sorted_indices=_positions,
    routing_map=_map,
    experts_num=3,
    tokens_num=3,
    drop_and_pad=False,
).but("permuted_token_out_grad", permuted_token_out_grad=zeros(6, 8, dtype=FP64)).but(
    "permuted_token_out_grad", permuted_token_out_grad=zeros(6, 8, 1)
).but("sorted_indices", sorted_indices=_positions.long()).but("routing_map", routing_map=_map.int()).but(
    "routing_map", routing_map=_map.view(1, 3, 3)
).but("routing_map", routing_map=_map.to(torch.int8) * 3).but("drop_and_pad", drop_and_pad=True)

for _name in ("npu_moe_token_unpermute_with_routing_map", "_npu_moe_token_unpermute_with_routing_map"):
    case(
        _name,
        permuted_tokens=zeros(6, 8),
        sorted_indices=_positions,
        restore_shape=[3, 8],
        probs=zeros(3, 3),
        routing_map=_map,
    ).but("permuted_tokens", permuted_tokens=zeros(6, 8, dtype=FP64)).but(
        "permuted_tokens", permuted_tokens=zeros(6, 8, 1)
    ).but("sorted_indices", sorted_indices=_positions.long()).but(
        "sorted_indices", sorted_indices=_positions.view(3, 2)
    ).but("restore_shape", restore_shape=[3, 4]).but("sorted_indices", sorted_indices=_positions[:5]).but(
        "probs", probs=zeros(3, 3, dtype=BF16)
    ).but("routing_map", routing_map=None).but("routing_map", routing_map=_map.int()).but(
        "routing_map", routing_map=_map.view(1, 3, 3)
    ).but("routing_map", routing_map=_map.to(torch.int8) * 2).but("probs", probs=zeros(3, 2)).but(
        "drop_and_pad", drop_and_pad=True
    ).but("routing_map", routing_map=torch.ones_like(_map))
case(
    "npu_moe_token_unpermute_with_routing_map_grad",
    unpermuted_tokens_grad=zeros(3, 8),
    out_index=_positions,
    permuted_token_id=_positions,
    routing_map=None,
    permuted_tokens=None,
    probs=None,
    drop_and_pad=False,
    restore_shape=[3, 8],
).but("unpermuted_tokens_grad", unpermuted_tokens_grad=zeros(3, 8, dtype=FP64)).but(
    "unpermuted_tokens_grad", unpermuted_tokens_grad=zeros(3, 8, 1)
).but("drop_and_pad", drop_and_pad=True)

_logits = zeros(3, 8)
case("npu_moe_gating_top_k", x=_logits, k=2, bias=zeros(8), k_group=1, group_count=2).but(
    "x", x=_logits.double()
).but("x", x=zeros(3, 8, 1)).but("x", x=full(3, 2049)).but("bias", bias=zeros(8, dtype=BF16)).but(
    "bias", bias=zeros(4)
).but("input_ids", input_ids=ints(0, 1, 2)).but("tid2eid", tid2eid=ints(0, 1).view(1, 2)).but(
    "group_select_mode", group_select_mode=2
).but("group_count", group_count=4).but("group_count", x=full(3, 1040), bias=full(1040), group_count=80).but(
    "k_group", k_group=3
).but("k", k=5).but("renorm", renorm=1).but("norm_type", norm_type=2)
_experts = ints(0, 1, 2, 3, 4, 5, dtype=torch.int32).view(3, 2)
case(
    "npu_moe_gating_top_k_backward", x_norm=_logits, grad_y=zeros(3, 2), expertIdx=_experts, norm_type=1
).but("x_norm", x_norm=_logits.half()).but("x_norm", x_norm=zeros(3, 8, 1)).but(
    "x_norm", x_norm=zeros(3, 1)
).but("grad_y", grad_y=zeros(3, 2, dtype=FP64)).but("grad_y", grad_y=zeros(3, 9)).but(
    "expertIdx", expertIdx=_experts.long()
).but("expertIdx", expertIdx=_experts[:2]).but("norm_type", norm_type=0)

# --- grouped matrix products ---

_ends = ints(2, 2, 6)


def _grouped(grouped: Case, weight: Tensor) -> None:
    """Add what both forms of npu_grouped_matmul forbid; ``weight`` is one [k, n] of theirs."""
    many = len(grouped.allowed["weight"])
    grouped.but("x", x=[zeros(6, 4, dtype=FP64)]).but("weight", weight=[weight.half()] * many)
    grouped.but("x", x=[zeros(2, 4), zeros(2, 4, dtype=BF16)])
    grouped.but("x", x=[]).but("weight", weight=[]).but("x", x=[zeros(4)]).but(
        "weight", weight=[zeros(4)] * many
    )
    grouped.but("x", x=[full(6, 65536)]).but("weight", weight=[full(4, 65536)] * many)
    for name in "offset activation_input activation_quant_scale activation_quant_offset".split():
        grouped.but(name, **{name: [zeros(1)]})
    for name in "scale antiquant_scale antiquant_offset per_token_scale".split():
        grouped.but(name, **{name: [zeros(1)]})
    grouped.but("split_item", split_item=4).but("act_type", act_type=5)
    grouped.but("bias", bias=[zeros(5, dtype=FP16)] * many).but("bias", bias=[zeros(5)] * (many + 1))


_tensor = case(
    "npu_grouped_matmul",
    x=[zeros(6, 4)],
    weight=[zeros(3, 4, 5)],
    group_list=_ends,
    split_item=3,
    group_type=0,
)
_grouped(_tensor, zeros(3, 4, 5))
_lists = {"x": [zeros(2, 4)] * 2, "weight": [zeros(4, 5)] * 2}
_split_k = {"x": [zeros(6, 4).t()], "weight": [zeros(6, 5)], "group_type": 2}
_tensor.but("group_type", group_type=None).but("group_type", group_type=1).but(
    "group_list_type", group_list_type=2
)
for _name in "output_dtype tuning_config x_dtype weight_dtype scale_dtype per_token_scale_dtype".split():
    _tensor.but(_name, **{_name: [1] if _name == "tuning_config" else 1})
_tensor.but("weight", x=[zeros(6, 4)] * 2).but("weight", **{**_split_k, "weight": [zeros(6, 5)] * 2})
_tensor.but("split_item", split_item=0).but("split_item", **_lists, group_type=-1, group_list=None)
_tensor.but("weight", weight=[zeros(3, 6, 5)])
_tensor.but("group_list", group_list=None)
_tensor.but("group_list", group_list=_ends.int()).but("group_list", group_list=_ends.view(3, 1))
_tensor.but("group_list", group_list=ints(2, 6)).but("group_list", group_list=ints(4, 2, 6))
_tensor.but("group_list", group_list=ints(2, 2, 5)).but("group_list", group_list=_ends, group_list_type=1)
_tensor.but("x", x=[zeros(4, 6).t()]).but("x", **{**_split_k, "x": [zeros(4, 6)]})
_tensor.but("bias", **_split_k, bias=[zeros(5)])

_host = case(
    "npu_grouped_matmul.List", x=[zeros(6, 4)], weight=[zeros(4, 5)] * 3, group_list=[2, 3, 6], split_item=3
)
_grouped(_host, zeros(4, 5))
_host.but("group_type", group_type=0).but("output_dtype", output_dtype=BF16)
_host.but("weight", weight=[zeros(1, 4, 5)] * 3)
_host.but("group_list", group_list=[6], weight=[zeros(4, 5)]).but("group_list", group_list=[3, 2, 6])
_host.but("group_list", group_list=None).but("group_list", group_list=[2, 6])
_host.but("x", x=[zeros(3, 4)] * 2).but("x", x=[zeros(6, 1, 4)]).but("group_list", group_list=[2, 3, 5])
_host.but("weight", weight=[zeros(6, 5)] * 3)

for _name in ("npu_grouped_matmul_add", "npu_grouped_matmul_add_"):
    _half = zeros(6, 4, dtype=BF16)
    case(_name, input=zeros(3, 4, 5), x=_half, weight=zeros(6, 5, dtype=BF16), group_list=_ends).but(
        "x", x=zeros(6, 4)
    ).but("x", x=zeros(6, 4, 1, dtype=BF16)).but("weight", weight=zeros(6, 5, dtype=FP16)).but(
        "weight", weight=zeros(6, 5, 1, dtype=BF16)
    ).but("weight", weight=zeros(5, 5, dtype=BF16)).but("x", x=full(6, 65536, dtype=BF16)).but(
        "weight", weight=full(6, 65536, dtype=BF16)
    ).but("transpose_x", transpose_x=False).but("transpose_weight", transpose_weight=True).but(
        "group_type", group_type=0
    ).but("group_list_type", group_list_type=2).but("group_list", group_list=_ends.int()).but(
        "group_list", group_list=_ends.view(3, 1)
    ).but("group_list", group_list=ints(6).expand(1025)).but("group_list", group_list=ints(4, 2, 6)).but(
        "group_list", group_list=ints(2, 3, 7)
    ).but("input", input=zeros(3, 4, 5, dtype=BF16)).but("input", input=zeros(2, 4, 5))

# --- ring attention ---

_ring_names = "prev_softmax_max prev_softmax_sum cur_softmax_max cur_softmax_sum".split()
_ring = case(
    "npu_ring_attention_update",
    prev_attn_out=zeros(4, 2, 64),
    cur_attn_out=zeros(4, 2, 64),
    **{_name: zeros(2, 2, 4, 8) for _name in _ring_names},
)
_variable = {_name: zeros(4, 2, 8) for _name in _ring_names}
_variable.update(input_layout="TND", actual_seq_qlen=ints(0, 1, 4))
_ring.but("input_layout", input_layout="BSH").but("input_softmax_layout", input_softmax_layout="BNSD")
_ring.but("prev_attn_out", prev_attn_out=zeros(4, 2, 64, dtype=FP64)).but(
    "prev_attn_out", prev_attn_out=zeros(4, 64)
)
_ring.but("cur_attn_out", cur_attn_out=zeros(4, 2, 32)).but(
    "cur_attn_out", cur_attn_out=zeros(4, 2, 64, dtype=BF16)
)
for _name in _ring_names:
    _ring.but(_name, **{_name: zeros(2, 2, 4, 8, dtype=BF16)})
for _name in _ring_names[1:]:
    _ring.but(_name, **{_name: zeros(2, 2, 4, 1)})
_ring.but("prev_softmax_max", **{_name: zeros(4, 2, 8) for _name in _ring_names})
_ring.but("prev_softmax_max", **{_name: zeros(2, 2, 4, 1) for _name in _ring_names})
_ring.but("prev_softmax_max", **{_name: zeros(2, 2, 5, 8) for _name in _ring_names})
_ring.but("prev_attn_out", **_variable, prev_attn_out=zeros(4, 2, 32), cur_attn_out=zeros(4, 2, 32))
_ring.but("actual_seq_qlen", **{**_variable, "actual_seq_qlen": None})
_ring.but("actual_seq_qlen", **{**_variable, "actual_seq_qlen": ints(0, 1, 4, dtype=torch.int32)})
_ring.but("actual_seq_qlen", **{**_variable, "actual_seq_qlen": ints(1, 4)})

# --- sparse attention ---

_latents, _rotated = zeros(1, 3, 2, 512, dtype=BF16), zeros(1, 3, 2, 64, dtype=BF16)
_kept, _kept_rotated = zeros(1, 4, 1, 512, dtype=BF16), zeros(1, 4, 1, 64, dtype=BF16)
_chosen = ints(0, -1, 0, 1, 2, 0, dtype=torch.int32).view(1, 3, 1, 2)
_rows_of_scores = zeros(1, 1, 3, 2)
for _name, _more in (
    ("npu_sparse_flash_attention", {}),
    (
        "npu_sparse_flash_attention_grad",
        {
            "d_out": _latents,
            "out": _latents,
            "softmax_max": _rows_of_scores,
            "softmax_sum": _rows_of_scores + 1,
        },
    ),
):
    case(
        _name,
        **{"query": _latents, "key": _kept, "value": _kept, "sparse_indices": _chosen, "scale_value": 1.0},
        **{"query_rope": _rotated, "key_rope": _kept_rotated, "sparse_block_size": 1, "attention_mode": 2},
        **_more,
    ).but("query", query=_latents.float()).but("key", key=_kept.half()).but(
        "query_rope", query_rope=_rotated.half()
    ).but("key_rope", key_rope=_kept_rotated.half()).but("value", value=None).but(
        "query_rope", query_rope=None
    ).but("key_rope", key_rope=None).but("value", value=_kept.half()).but("query", query=_latents[0]).but(
        "key", key=_kept[0]
    ).but("query_rope", query_rope=_rotated[0]).but("key_rope", key_rope=_kept_rotated[0]).but(
        "query", query=_latents[..., :256]
    ).but("query", query=zeros(1, 3, 3, 512, dtype=BF16)).but("key", key=zeros(1, 4, 2, 512, dtype=BF16)).but(
        "value", value=_kept[:, :3]
    ).but("query_rope", query_rope=_rotated[..., :32]).but("key_rope", key_rope=_kept_rotated[..., :32]).but(
        "sparse_indices", sparse_indices=_chosen.long()
    ).but("sparse_indices", sparse_indices=_chosen[0]).but(
        "sparse_indices", sparse_indices=_chosen[:, :2]
    ).but("sparse_indices", sparse_indices=_chosen + 9).but(
        "sparse_indices", sparse_indices=_chosen.flip(-1)
    ).but("sparse_block_size", sparse_block_size=2).but("sparse_mode", sparse_mode=1).but(
        "attention_mode", attention_mode=0
    )
CASES["npu_sparse_flash_attention"].but("block_table", block_table=ints(0)).but(
    "actual_seq_lengths_query", actual_seq_lengths_query=ints(3)
).but("actual_seq_lengths_kv", actual_seq_lengths_kv=ints(4)).but("layout_query", layout_query="TND").but(
    "layout_kv", layout_kv="TND"
).but("sinks", sinks=zeros(2))
CASES["npu_sparse_flash_attention_grad"].but("d_out", d_out=_rotated).but("out", out=_rotated).but(
    "softmax_max", softmax_max=_rows_of_scores.half()
).but("softmax_sum", softmax_sum=_rows_of_scores.half()).but(
    "softmax_max", softmax_max=zeros(1, 3, 1, 2), softmax_sum=zeros(1, 3, 1, 2)
).but("softmax_sum", softmax_sum=zeros(1, 3, 1, 2)).but("actual_seq_qlen", actual_seq_qlen=ints(3)).but(
    "actual_seq_kvlen", actual_seq_kvlen=ints(4)
).but("layout", layout="TND")

# --- flash attention ---


def _attention(attention: Case, before: str, after: str, ends: Callable[..., Any]) -> None:
    """Add what all versions forbid: names of the band's arguments, and how cumulative lengths are given."""
    q, bsh, tnd = zeros(2, 4, 6, 16), zeros(2, 6, 64), zeros(6, 4, 16)
    triple = lambda x: {"query": x, "key": x, "value": x}  # noqa: E731
    variable = {
        **triple(tnd),
        "input_layout": "TND",
        "actual_seq_qlen": ends(2, 6),
        "actual_seq_kvlen": ends(2, 6),
    }
    mask = zeros(6, 6, dtype=torch.bool)
    attention.but("input_layout", input_layout="BNDS").but("input_layout", input_layout="")
    attention.but("head_num", head_num=0).but("head_num", head_num=257)
    for name in ("query", "key", "value"):
        attention.but(name, **{name: q[0]}).but(name, **{name: q.unsqueeze(0)})
    attention.but("query", **triple(q.double())).but("key", key=q.half()).but("value", value=q.half())
    attention.but("head_num", head_num=2).but("head_num", **triple(bsh), input_layout="BSH", head_num=5)
    attention.but("key", key=q[:1]).but("key", value=zeros(2, 4, 5, 16)).but("key", value=zeros(2, 2, 6, 16))
    attention.but("key", key=zeros(2, 4, 6, 8), value=zeros(2, 4, 6, 8))
    attention.but("query", **triple(zeros(1, 4, 2, 769))).but("value", value=zeros(2, 4, 6, 24))
    attention.but("key", key=zeros(2, 3, 6, 16), value=zeros(2, 3, 6, 16))
    attention.but(
        "query", query=full(1, 1, (1 << 20) + 1, 8), key=full(1, 1, 2, 8), value=full(1, 1, 2, 8), head_num=1
    )
    attention.but("query", **triple(full((2 << 20) + 1, 1, 1, 8)), head_num=1)
    attention.but("keep_prob", keep_prob=0.0).but("keep_prob", keep_prob=1.1)
    attention.but("inner_precise", inner_precise=3)
    attention.but("softmax_layout", softmax_layout="SBH").but("softmax_layout", softmax_layout="TND")
    attention.but("padding_mask", padding_mask=mask)
    for name in ("actual_seq_qlen", "actual_seq_kvlen"):
        attention.but(name, **{**variable, name: None}).but(name, **{**variable, name: ends(*[6] * 2049)})
        attention.but(name, **{**variable, name: ends(4, 2)}).but(name, **{**variable, name: ends(2, 5)})
        attention.but(name, **{**variable, name: ends(2, 7)}).but(name, **{**variable, name: ends(7, 0)})
    attention.but("actual_seq_kvlen", **{**variable, "actual_seq_kvlen": ends(2, 4, 6)})
    attention.but("actual_seq_kvlen", **{**variable, "actual_seq_kvlen": ends(2, 0)})
    attention.but(
        "actual_seq_qlen", **{**variable, "actual_seq_qlen": ends(0, 0), "actual_seq_kvlen": ends(0, 0)}
    )
    attention.but("sparse_mode", sparse_mode=7, atten_mask=TRIANGLE).but("sparse_mode", sparse_mode=-1)
    attention.but("sparse_mode", **variable, sparse_mode=5, atten_mask=mask)
    attention.but("sparse_mode", **variable, sparse_mode=7, atten_mask=TRIANGLE)
    for mode in range(1, 5):
        attention.but("atten_mask", sparse_mode=mode)
    attention.but("atten_mask", atten_mask=mask.float())
    for shape in ((6, 5), (1, 6, 6), (2, 2, 6, 6), (1, 4, 6, 6), (2048, 2048)):
        attention.but("atten_mask", atten_mask=zeros(*shape, dtype=torch.bool))
    for mode in (2, 3, 4):
        attention.but("atten_mask", atten_mask=mask, sparse_mode=mode)
        attention.but("atten_mask", atten_mask=~TRIANGLE, sparse_mode=mode)
        attention.but("atten_mask", atten_mask=zeros(2048, 2048, dtype=torch.bool), sparse_mode=mode)
    attention.but("atten_mask", atten_mask=TRIANGLE, sparse_mode=6, prefix=[2, 2])
    attention.but("atten_mask", atten_mask=~PREFIX, sparse_mode=6, prefix=[2, 2])
    attention.but("atten_mask", **variable, atten_mask=mask)
    attention.but("atten_mask", **variable, atten_mask=torch.ones(4, 4, dtype=torch.bool))
    triangle = torch.ones(6, 6, dtype=torch.bool).triu_(1)
    attention.but(before, atten_mask=TRIANGLE, sparse_mode=4, **{before: -1, after: 0})
    attention.but(after, atten_mask=TRIANGLE, sparse_mode=4, **{before: 1, after: -2})
    attention.but(after, atten_mask=TRIANGLE, sparse_mode=4, **{before: 9, after: -6})
    attention.but(before, atten_mask=triangle, **{before: -6, after: 9})
    attention.but("atten_mask", atten_mask=mask, **{after: 0}).but(
        "atten_mask", atten_mask=triangle, **{before: 2, after: 0}
    )
    attention.but("prefix", atten_mask=PREFIX, sparse_mode=6)
    attention.but("prefix", atten_mask=PREFIX, sparse_mode=6, prefix=[2])
    attention.but("prefix", atten_mask=PREFIX, sparse_mode=6, prefix=[2, 7])
    attention.but("prefix", atten_mask=PREFIX, sparse_mode=6, prefix=[2, -1])
    attention.but("atten_mask", atten_mask=zeros(2, 1, 6, 6, dtype=torch.bool), sparse_mode=5, prefix=[2, 3])
    attention.but("pse", pse=zeros(2, 4, 6, 6, dtype=BF16)).but("pse", pse=zeros(2, 1, 6, 6))
    attention.but("pse", **variable, pse=zeros(2, 4, 6, 6))
    long = {**triple(full(1, 1, 1025, 8)), "head_num": 1}
    attention.but("pse", **long, pse=full(1, 1, 1024, 1025))
    attention.but("sink", sink=zeros(4, dtype=BF16)).but("sink", sink=zeros(5))


def _band_names(version: str) -> tuple[str, str]:
    return ("pre_tokens", "next_tokens") if version == "_v2" else ("pre_tockens", "next_tockens")


for _version in ("", "_v2", "_v3"):
    _q = zeros(2, 4, 6, 16)
    _call = {"query": _q, "key": _q, "value": _q, "head_num": 4, "input_layout": "BNSD"}
    _saved = {
        "dy": _q,
        "softmax_max": zeros(2, 4, 6, 8),
        "softmax_sum": zeros(2, 4, 6, 8),
        "attention_in": _q,
    }
    _forward = case(f"npu_fusion_attention{_version}", **_call)
    _backward = case(f"npu_fusion_attention_grad{_version}", **_call, **_saved)
    for _each in (_forward, _backward):
        _attention(_each, *_band_names(_version), ints if _version == "_v3" else lambda *ends: list(ends))
        if _version == "_v2":
            _each.but("query_rope", query_rope=_q).but("key_rope", key_rope=_q)
            _each.but("q_start_idx", q_start_idx=[0]).but("kv_start_idx", kv_start_idx=[0])
            _each.but("pse_type", pse_type=4).but("pse_type", pse_type=2)
            _short = zeros(2, 4, 5, 16)
            _each.but("sparse_mode", key=_short, value=_short, atten_mask=TRIANGLE, sparse_mode=3)
    if _version != "_v3":
        _forward.but("dropout_mask", dropout_mask=zeros(36)).but(
            "dropout_mask", dropout_mask=zeros(35, dtype=torch.uint8)
        )
    for _name in ("softmax_max", "softmax_sum"):
        _backward.but(_name, **{_name: None}).but(_name, **{_name: zeros(2, 4, 6, 8, dtype=BF16)})
        _backward.but(_name, **{_name: zeros(2, 4, 6, 1)})
    _backward.but("attention_in", attention_in=None).but("dy", dy=_q.half()).but(
        "attention_in", attention_in=_q[:1]
    )
    _backward.but("attention_in", attention_in=_q.half())


def _communicating(operation: str, first: str, **given: Any) -> Case:
    """Start the cases of a product of ``first`` ``[4, 256]`` that communicates."""
    ours = {first: zeros(4, 256, dtype=BF16), "x2": zeros(256, 8, dtype=BF16), "hcom": "group_name_0"}
    started = case(operation, **ours, **given)
    started.but(first, **{first: zeros(4, 256)}).but(first, **{first: zeros(4, dtype=BF16)})
    started.but(first, **{first: zeros(256, 4, dtype=BF16).t()}).but("comm_turn", comm_turn=1)
    started.but("x2", x2=zeros(256, 8)).but("x2", x2=zeros(256, dtype=BF16))
    return started.but("x2", x2=zeros(257, 8, dtype=BF16))


for _name in ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"):
    _product = _communicating(_name, "input", world_size=2)
    _product.but("input", input=zeros(4, 255, dtype=BF16)).but("world_size", world_size=3)
    _product.but("bias", bias=torch.ones(8, dtype=BF16)).but("comm_mode", comm_mode="other")
    for _scale in ("x1_scale", "x2_scale"):
        _product.but(_scale, **{_scale: zeros(4, 1)})
    _product.but("output_dtype", output_dtype=BF16)
CASES["npu_all_gather_base_mm"].but("gather_index", gather_index=1)
CASES["npu_mm_reduce_scatter_base"].but("reduce_op", reduce_op="max").but(
    "input", input=zeros(3, 256, dtype=BF16)
)
_product = _communicating("npu_mm_all_reduce_base", "x1").but("reduce_op", reduce_op="max")
_product.but("x1", x1=zeros(0, 256, dtype=BF16))
for _name in "bias antiquant_scale antiquant_offset x3 dequant_scale pertoken_scale".split():
    _product.but(_name, **{_name: zeros(8)})
for _name in ("comm_quant_scale_1", "comm_quant_scale_2"):
    _product.but(_name, **{_name: zeros(8)})
for _name in "y_dtype x1_dtype x2_dtype dequant_scale_dtype pertoken_scale_dtype".split():
    _product.but(_name, **{_name: 1})
_product.but("group_sizes", group_sizes=[1])
