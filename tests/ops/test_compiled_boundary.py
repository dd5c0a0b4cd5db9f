"""What crosses into the compiled kernels: operations compute what they get, or raise, and never crash."""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_npu.ops import activation, compiled, cross_entropy, dispatch, dropout, norm
from megatron_npu.ops.attention import attention, cpu
from megatron_npu.ops.compiled import abi, library, products
from megatron_npu.ops.compiled.products import Arithmetic
from megatron_npu.ops.products import linear
from tests.support.tolerances import assert_near

pytestmark = pytest.mark.skipif(library() is None, reason="no g++, or threads not of libgomp")
BF16, FP32 = torch.bfloat16, torch.float32
under_asan = pytest.mark.skipif(
    "tests.sanitized" in sys.modules, reason="the case: AddressSanitizer ends a process that lacks memory"
)


class Case(NamedTuple):
    """A call of a kernel that is right: each of its tensors can be made wrong.

    Attributes:
        call: takes the tensors.
        tensors: in order.
    """

    call: Callable[..., Any]
    tensors: list[Tensor]


def _tensor(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, dtype=FP32).to(dtype)


def _bits(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64)


def _attention(arithmetic: str) -> tuple[list[Tensor], abi.Weighting]:
    dtype = FP32 if arithmetic == "single" else BF16
    shapes = ((3, 4, 8), (3, 5, 8), (3, 5, 6), (3, 4, 6))  # the last of the output
    weighting = abi.Weighting(None, 2, 2, 0.5, 7, 60000, 65536 / 60000)
    return [*(_tensor(*shape, dtype=dtype) for shape in shapes), _tensor(3, 4, 1)], weighting


def _forward(arithmetic: str) -> Case:
    tensors, weighting = _attention(arithmetic)
    return Case(lambda q, k, v, o, n: abi.attention_forward((q, k, v), weighting, o, n, arithmetic), tensors)


def _backward(arithmetic: str) -> Case:
    tensors, weighting = _attention(arithmetic)
    more = [tensors[3].clone(), *(each.clone() for each in tensors[:3])]

    def call(q: Tensor, k: Tensor, v: Tensor, o: Tensor, n: Tensor, g: Tensor, *gradients: Tensor) -> None:
        abi.attention_backward((q, k, v), weighting, (o, n), g, gradients, arithmetic)

    return Case(call, tensors + more)


def cases() -> dict[str, Case]:
    """Return a right call of every kernel, of small sizes with a rest."""
    found = {
        "softmax": Case(
            lambda s, w, r, b: abi.softmax(s, w, r, b, 5),
            [_tensor(3, 7), _tensor(3, 7), _tensor(3, 7, dtype=BF16), _bits(6)],
        ),
        "softmax_backward": Case(
            lambda g, w, r, b: abi.softmax_backward(g, w, r, b, 5),
            [_tensor(3, 7), _tensor(3, 7), _tensor(3, 7, dtype=BF16), _bits(6)],
        ),
        "accumulate": Case(
            lambda t, p: abi.accumulate(t, p, 0.5), [_tensor(3, 2, 5), _tensor(3, 2, 5, dtype=BF16)]
        ),
    }
    for dtype in (FP32, BF16):
        name = str(dtype)[6:]
        matrix = [_tensor(3, 7, dtype=dtype) for _ in range(3)]
        found |= {
            f"exponentials {name}": Case(abi.exponentials, [matrix[0], _tensor(3), _tensor(3)]),
            f"gelu {name}": Case(abi.gelu, [matrix[0], _tensor(7), *matrix[1:]]),
            f"product_and_sum {name}": Case(abi.product_and_sum, [*matrix, _tensor(7)]),
            f"norm_backward {name}": Case(
                lambda g, x, m, r, f, *d: abi.norm_backward(g, x, m, r, f, d),
                [*matrix[:2], _tensor(3, 1), _tensor(3, 1), _tensor(7), matrix[2], _tensor(7), _tensor(7)],
            ),
            f"product {name}": Case(
                lambda a, b, c, d: abi.product(a, b, c, d, 1.0, add=True, paired=False),
                [
                    _tensor(2, 3, 5, dtype=BF16),
                    _tensor(2, 5, 7, dtype=BF16),
                    _tensor(2, 3, 7, dtype=dtype),
                    _tensor(7),
                ],
            ),
        }
    factors = [_tensor(3, 5, dtype=BF16), _tensor(5, 7, dtype=BF16)]
    for arithmetic in ("widened", "paired"):
        found[f"add_product {arithmetic}"] = Case(
            lambda t, a, b, arithmetic=arithmetic: abi.add_product(t, a, b, arithmetic),
            [_tensor(3, 7), *factors],
        )
        found[f"exponentials_of_product {arithmetic}"] = Case(
            lambda *t, arithmetic=arithmetic: abi.exponentials_of_product(*t, arithmetic),
            [*factors, _tensor(7), _tensor(3), _tensor(3, 7, dtype=BF16), _tensor(3)],
        )
    for arithmetic in ("single", "widened", "paired"):
        found[f"attention_forward {arithmetic}"] = _forward(arithmetic)
        found[f"attention_backward {arithmetic}"] = _backward(arithmetic)
    return found


def _longer(tensor: Tensor, dim: int) -> Tensor:
    return torch.cat([tensor, tensor], dim)


def _shorter(tensor: Tensor) -> Tensor:
    return tensor[:-1].contiguous()


def _of_another_dtype(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float16 if tensor.is_floating_point() else torch.int32)


def _of_twice_the_width(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float64 if tensor.is_floating_point() else torch.int16)


def _with_gaps(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def _freed(tensor: Tensor) -> Tensor:
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def _on_no_device(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _of_its_own_type(tensor: Tensor) -> Tensor:
    return tensor.as_subclass(type("Own", (Tensor,), {}))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "longer": lambda tensor: _longer(tensor, 0),
    "wider": lambda tensor: _longer(tensor, -1),
    "shorter": _shorter,
    "one dimension more": lambda tensor: tensor[None],
    "another dtype": _of_another_dtype,
    "another width": _of_twice_the_width,
    "gaps": _with_gaps,
    "negated": torch._neg_view,
    "freed": _freed,
    "no memory": _on_no_device,
    "a type of its own": _of_its_own_type,
}
# What is right all the same: more bits than needed, rows of one value, which may be anywhere, and a
# width that nothing else has.
RIGHT = {
    *((f"exponentials {dtype}", 0, "wider") for dtype in ("float32", "bfloat16")),
    *((name, 3, how) for name in ("softmax", "softmax_backward") for how in ("longer", "wider")),
    *(
        (f"attention_{way} {arithmetic}", 4, "gaps")
        for way in ("forward", "backward")
        for arithmetic in ("single", "widened", "paired")
    ),
}


@pytest.mark.parametrize("name", cases())
def test_every_wrong_tensor_is_refused(name):
    """Each tensor of each kernel is made wrong in each way, the others are right."""
    call, tensors = cases()[name]
    call(*tensors)
    for place, tensor in enumerate(tensors):
        for how, make in WRONG.items():
            if how == "negated" and not tensor.is_floating_point():
                continue
            wrong = [*tensors[:place], make(tensor), *tensors[place + 1 :]]
            if (name, place, how) in RIGHT:
                call(*wrong)
                continue
            with pytest.raises(ValueError, match=r"compiled kernels? (requires|supports? only|needs?)"):
                call(*wrong)


def test_what_is_written_to_shares_no_memory():
    left, right = torch.ones(2, 16, 16).to(BF16)
    row = torch.zeros(1, 16)
    with pytest.raises(ValueError, match="because it is written to"):
        products.add(row.expand(16, 16), left, right)
    with pytest.raises(ValueError, match="because it is written to"):
        products.multiply(left, right, row.expand(16, 16))
    assert not products.takes_result(row.expand(16, 16))
    assert not abi.overlaps(torch.zeros(4, 3, 2).transpose(0, 1))
    assert abi.overlaps(torch.zeros(5).as_strided((3, 3), (1, 1)))
    with pytest.raises(RuntimeError, match="single memory location"):  # torch's own words
        compiled.accumulate(row.expand(16, 16), left)


@pytest.mark.parametrize(
    "wrong",
    [{"repeats": 0}, {"repeats": 3}, {"keep": 0}, {"keep": 65537}, {"end": 1 << 50}, {"begin": -(1 << 41)}],
)
def test_numbers_that_attention_cannot_have(wrong):
    tensors, weighting = _attention("single")
    with pytest.raises(ValueError, match="repeats that divides 4, a keep value from 1 to 65536"):
        abi.attention_forward(tuple(tensors[:3]), weighting._replace(**wrong), *tensors[3:], "single")


def test_other_numbers_that_cannot_be():
    with pytest.raises(ValueError, match="the dropout threshold must be an int16 value, but got 32768"):
        abi.softmax(_tensor(3, 7), None, _tensor(3, 7, dtype=BF16), _bits(6), 1 << 15)
    with pytest.raises(ValueError, match="at least one column"):
        abi.product(
            *(_tensor(1, 3, 0, dtype=BF16), _tensor(1, 0, 7, dtype=BF16), _tensor(1, 3, 7), None, 1.0),
            add=False,
            paired=False,
        )
    with pytest.raises(ValueError, match="a head size of at least 1"):
        abi.attention_forward(
            (_tensor(0, 4, 8), _tensor(0, 5, 8), _tensor(0, 5, 6)),
            abi.Weighting(None, None, 1, 1.0, 0, 65536, 1.0),
            *(_tensor(0, 4, 6), _tensor(0, 4, 1), "single"),
        )


class OtherLibrary:
    """One whose ``Call`` has fewer fields."""

    def __init__(self) -> None:
        self._name, self.size_of_rows, self.size_of_call = "kernels.so", lambda: 24, lambda: 100


def test_a_library_of_other_sources_is_refused():
    other = OtherLibrary()
    with pytest.raises(
        RuntimeError, match=rf"size_of_call\(\) returns 100 instead of {ctypes.sizeof(abi._Call)}; delete"
    ):
        abi._declared(other)
    old = OtherLibrary()
    del old.size_of_rows
    with pytest.raises(RuntimeError, match=r"size_of_rows\(\) returns 0"):
        abi._declared(old)
    assert library().size_of_call() == ctypes.sizeof(abi._Call)


def test_without_kernels_that_is_said(monkeypatch):
    monkeypatch.setattr(abi, "library", lambda: None)
    with pytest.raises(RuntimeError, match="there is no compiled kernel exponentials_float32"):
        compiled.exponentials_(_tensor(3, 7), _tensor(3), _tensor(3))


@under_asan
def test_no_memory_is_an_error_of_python():
    """Sixteen values stand for 2^45 here, by a stride of 0: nowhere is memory for copies of those."""
    many = 1 << 45
    left = torch.ones(16).to(BF16).as_strided((16, many), (1, 0))
    right = torch.ones(16).to(BF16).as_strided((many, 16), (0, 1))
    with pytest.raises(MemoryError, match="add_product_widened ran out of memory"):
        abi.add_product(torch.zeros(16, 16), left, right, "widened")
    key = torch.ones(1, 16).as_strided((2, many, 16), (0, 0, 1))
    output, normalizer = torch.zeros(2, 3, 16), torch.zeros(2, 3, 1)
    weighting = abi.Weighting(None, None, 1, 1.0, 0, 65536, 1.0)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):  # it is these that find no memory
            torch.set_num_threads(threads)
            with pytest.raises(MemoryError, match="attention_forward_single"):
                abi.attention_forward((output.clone(), key, key), weighting, output, normalizer, "single")
    finally:
        torch.set_num_threads(before)
    abi.attention_forward(
        (output.clone(), output, output), weighting, output, normalizer, "single"
    )  # goes on


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gelu_of_values_that_are_far_out(dtype):
    """The slope is 1 and 0 for every number; torch's own is not a number from 1e19 on, in fp32."""
    far = [1e13, 1e15, 1e19, 1e30, 3e38, 40.0, 12.0]
    values = torch.tensor([*far, *(-each for each in far), math.inf]).to(dtype)
    exact = values.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.gelu(exact, approximate="tanh").sum(), exact)
    expected[-1] = 1.0  # of infinity: the limit
    output, slope = compiled.gelu(values[None], None, with_slope=True)
    assert torch.equal(slope[0].double(), expected)
    assert torch.equal(output[0], F.gelu(values, approximate="tanh"))
    assert compiled.gelu(torch.tensor([[math.nan]]), None, with_slope=True)[1].isnan()


def test_gelu_far_out_without_kernels(monkeypatch):
    monkeypatch.setattr(compiled, "usable", lambda *tensors: False)
    values = torch.tensor([1e13, 1e15, 1e30, 3e38]).to(BF16)
    values = torch.cat([values, -values, torch.tensor([math.nan]).to(BF16)])[None].expand(4000, -1)
    leaf = values.clone().requires_grad_()
    for operation in dispatch.OPERATIONS:
        operation.bind("cpu")
    (slope,) = torch.autograd.grad(activation.bias_gelu(leaf, torch.zeros(9).to(BF16)).sum(), leaf)
    assert slope[0, :8].tolist() == [1.0] * 4 + [0.0] * 4
    assert slope[0, 8].isnan()


# --- operations, with whatever a user may hand them


@pytest.fixture(params=[None, *Arithmetic], ids=lambda each: each.name if each else "none")
def arithmetic(request, monkeypatch):
    """Let this processor be one for which the kernels have an arithmetic, and attention is theirs."""
    if request.param is Arithmetic.PAIRED and not abi.can_pair(library()):
        pytest.skip("the processor has no instruction for pairs of bf16")
    monkeypatch.setattr(products, "_arithmetic", lambda: request.param)
    monkeypatch.setattr(products, "has_avx512", lambda: True)
    monkeypatch.setattr(cpu, "tiles_are_faster", lambda query, spec: True)
    for operation in dispatch.OPERATIONS:
        operation.bind("cpu")
    return request.param


def _view(kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return random values of a shape, in memory of one kind or another."""
    if kind == "transposed":
        return _tensor(*reversed(shape), dtype=dtype).permute(*reversed(range(len(shape))))
    if kind == "sliced":
        return _tensor(*(size + 3 for size in shape), dtype=dtype)[
            tuple(slice(1, size + 1) for size in shape)
        ]
    if kind == "expanded":
        return _tensor(1, *shape[1:], dtype=dtype).expand(shape)
    if kind == "a column":
        return _tensor(*shape[:-1], 1, dtype=dtype).expand(shape)
    if kind == "negated":
        return torch._neg_view(_tensor(*shape, dtype=dtype))
    return _tensor(*shape, dtype=dtype)


KINDS = st.sampled_from(["plain", "plain", "transposed", "sliced", "expanded", "a column", "negated"])
FLOATS = st.sampled_from([FP32, BF16, BF16, torch.float16, torch.float64])
SIZES = st.sampled_from([0, 1, 3, 15, 16, 17, 33, 70])
WIDTHS = SIZES.filter(bool)
RIGHT_OR_NOT = st.sampled_from([0, 0, 0, 0, -1, 1])  # more than a size should be


class World(NamedTuple):
    """What a call may meet besides its arguments: torch's default dtype and number of threads."""

    default: torch.dtype
    threads: int


WORLDS = st.builds(World, st.sampled_from([FP32, BF16, torch.float64]), st.sampled_from([1, 2, 3, 5]))


def as_exact_or_refused(
    world: World,
    ours: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    tensors: list[Tensor],
    loose: float = 1.0,
) -> bool:
    """Compare output and gradients with those of a formula in fp64; return whether there is something.

    The call, or its backward, may raise instead, where the formula does so in the dtypes of the tensors.
    """
    before = torch.get_default_dtype(), torch.get_num_threads()
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    doubles = [tensor.detach().double().resolve_neg().requires_grad_() for tensor in tensors]
    try:
        torch.set_default_dtype(world.default)
        torch.set_num_threads(world.threads)
        try:
            output = ours(*leaves)
            found = [output, *torch.autograd.grad(output.float().sum(), leaves, allow_unused=True)]
        except (RuntimeError, ValueError, IndexError):
            return False
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
    expected = formula(*doubles)  # which raises if ours should have done so
    grads = torch.autograd.grad(expected.sum(), doubles, allow_unused=True)
    assert output.shape == expected.shape
    narrowest = min((FP32, *(leaf.dtype for leaf in leaves)), key=lambda dtype: torch.finfo(dtype).bits)
    for mine, exact in zip(found, [expected, *grads], strict=True):
        if exact is not None and exact.numel():
            assert_near(mine, exact, narrowest, loose=loose)
    return True


_LAST = ("freed", "no memory", "a type of its own")  # torch itself cannot change these any further
_FIRST = [how for how in WRONG if how not in _LAST]


@settings(max_examples=200)
@given(
    name=st.sampled_from(sorted(cases())),
    changes=st.lists(st.tuples(st.integers(0, 9), st.sampled_from(_FIRST)), max_size=4),
    last=st.tuples(st.integers(0, 9), st.sampled_from([None, None, *_LAST])),
    world=WORLDS,
)
def test_any_mixture_of_wrong_tensors_is_refused_or_computed(name, changes, last, world):
    """Whatever crosses, with several threads and under another default dtype; nothing but a ValueError."""
    call, tensors = cases()[name]
    for place, how in [*changes, last]:
        place %= len(tensors)
        if how and not (how == "negated" and not tensors[place].is_floating_point()):
            tensors[place] = WRONG[how](tensors[place])
    before = torch.get_default_dtype(), torch.get_num_threads()
    torch.set_default_dtype(world.default)
    torch.set_num_threads(world.threads)
    try:
        with contextlib.suppress(ValueError):
            call(*tensors)
    finally:
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])


@settings(max_examples=60)
@given(
    sizes=st.tuples(SIZES, WIDTHS, WIDTHS),
    wrong=st.tuples(RIGHT_OR_NOT, RIGHT_OR_NOT),
    kinds=st.tuples(KINDS, KINDS, KINDS),
    dtypes=st.tuples(FLOATS, FLOATS, FLOATS),
    alike=st.booleans(),
    world=WORLDS,
)
def test_linear(arithmetic, sizes, wrong, kinds, dtypes, alike, world):
    torch.manual_seed(0)
    rows, inner, columns = sizes
    shapes = [(rows, inner), (columns, max(0, inner + wrong[0])), (max(0, columns + wrong[1]),)]
    types = [dtypes[0]] * 3 if alike else dtypes
    tensors = [_view(*each) for each in zip(kinds, shapes, types, strict=True)]
    fits = shapes[1][1] == inner and shapes[2][0] in (columns, 1)
    computed = as_exact_or_refused(world, linear.linear, F.linear, tensors, loose=4)
    assert not computed or fits
    if fits and len(set(types)) == 1 and shapes[2][0] == columns:
        assert computed


@settings(max_examples=60)
@given(
    shape=st.tuples(SIZES, WIDTHS),
    wrong=RIGHT_OR_NOT,
    kinds=st.tuples(KINDS, KINDS),
    dtypes=st.tuples(FLOATS, FLOATS),
    world=WORLDS,
)
def test_gelu_of_a_sum(arithmetic, shape, wrong, kinds, dtypes, world):
    torch.manual_seed(0)
    shapes = [(40, *shape), (max(0, shape[1] + wrong),)]
    tensors = [_view(*each) for each in zip(kinds, shapes, dtypes, strict=True)]

    def formula(x: Tensor, bias: Tensor) -> Tensor:
        return F.gelu(x + bias, approximate="tanh")

    computed = as_exact_or_refused(world, activation.bias_gelu, formula, tensors, loose=4)
    assert computed or wrong


@settings(max_examples=60)
@given(
    shape=st.tuples(WIDTHS, WIDTHS.filter(lambda size: size > 1)),
    wrong=RIGHT_OR_NOT,
    kinds=st.tuples(KINDS.filter(lambda kind: kind != "a column"), KINDS, KINDS),
    dtypes=st.tuples(FLOATS, FLOATS),
    rms=st.booleans(),
    world=WORLDS,
)
def test_norms(arithmetic, shape, wrong, kinds, dtypes, rms, world):
    torch.manual_seed(0)
    shapes = [shape, *[(max(0, shape[1] + wrong),)] * (1 if rms else 2)]
    types = (dtypes[0], dtypes[1], dtypes[1])
    tensors = [_view(*each) for each in zip(kinds, shapes, types, strict=False)]

    def ours(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return norm.rms_norm(x, weight, 1e-2) if bias is None else norm.layer_norm(x, weight, bias, 1e-2)

    def formula(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, 1e-2)
        return F.layer_norm(x, weight.shape, weight, bias, 1e-2)

    computed = as_exact_or_refused(world, ours, formula, tensors, loose=8)
    assert not computed or not wrong
    assert computed or wrong or dtypes[0] is not dtypes[1]


@settings(max_examples=60)
@given(
    sizes=st.tuples(SIZES, SIZES, st.sampled_from([0, 1, 8, 17])),
    wrong=RIGHT_OR_NOT,
    kinds=st.tuples(KINDS, KINDS, KINDS),
    dtypes=st.tuples(FLOATS, FLOATS),
    alike=st.booleans(),
    causal=st.booleans(),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    world=WORLDS,
)
def test_attention(arithmetic, sizes, wrong, kinds, dtypes, alike, causal, heads, world):
    torch.manual_seed(0)
    queries, keys, size = sizes
    shapes = [(2, heads[0], queries, size), *[(2, heads[1], keys, size)] * 2]
    shapes[1] = (*shapes[1][:3], max(0, size + wrong))
    wrong = shapes[1][3] - size
    types = (dtypes[0], dtypes[0], dtypes[0] if alike else dtypes[1])
    tensors = [_view(*each) for each in zip(kinds, shapes, types, strict=True)]

    def formula(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(heads[0] // heads[1], 1) for each in (k, v))
        beyond = torch.ones(queries, keys, dtype=torch.bool).triu(1) & causal
        return (0.3 * q @ k.mT).masked_fill(beyond, -torch.inf).softmax(-1).nan_to_num() @ v

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, layout="BNSD", scale=0.3, causal=causal)

    computed = as_exact_or_refused(world, ours, formula, tensors, loose=8)
    assert not computed or not wrong
    assert computed or wrong or len(set(types)) > 1


@settings(max_examples=40)
@given(
    sizes=st.tuples(WIDTHS, WIDTHS.filter(lambda size: size > 1)),
    kind=KINDS,
    dtype=FLOATS,
    in_place=st.booleans(),
    world=WORLDS,
)
def test_cross_entropy(arithmetic, sizes, kind, dtype, in_place, world):
    torch.manual_seed(0)
    tokens, words = sizes
    target = torch.randint(words, (2, tokens))

    def ours(logits: Tensor) -> Tensor:
        if not in_place:
            return cross_entropy.cross_entropy(logits, target)
        copy = logits * 1 if logits.is_contiguous() else logits  # its memory is taken for the gradient
        return cross_entropy.vocab_parallel_cross_entropy(copy, target, vocab_start=0, vocab_size=words)

    def formula(logits: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view(2, tokens)

    logits = _view(kind, (2, tokens, words), dtype)
    if in_place and dtype is torch.float64:
        return  # it is computed in fp32
    assert as_exact_or_refused(world, ours, formula, [logits.clone() if kind == "plain" else logits], loose=8)


@settings(max_examples=40)
@given(
    shape=st.tuples(SIZES, SIZES),
    kinds=st.tuples(KINDS, KINDS),
    dtypes=st.tuples(FLOATS, FLOATS),
    world=WORLDS,
)
def test_accumulate(shape, kinds, dtypes, world):
    torch.manual_seed(0)
    total, part = (_view(*each) for each in zip(kinds, (shape, shape), dtypes, strict=True))
    expected, before = total.double() + 0.5 * part.double(), torch.get_num_threads()
    try:
        torch.set_num_threads(world.threads)
        compiled.accumulate(total, part, 0.5)
    except RuntimeError:
        # torch does not write to such a tensor either
        assert abi.overlaps(total)
        return
    finally:
        torch.set_num_threads(before)
    if total.numel():
        assert_near(total, expected, min((*dtypes, FP32), key=lambda dtype: torch.finfo(dtype).bits), loose=2)


@pytest.mark.parametrize("p", [1e-9, 2.0**-18, 2.0**-16, 0.5, 1 - 1e-9])
def test_a_probability_of_dropout_is_never_none_at_all(p):
    from megatron_npu.ops.attention.blockwise.dropout import keep_of

    assert 1 <= keep_of(p) < dropout.KEEP_LEVELS
    assert keep_of(0.0) == dropout.KEEP_LEVELS
