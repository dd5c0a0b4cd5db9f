"""What Ascend's documentation allows each operation to be given, one table per operation.

Each table names its sources: "wheel" is ``torch_npu/_op_plugin_docs.py`` of torch_npu 2.13.0, "op-plugin" its
open source (Ascend/op-plugin, ``op_plugin/ops``), "aclnn" CANN's API reference. Where they contradict each
other ``notes`` says what counts. Only Atlas A2 and A3 training products are meant.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch

from megatron_npu.sim.kernels import attention_limits
from megatron_npu.sim.kernels.checker import (
    Limit,
    Limits,
    absent,
    between,
    dimensions,
    dtype,
    dtype_of,
    not_simulated,
    one_of,
    required,
    shape_of,
)

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
HALVES = (torch.float16, torch.bfloat16)
SOFTMAX_SIDE = (32, 4096)  # of the last two dimensions of npu_scaled_masked_softmax, in steps of 32
ROTARY_SIZE = 896  # d must be smaller
ROTARY_COUNT = 1000  # b and n must be smaller, in mode interleave b · n
ROTARY_GRADIENT_COUNT = 1024  # b · n at most, where cos or sin need a gradient
LAST_EXACT_COUNT = 16777215  # 2^24 - 1, up to where fp32 counts exactly: the device sorts floats
TOPK = 512
GROUPS = 1024  # of a group_list tensor
TENSORS = 128  # of a list of tensors
INNER_AXIS = 65536  # the last dimension of x and weight must be smaller
CROSS_ENTROPY_ROWS = 200000

# torch's ScalarType numbers, which npu_dtype_cast takes instead of a dtype. torch_npu's own dtypes (int4,
# hifloat8, float4) have numbers of 285 and more and are not simulated.
SCALAR_TYPES = {
    0: torch.uint8,
    1: torch.int8,
    2: torch.int16,
    3: torch.int32,
    4: torch.int64,
    5: torch.float16,
    6: torch.float32,
    11: torch.bool,
    15: torch.bfloat16,
}


def _gamma_ends_input(argument: str, of: str = "input") -> Limit:
    return Limit(
        argument,
        f"the last dimensions of {of}, fewer than all",
        lambda a: (
            0 < a.gamma.dim() < getattr(a, of).dim()
            and getattr(a, of).shape[-a.gamma.dim() :] == a.gamma.shape
        ),
    )


def _broadcastable(shape: torch.Size, target: torch.Size) -> bool:
    padded = (1,) * (len(target) - len(shape)) + tuple(shape)
    return len(padded) == len(target) and all(a in (1, b) for a, b in zip(padded, target, strict=True))


RMS_NORM = Limits(
    "wheel, npu_rms_norm; aclnnRmsNorm",
    (
        dtype("input", *FLOATS),
        dimensions("input", 2, 8),
        dtype_of("gamma", "input"),
        _gamma_ends_input("gamma"),
    ),
    "The wheel says that gamma has 2 to 8 dimensions and shows one; aclnnRmsNorm says 1 to 8. op-plugin's "
    "tests for Atlas A2 also give a float32 gamma to float16; the wheel's equal dtypes count.",
)

RMS_NORM_BACKWARD = Limits(
    "wheel, npu_rms_norm; aclnnRmsNormGrad",
    (
        *RMS_NORM.limits,
        shape_of("dy", "input"),
        dtype_of("dy", "input"),
        dtype("rstd", torch.float32),
    ),
)

ADD_RMS_NORM = Limits(
    "wheel, npu_add_rms_norm_cast and npu_rms_norm; aclnnAddRmsNorm",
    (
        dtype("x1", *FLOATS),
        dimensions("x1", 1, 8),
        dtype_of("x2", "x1"),
        shape_of("x2", "x1"),
        dtype_of("gamma", "x1"),
        _gamma_ends_input("gamma", "x1"),
    ),
)


def _softmax_sides(argument: str) -> Limit:
    least, most = SOFTMAX_SIDE
    return Limit(
        argument,
        f"last two dimensions from {least} to {most} and divisible by {least}",
        lambda a: all(
            least <= side <= most and side % least == 0 for side in getattr(a, argument).shape[-2:]
        ),
    )


def _softmax(argument: str) -> tuple[Limit, ...]:
    return (
        dtype(argument, *FLOATS),
        dimensions(argument, 4),
        _softmax_sides(argument),
        dtype("mask", torch.bool),
        Limit(
            "mask",
            f"a shape that broadcasts to that of {argument}",
            lambda a: _broadcastable(a.mask.shape, getattr(a, argument).shape),
        ),
    )


SCALED_MASKED_SOFTMAX = Limits("wheel, npu_scaled_masked_softmax", _softmax("x"))
SCALED_MASKED_SOFTMAX_BACKWARD = Limits(
    SCALED_MASKED_SOFTMAX.source, (*_softmax("y"), shape_of("y_grad", "y"), dtype_of("y_grad", "y"))
)

SWIGLU_INPUT = (
    dtype("input", *FLOATS),
    dimensions("input", 1, 8),
    Limit("dim", "a dimension of input", lambda a: -a.input.dim() <= a.dim < a.input.dim()),
    Limit("dim", "a dimension of even size", lambda a: a.input.size(a.dim) % 2 == 0),
)


def _elementwise(source: str, *dtypes: torch.dtype) -> Limits:
    return Limits(source, (dtype("input", *dtypes), dimensions("input", 0, 8)))


def _elementwise_backward(table: Limits, grad: str) -> Limits:
    return Limits(table.source, (*table.limits, shape_of(grad, "input"), dtype_of(grad, "input")))


FAST_GELU = _elementwise("wheel, npu_fast_gelu", *FLOATS)
GELU = Limits("aclnnGelu, aclnnGeluV2", (*FAST_GELU.limits, one_of("approximate", "none", "tanh")))
SILU = _elementwise("wheel, npu_silu; aclnnSilu", *FLOATS)


def _rotary_layouts(a: SimpleNamespace) -> list[tuple[int, int]]:
    """Return (b, n) of input in each layout that it may have by the shape of cos.

    Dimensions of size 1 leave several: ``[s, 1, n, d]`` with cos ``[s, 1, 1, d]`` may be SBND or BSND.
    """
    fitting = []
    for batch, heads, sequence in ((0, 1, 2), (0, 2, 1), (1, 2, 0)):  # BNSD, BSND, SBND
        x, cos = a.input.shape, a.r1.shape
        shared = cos[batch] == 1 and cos[heads] == 1
        per_batch = cos[batch] == x[batch] and cos[heads] in (1, x[heads])
        if cos[sequence] == x[sequence] and (shared or (a.rotary_mode == "half" and per_batch)):
            fitting.append((x[batch], x[heads]))
    return fitting


def _rotary_count(a: SimpleNamespace) -> bool:
    if a.rotary_mode == "interleave":
        return any(batch * heads < ROTARY_COUNT for batch, heads in _rotary_layouts(a))
    return any(max(pair) < ROTARY_COUNT for pair in _rotary_layouts(a))


ROTARY_MUL_INPUT = (
    dtype("input", *FLOATS),
    dimensions("input", 4),
    Limit(
        "input",
        f"a last dimension below {ROTARY_SIZE} and even",
        lambda a: 0 < a.input.size(-1) < ROTARY_SIZE and a.input.size(-1) % 2 == 0,
    ),
    one_of("rotary_mode", "half", "interleave"),
    dtype("r1", *FLOATS),
    dimensions("r1", 4),
    Limit("r1", "the last dimension of input", lambda a: a.r1.size(-1) == a.input.size(-1)),
    Limit(
        "r1",
        "11SD, or in mode half B1SD or BNSD, in the layout of input (BNSD, BSND or SBND)",
        lambda a: bool(_rotary_layouts(a)),
    ),
    dtype("r2", *FLOATS),
    shape_of("r2", "r1"),
    Limit(
        "input", f"b and n below {ROTARY_COUNT}, in mode interleave b · n below {ROTARY_COUNT}", _rotary_count
    ),
)

ROTARY_MUL = Limits(
    "wheel, npu_rotary_mul, jit_compile=False",
    (
        *ROTARY_MUL_INPUT,
        dtype("rotate", *FLOATS),
        Limit(
            "rotate",
            "a square matrix of the last dimension of input",
            lambda a: tuple(a.rotate.shape) == (a.input.size(-1),) * 2,
        ),
    ),
    "cos and sin outside [-1, 1] are documented as out of range; their values are not checked.",
)
ROTARY_MUL_BACKWARD = Limits(
    ROTARY_MUL.source,
    (*ROTARY_MUL_INPUT, shape_of("grad", "input")),
    f"Not checked: b · n at most {ROTARY_GRADIENT_COUNT} where cos or sin need a gradient.",
)


def _same_but_heads(argument: str) -> Limit:
    def holds(a: SimpleNamespace) -> bool:
        shape = list(getattr(a, argument).shape)
        expected = list(a.query.shape)
        expected[-2] = 1 if argument in ("cos", "sin") else shape[-2]
        return shape == expected

    allowed = (
        "the shape of query with one head"
        if argument in ("cos", "sin")
        else "the shape of query but for heads"
    )
    return Limit(argument, allowed, holds)


APPLY_ROTARY_POS_EMB = Limits(
    "wheel, npu_apply_rotary_pos_emb, Atlas A2 and A3",
    (
        one_of("layout", "BSND", "TND"),
        one_of("rotary_mode", "half"),
        dtype("query", *FLOATS),
        Limit(
            "query",
            "4 dimensions in layout BSND, 3 in TND",
            lambda a: a.query.dim() == (4 if a.layout == "BSND" else 3),
        ),
        Limit("query", "a last dimension of 64 or 128", lambda a: a.query.size(-1) in (64, 128)),
        Limit("query", "at least one element", lambda a: a.query.numel() > 0),
        *(dtype_of(name, "query") for name in ("key", "cos", "sin")),
        *(_same_but_heads(name) for name in ("key", "cos", "sin")),
    ),
)

APPLY_ADAM_W = Limits(
    "wheel, npu_apply_adam_w",
    (
        Limit("out", "three tensors: var, m, v", lambda a: len(a.out) == 3),
        dtype("out", *FLOATS),
        dimensions("out", 1, 8),
        Limit("out", "one dtype", lambda a: len({t.dtype for t in a.out}) == 1),
        Limit("out", "one shape", lambda a: len({t.shape for t in a.out}) == 1),
        dtype_of("grad", "out"),
        Limit("grad", "the shape of var", lambda a: a.grad.shape == a.out[0].shape),
        not_simulated("amsgrad", False),
    ),
    "amsgrad: the documents disagree on where the largest second moment is kept, and op-plugin's source says "
    "that the operation of Atlas A2 takes only False.",
)

FLOAT_STATUS = Limits(
    "wheel, npu_get_float_status; op-plugin, FloatStatusKernelNpu.cpp", (one_of("mode", 0, 1),)
)

CONFUSION_TRANSPOSE_DTYPES = (
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
)
CONFUSION_TRANSPOSE = Limits(
    "wheel, npu_confusion_transpose",
    (
        dtype("input", *CONFUSION_TRANSPOSE_DTYPES),
        Limit(
            "perm",
            "a permutation of the dimensions that are transposed",
            lambda a: sorted(a.perm) == list(range(a.input.dim() if a.transpose_first else len(a.shape))),
        ),
        Limit(
            "shape",
            "as many elements as input",
            lambda a: torch.Size(a.shape).numel() == a.input.numel(),
        ),
    ),
    "bfloat16 is not in the wheel's list, which is older than the dtype on this device; it is allowed.",
)

DTYPE_CAST = Limits(
    "wheel, npu_dtype_cast; op-plugin, meta registrations",
    (one_of("dtype", *SCALAR_TYPES), not_simulated("input_dtype")),
)
DTYPE_CAST_BACKWARD = Limits(
    DTYPE_CAST.source, (one_of("grad_dtype", *SCALAR_TYPES), not_simulated("input_dtype"))
)
FORMAT_CAST = Limits(
    "wheel, npu_format_cast", (not_simulated("customize_dtype"), not_simulated("input_dtype"))
)

LINEAR = Limits(
    "wheel, npu_linear",
    (
        dtype("input", torch.float32, *HALVES),
        dimensions("input", 2),
        dtype_of("weight", "input"),
        dimensions("weight", 2),
        Limit("weight", "[n, k] for input [m, k]", lambda a: a.weight.size(1) == a.input.size(1)),
    ),
    "The wheel lists float32, float16, int32 and int8; integers are not simulated.",
)

CROSS_ENTROPY_ARGUMENTS = (
    dtype("target", torch.int64),
    dimensions("target", 1),
    dtype("weight", torch.float32),
    one_of("reduction", "mean", "sum", "none"),
    Limit("lse_square_scale_for_zloss", "0.0", lambda a: a.lse_square_scale_for_zloss == 0.0),
)
CROSS_ENTROPY_LOSS = Limits(
    "wheel, npu_cross_entropy_loss",
    (
        dtype("input", *FLOATS),
        dimensions("input", 2),
        Limit(
            "input",
            f"[n, c] with n from 1 to {CROSS_ENTROPY_ROWS} and c above 0",
            lambda a: 0 < a.input.size(0) <= CROSS_ENTROPY_ROWS and a.input.size(1) > 0,
        ),
        *CROSS_ENTROPY_ARGUMENTS,
        Limit("target", "[n] for input [n, c]", lambda a: a.target.size(0) == a.input.size(0)),
        Limit(
            "target",
            "classes from 0 to c - 1",
            lambda a: bool(((a.target >= 0) & (a.target < a.input.size(1))).all()),
        ),
        Limit("weight", "[c] for input [n, c]", lambda a: a.weight.shape == a.input.shape[1:]),
        Limit(
            "weight", "values above 0 and up to 1", lambda a: bool(((a.weight > 0) & (a.weight <= 1)).all())
        ),
        Limit("ignore_index", "below c for input [n, c]", lambda a: a.ignore_index < a.input.size(1)),
        Limit("label_smoothing", "0.0 up to below 1.0", lambda a: 0.0 <= a.label_smoothing < 1.0),
        one_of("return_zloss", False),
    ),
    "A negative ignore_index ignores nothing; torch's -100 targets are outside the allowed classes.",
)
CROSS_ENTROPY_LOSS_BACKWARD = Limits(
    "wheel, npu_cross_entropy_loss, constraints on input.requires_grad",
    (
        *CROSS_ENTROPY_ARGUMENTS,
        Limit("label_smoothing", "0.0 where a gradient is needed", lambda a: a.label_smoothing == 0.0),
        Limit(
            "weight",
            "None where a gradient of the mean is needed",
            lambda a: a.reduction != "mean",
        ),
        Limit(
            "ignore_index",
            "-100 where a gradient of the mean is needed",
            lambda a: a.reduction != "mean" or a.ignore_index == -100,
        ),
    ),
)

PERMUTED_INDICES = (
    dtype("sorted_indices", torch.int32),
    dimensions("sorted_indices", 1),
    one_of("padded_mode", False),
)
MOE_TOKEN_PERMUTE = Limits(
    "wheel, npu_moe_token_permute",
    (
        dtype("tokens", *FLOATS),
        dimensions("tokens", 2),
        dtype("indices", torch.int32, torch.int64),
        dimensions("indices", 1, 2),
        Limit("indices", "one row per token", lambda a: a.indices.size(0) == a.tokens.size(0)),
        Limit(
            "indices",
            f"at most {TOPK} experts per token",
            lambda a: a.indices.dim() == 1 or a.indices.size(1) <= TOPK,
        ),
        Limit(
            "indices",
            f"fewer than {LAST_EXACT_COUNT} elements, from 0 to below {LAST_EXACT_COUNT}",
            lambda a: (
                a.indices.numel() < LAST_EXACT_COUNT
                and bool(((a.indices >= 0) & (a.indices < LAST_EXACT_COUNT)).all())
            ),
        ),
        Limit(
            "num_out_tokens",
            "not below minus the number of copies",
            lambda a: a.num_out_tokens >= -a.indices.numel(),
        ),
        one_of("padded_mode", False),
    ),
)
MOE_TOKEN_PERMUTE_GRAD = Limits(
    MOE_TOKEN_PERMUTE.source,
    (dtype("grad_permuted_tokens", *FLOATS), dimensions("grad_permuted_tokens", 2), *PERMUTED_INDICES),
)
MOE_TOKEN_UNPERMUTE = Limits(
    "wheel, npu_moe_token_unpermute",
    (
        dtype("permuted_tokens", *FLOATS),
        dimensions("permuted_tokens", 2),
        *PERMUTED_INDICES,
        absent("restore_shape"),
        dtype("probs", *FLOATS),
        dimensions("probs", 2),
        Limit("probs", f"[tokens, topk] with topk up to {TOPK}", lambda a: 0 < a.probs.size(1) <= TOPK),
        Limit(
            "probs",
            "as many elements as sorted_indices",
            lambda a: a.probs.numel() == a.sorted_indices.numel(),
        ),
        Limit(
            "sorted_indices",
            "no position twice, from 0 to their number - 1",
            lambda a: torch.equal(
                a.sorted_indices.sort().values, torch.arange(len(a.sorted_indices), dtype=torch.int32)
            ),
        ),
    ),
)
MOE_TOKEN_UNPERMUTE_GRAD = Limits(
    MOE_TOKEN_UNPERMUTE.source,
    (
        dtype("grad_unpermuted_tokens", *FLOATS),
        dimensions("grad_unpermuted_tokens", 2),
        *PERMUTED_INDICES,
        absent("restore_shape"),
        dtype("probs", *FLOATS),
        dimensions("probs", 2),
    ),
)


def _probabilities_dtype(tokens: str) -> Limit:
    return Limit(
        "probs",
        f"the dtype of {tokens}, or float32 with bfloat16",
        lambda a: (
            a.probs.dtype == getattr(a, tokens).dtype
            or (getattr(a, tokens).dtype, a.probs.dtype) == (torch.bfloat16, torch.float32)
        ),
    )


def _copies(a: SimpleNamespace) -> int:
    """Return how many experts the number of output tokens gives each token."""
    tokens = a.tokens.size(0)
    return (tokens if a.num_out_tokens is None else a.num_out_tokens) // max(1, tokens)


ROUTING_MAP = (
    dtype("routing_map", torch.int8, torch.bool),
    dimensions("routing_map", 2),
    Limit(
        "routing_map",
        "only 0 and 1",
        lambda a: a.routing_map.dtype == torch.bool or bool(((a.routing_map | 1) == 1).all()),
    ),
)
MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP = Limits(
    "wheel, npu_moe_token_permute_with_routing_map",
    (
        dtype("tokens", *FLOATS),
        dimensions("tokens", 2),
        *ROUTING_MAP,
        Limit("routing_map", "one row per token", lambda a: a.routing_map.size(0) == a.tokens.size(0)),
        _probabilities_dtype("tokens"),
        Limit("probs", "the shape of routing_map", lambda a: a.probs.shape == a.routing_map.shape),
        not_simulated("drop_and_pad", False),
        Limit(
            "num_out_tokens",
            "0 to tokens · experts",
            lambda a: 0 <= a.num_out_tokens <= a.routing_map.numel(),
        ),
        Limit(
            "routing_map",
            f"num_out_tokens // tokens ones in every row, fewer than {TOPK}",
            lambda a: _copies(a) < TOPK and bool((a.routing_map.bool().sum(1) == _copies(a)).all()),
        ),
    ),
)
MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP_GRAD = Limits(
    MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP.source,
    (
        dtype("permuted_token_out_grad", *FLOATS),
        dimensions("permuted_token_out_grad", 2),
        dtype("sorted_indices", torch.int32),
        *ROUTING_MAP,
        not_simulated("drop_and_pad", False),
    ),
)
MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP = Limits(
    "wheel, npu_moe_token_unpermute_with_routing_map",
    (
        dtype("permuted_tokens", *FLOATS),
        dimensions("permuted_tokens", 2),
        dtype("sorted_indices", torch.int32),
        dimensions("sorted_indices", 1),
        Limit(
            "restore_shape",
            "[tokens, hidden size]",
            lambda a: len(a.restore_shape) == 2 and a.restore_shape[1] == a.permuted_tokens.size(1),
        ),
        Limit(
            "sorted_indices",
            f"as many for each token, at most {TOPK}",
            lambda a: (
                len(a.sorted_indices) % max(1, a.restore_shape[0]) == 0
                and len(a.sorted_indices) <= TOPK * a.restore_shape[0]
            ),
        ),
        _probabilities_dtype("permuted_tokens"),
        Limit(
            "routing_map",
            "a value exactly when probs is given",
            lambda a: (a.routing_map is None) == (a.probs is None),
            even_none=True,
        ),
        *ROUTING_MAP,
        Limit("probs", "the shape of routing_map", lambda a: a.probs.shape == a.routing_map.shape),
        not_simulated("drop_and_pad", False),
        Limit(
            "routing_map",
            "as many ones as sorted_indices has elements, equally many in every row",
            lambda a: (
                int(a.routing_map.bool().sum()) == len(a.sorted_indices)
                and len(set(a.routing_map.bool().sum(1).tolist())) <= 1
            ),
        ),
    ),
)
MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP_GRAD = Limits(
    MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP.source,
    (
        dtype("unpermuted_tokens_grad", *FLOATS),
        dimensions("unpermuted_tokens_grad", 2),
        not_simulated("drop_and_pad", False),
    ),
)

# Which dtype a bias has, by that of x (wheel, npu_grouped_matmul, table 1, without quantisation).
GROUPED_BIAS = {
    torch.float16: torch.float16,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
}
GROUPED_UNUSED = (
    "offset",
    "activation_input",
    "activation_quant_scale",
    "activation_quant_offset",
)
GROUPED_QUANTISED = ("scale", "antiquant_scale", "antiquant_offset", "per_token_scale")
GROUPED_TENSORS = (
    Limit("x", f"1 to {TENSORS} tensors", lambda a: 1 <= len(a.x) <= TENSORS),
    Limit("weight", f"1 to {TENSORS} tensors", lambda a: 1 <= len(a.weight) <= TENSORS),
    dtype("x", *FLOATS),
    Limit("x", "one dtype", lambda a: len({t.dtype for t in a.x}) == 1),
    dtype_of("weight", "x"),
    dimensions("x", 2, 6),
    dimensions("weight", 2, 3),
    Limit("x", f"last dimensions below {INNER_AXIS}", lambda a: max(t.size(-1) for t in a.x) < INNER_AXIS),
    Limit(
        "weight",
        f"last dimensions below {INNER_AXIS}",
        lambda a: max(t.size(-1) for t in a.weight) < INNER_AXIS,
    ),
    *(absent(name) for name in GROUPED_UNUSED),
    *(not_simulated(name) for name in GROUPED_QUANTISED),
    one_of("split_item", 0, 1, 2, 3),
    one_of("act_type", 0),
    Limit(
        "bias",
        "float16 with float16, float32 with bfloat16 and float32",
        lambda a: all(t.dtype == GROUPED_BIAS[a.x[0].dtype] for t in a.bias),
    ),
    Limit("bias", "as many tensors as weight", lambda a: len(a.bias) == len(a.weight)),
)


def _ends(a: SimpleNamespace) -> list[int]:
    sizes = a.group_list.cumsum(0) if a.group_list_type == 1 else a.group_list
    return [int(end) for end in sizes]


def _not_decreasing(values: list[int]) -> bool:
    return all(first <= second for first, second in zip([0, *values], values, strict=False))


def _group_count(a: SimpleNamespace) -> bool:
    if a.group_type == -1:
        return len(a.x) == len(a.weight)
    if a.group_type == 2 or a.weight[0].dim() == 3:
        return len(a.weight) == 1 and len(a.x) == 1
    return len(a.x) in (1, len(a.weight))


def _inner_sizes(a: SimpleNamespace) -> bool:
    if a.group_type == 2:
        return a.x[0].size(1) == a.weight[0].size(0)
    sizes = [w.size(-2) for w in a.weight]
    return all(t.size(-1) in sizes for t in a.x) and len(a.x) in (1, len(sizes))


GROUPED_MATMUL = Limits(
    "wheel, npu_grouped_matmul, group_list a tensor; op-plugin, GroupedMatmulKernelNpuOpApi.cpp",
    (
        *GROUPED_TENSORS,
        required("group_type"),
        one_of("group_type", -1, 0, 2),
        one_of("group_list_type", 0, 1),
        *(not_simulated(name) for name in ("output_dtype", "tuning_config")),
        *(not_simulated(f"{name}_dtype") for name in ("x", "weight", "scale", "per_token_scale")),
        Limit(
            "weight",
            "as many as x with group_type -1; one [e, k, n], or [k, n] each, with 0; one with 2",
            _group_count,
        ),
        Limit(
            "split_item",
            "0 or 1 with group_type -1, else 2 or 3",
            lambda a: (a.split_item in (0, 1)) == (a.group_type == -1),
        ),
        Limit("weight", "the inner dimension of x", _inner_sizes),
        Limit(
            "group_list",
            "None with group_type -1, a tensor for one x with 0 and 2",
            lambda a: (a.group_list is None) == (a.group_type == -1) or len(a.x) > 1,
            even_none=True,
        ),
        dtype("group_list", torch.int64),
        dimensions("group_list", 1),
        Limit(
            "group_list",
            f"one entry per weight, up to {GROUPS} (up to {TENSORS} for a list of weights)",
            lambda a: (
                1 <= len(a.group_list) <= GROUPS
                and (
                    a.group_type == 2
                    or len(a.group_list) == (a.weight[0].size(0) if a.weight[0].dim() == 3 else len(a.weight))
                )
            ),
        ),
        Limit(
            "group_list",
            "no negative sizes, cumulative ends not falling",
            lambda a: _not_decreasing(_ends(a)),
        ),
        Limit(
            "group_list",
            "the whole of the divided axis: rows of x with group_type 0, k with 2",
            lambda a: _ends(a)[-1] == (a.x[0].size(1) if a.group_type == 2 else sum(t.size(0) for t in a.x)),
        ),
        Limit(
            "x",
            "a transposed view of [k, m] with group_type 2, else contiguous rows",
            lambda a: (
                all(t.stride(-1) == 1 or t.size(-1) == 1 for t in a.x)
                if a.group_type != 2
                else a.x[0].stride(0) == 1 or a.x[0].size(0) == 1
            ),
        ),
        Limit("bias", "None with group_type 2", lambda a: a.group_type != 2),
    ),
    "The wheel allows group_type -1 and 0 on Atlas A2; op-plugin's source and aclnnGroupedMatmul also take "
    "2, which training needs for the gradient of the weights.",
)

GROUPED_MATMUL_LIST = Limits(
    "wheel, npu_grouped_matmul, group_list a list of int",
    (
        *GROUPED_TENSORS,
        absent("group_type"),
        not_simulated("output_dtype"),
        dimensions("weight", 2),
        Limit(
            "group_list",
            "at least two ends, none negative, rising",
            lambda a: len(a.group_list) != 1 and _not_decreasing(list(a.group_list)),
        ),
        Limit(
            "group_list",
            "a value where one x meets several weights",
            lambda a: a.group_list is not None or len(a.x) == len(a.weight),
            even_none=True,
        ),
        Limit("group_list", "one entry per weight", lambda a: len(a.group_list) == len(a.weight)),
        Limit("x", "one tensor, or as many as weight", lambda a: len(a.x) in (1, len(a.weight))),
        Limit(
            "x",
            "2 dimensions with a group_list or with split_item 2 or 3",
            lambda a: all(t.dim() == 2 for t in a.x) or (a.group_list is None and a.split_item in (0, 1)),
        ),
        Limit(
            "group_list",
            "the rows of x",
            lambda a: a.group_list[-1] == sum(t.size(0) for t in a.x),
        ),
        Limit(
            "weight",
            "the inner dimension of x",
            lambda a: all(t.size(-1) in [w.size(0) for w in a.weight] for t in a.x),
        ),
    ),
)

GROUPED_MATMUL_ADD = Limits(
    "wheel, npu_grouped_matmul_add",
    (
        dtype("x", *HALVES),
        dimensions("x", 2),
        dtype_of("weight", "x"),
        dimensions("weight", 2),
        Limit("weight", "the rows of x", lambda a: a.weight.size(0) == a.x.size(0)),
        Limit("x", f"a last dimension below {INNER_AXIS}", lambda a: a.x.size(1) < INNER_AXIS),
        Limit("weight", f"a last dimension below {INNER_AXIS}", lambda a: a.weight.size(1) < INNER_AXIS),
        one_of("transpose_x", True),
        one_of("transpose_weight", False),
        one_of("group_type", 2),
        one_of("group_list_type", 0, 1),
        dtype("group_list", torch.int64),
        dimensions("group_list", 1),
        Limit("group_list", f"up to {GROUPS} groups", lambda a: 1 <= len(a.group_list) <= GROUPS),
        Limit(
            "group_list",
            "no negative sizes, cumulative ends not falling",
            lambda a: _not_decreasing(_ends(a)),
        ),
        Limit("group_list", "at most the rows of x", lambda a: _ends(a)[-1] <= a.x.size(0)),
        dtype("input", torch.float32),
        Limit(
            "input",
            "[groups, m, n] for x [k, m] and weight [k, n]",
            lambda a: tuple(a.input.shape) == (len(a.group_list), a.x.size(1), a.weight.size(1)),
        ),
    ),
    "op-plugin's operation without underscore also changes its input; here it does not.",
)

STATISTICS = ("prev_softmax_max", "prev_softmax_sum", "cur_softmax_max", "cur_softmax_sum")


def _statistics_shape(a: SimpleNamespace) -> bool:
    statistics, attention = a.prev_softmax_max.shape, a.prev_attn_out.shape
    if a.input_layout == "SBH":
        fits = statistics[0] == attention[1] and statistics[2] == attention[0]
        return fits and attention[2] % statistics[1] == 0
    return tuple(statistics[:2]) == tuple(attention[:2])


def _ring_lengths(a: SimpleNamespace) -> bool:
    if a.input_layout == "SBH":
        return True
    ends = a.actual_seq_qlen.tolist()
    starts = ends[0] == 0 or a.input_softmax_layout == "TND"
    return starts and ends[-1] == a.prev_attn_out.size(0) and _not_decreasing(ends)


RING_ATTENTION_UPDATE = Limits(
    "wheel, npu_ring_attention_update; op-plugin, RingAttentionUpdateKernelNpuOpApi.cpp; aclnn",
    (
        one_of("input_layout", "SBH", "TND"),
        one_of("input_softmax_layout", "", "SBH", "TND"),
        dtype("prev_attn_out", *FLOATS),
        dimensions("prev_attn_out", 3),
        shape_of("cur_attn_out", "prev_attn_out"),
        dtype_of("cur_attn_out", "prev_attn_out"),
        *(dtype(name, torch.float32) for name in STATISTICS),
        *(shape_of(name, "prev_softmax_max") for name in STATISTICS[1:]),
        Limit(
            "prev_softmax_max",
            "4 dimensions in layout SBH, 3 in TND",
            lambda a: a.prev_softmax_max.dim() == (4 if a.input_layout == "SBH" else 3),
        ),
        Limit("prev_softmax_max", "a last dimension of 8", lambda a: a.prev_softmax_max.size(-1) == 8),
        Limit("prev_softmax_max", "[b, n, s, 8] for [s, b, h], [t, n, 8] for [t, n, d]", _statistics_shape),
        Limit(
            "prev_attn_out",
            "a last dimension divisible by 64 in layout TND",
            lambda a: a.input_layout == "SBH" or a.prev_attn_out.size(-1) % 64 == 0,
        ),
        Limit(
            "actual_seq_qlen",
            "a value in layout TND",
            lambda a: a.input_layout == "SBH" or a.actual_seq_qlen is not None,
            even_none=True,
        ),
        dtype("actual_seq_qlen", torch.int64),
        Limit(
            "actual_seq_qlen",
            "cumulative lengths from 0 to t; the 0 may be missing where input_softmax_layout is TND",
            _ring_lengths,
        ),
    ),
)

DROPOUT = Limits("wheel, _npu_dropout", (dtype("input", *FLOATS), between("p", 0.0, 1.0)))
DROPOUT_MASK = Limits("op-plugin, DropoutGenMaskKernelNpu.cpp", (between("p", 0.0, 1.0),))

# By operation, as torch names it: with its overload, without its namespace.
LIMITS: dict[str, Limits] = {
    "npu_fusion_attention": attention_limits.FORWARD,
    "npu_fusion_attention_grad": attention_limits.BACKWARD,
    "npu_fusion_attention_v2": attention_limits.FORWARD_V2,
    "npu_fusion_attention_grad_v2": attention_limits.BACKWARD_V2,
    "npu_fusion_attention_v3": attention_limits.FORWARD_V3,
    "npu_fusion_attention_grad_v3": attention_limits.BACKWARD_V3,
    "npu_ring_attention_update": RING_ATTENTION_UPDATE,
    "npu_rms_norm": RMS_NORM,
    "npu_rms_norm_backward": RMS_NORM_BACKWARD,
    "npu_add_rms_norm": ADD_RMS_NORM,
    "npu_scaled_masked_softmax": SCALED_MASKED_SOFTMAX,
    "npu_scaled_masked_softmax_backward": SCALED_MASKED_SOFTMAX_BACKWARD,
    "npu_swiglu": Limits("wheel, npu_swiglu", SWIGLU_INPUT),
    "npu_swiglu_backward": Limits("wheel, npu_swiglu", (*SWIGLU_INPUT, dtype_of("grad_output", "input"))),
    "npu_fast_gelu": FAST_GELU,
    "fast_gelu": FAST_GELU,
    "npu_fast_gelu_backward": _elementwise_backward(FAST_GELU, "grad"),
    "npu_gelu": GELU,
    "npu_gelu_backward": _elementwise_backward(GELU, "grad_output"),
    "npu_silu": SILU,
    "npu_rotary_mul": ROTARY_MUL,
    "npu_rotary_mul_backward": ROTARY_MUL_BACKWARD,
    "npu_apply_rotary_pos_emb": APPLY_ROTARY_POS_EMB,
    "npu_apply_adam_w.out": APPLY_ADAM_W,
    "npu_get_float_status": FLOAT_STATUS,
    "npu_clear_float_status": FLOAT_STATUS,
    "npu_confusion_transpose": CONFUSION_TRANSPOSE,
    "npu_dtype_cast": DTYPE_CAST,
    "npu_dtype_cast_backward": DTYPE_CAST_BACKWARD,
    "npu_format_cast": FORMAT_CAST,
    "npu_format_cast_.acl_format": FORMAT_CAST,
    "npu_linear": LINEAR,
    "npu_cross_entropy_loss": CROSS_ENTROPY_LOSS,
    "npu_cross_entropy_loss_backward": CROSS_ENTROPY_LOSS_BACKWARD,
    "npu_moe_token_permute": MOE_TOKEN_PERMUTE,
    "npu_moe_token_permute_grad": MOE_TOKEN_PERMUTE_GRAD,
    "npu_moe_token_permute_grad_v2": MOE_TOKEN_PERMUTE_GRAD,
    "npu_moe_token_unpermute": MOE_TOKEN_UNPERMUTE,
    "_npu_moe_token_unpermute": MOE_TOKEN_UNPERMUTE,
    "npu_moe_token_unpermute_grad": MOE_TOKEN_UNPERMUTE_GRAD,
    "npu_moe_token_unpermute_grad_v2": MOE_TOKEN_UNPERMUTE_GRAD,
    "npu_moe_token_permute_with_routing_map": MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP,
    "npu_moe_token_permute_with_routing_map_grad": MOE_TOKEN_PERMUTE_WITH_ROUTING_MAP_GRAD,
    "npu_moe_token_unpermute_with_routing_map": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP,
    "_npu_moe_token_unpermute_with_routing_map": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP,
    "npu_moe_token_unpermute_with_routing_map_grad": MOE_TOKEN_UNPERMUTE_WITH_ROUTING_MAP_GRAD,
    "npu_grouped_matmul": GROUPED_MATMUL,
    "npu_grouped_matmul.List": GROUPED_MATMUL_LIST,
    "npu_grouped_matmul_add": GROUPED_MATMUL_ADD,
    "npu_grouped_matmul_add_": GROUPED_MATMUL_ADD,
    "_npu_dropout": DROPOUT,
    "_npu_dropout_gen_mask.Tensor": DROPOUT_MASK,
}
