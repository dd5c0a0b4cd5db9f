"""Define the limits on the arguments of rotary position embeddings."""

from __future__ import annotations

from types import SimpleNamespace

from megatron_npu.sim.kernels.checker import Limit, Limits, dimensions, dtype, dtype_of, one_of, shape_of
from megatron_npu.sim.kernels.limits.common import FLOATS

ROTARY_SIZE = 896  # d must be smaller
ROTARY_COUNT = 1000  # b and n must be smaller, in mode interleave b · n
ROTARY_GRADIENT_COUNT = 1024  # b · n at most, where cos or sin need a gradient


def _rotary_layouts(a: SimpleNamespace) -> list[tuple[int, int]]:
    """Return the possible sizes (b, n) of the input, one for each layout that the shape of cos permits.

    With dimensions of size 1, several layouts are possible: ``[s, 1, n, d]`` with cos ``[s, 1, 1, d]`` may be
    SBND or BSND.
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
    f"Not checked: b · n at most {ROTARY_GRADIENT_COUNT} if cos or sin need a gradient.",
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
        else "the shape of query except for the number of heads"
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

LIMITS = {
    "npu_rotary_mul": ROTARY_MUL,
    "npu_rotary_mul_backward": ROTARY_MUL_BACKWARD,
    "npu_apply_rotary_pos_emb": APPLY_ROTARY_POS_EMB,
}
