"""Call the compiled kernels, and check the arguments of each call.

A kernel receives addresses and sizes and cannot check them. Therefore, the memory, dtype, shape and strides
of each tensor are checked here, and tensors that a kernel would misread or write past raise an error. Callers
avoid these errors with ``usable`` and similar functions, and leave other tensors to torch.

Each function is named after its kernel, without the dtype or arithmetic for which it was compiled. An
exception inside a kernel is returned as a status and raised again here.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from megatron_npu.ops.compiled.building import library

_POINTER, _NUMBER, _REAL, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_FLOAT, _BFLOAT = torch.float32, torch.bfloat16
_NAMES = {_FLOAT: "float32", _BFLOAT: "bfloat16"}
_PLAIN = (Tensor, torch.nn.Parameter)  # memory of others, such as fake tensors', is not what they say
_NO_MEMORY = 1  # of what kernels return; 0: done
_FURTHEST = 1 << 40  # keys: further away than any
LEVELS = 1 << 16  # of probabilities: as kLevels


class Weighting(NamedTuple):
    """The settings for computing attention weights, ``gain · dropout(softmax(scale · query · keyᵀ))``.

    Query i sees keys ``[begin + i, end + i)``, as far as they exist; each query sees at least one key.

    Attributes:
        begin: the first key that the first query sees; None means no left limit.
        end: the end of the keys that the first query sees; None means no right limit.
        repeats: the number of rows per query, one for each of its heads.
        scale: the factor applied to the scores.
        seed: the seed of the dropout, 64 bits.
        keep: the number of weights in 65,536 that are kept; 65,536 means no dropout.
        gain: the factor for the kept weights.
    """

    begin: int | None
    end: int | None
    repeats: int
    scale: float
    seed: int
    keep: int
    gain: float


class _Rows(ctypes.Structure):
    _fields_ = (("data", ctypes.c_void_p), ("next", ctypes.c_int64), ("row", ctypes.c_int64))


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, _Rows) for name in ("query", "key", "value")),
        *((name, ctypes.c_int64) for name in ("heads", "rows", "keys", "size", "value_size", "repeats")),
        *((name, ctypes.c_int64) for name in ("begin", "end")),
        *((name, ctypes.c_float) for name in ("scale", "gain")),
        *(("seed", ctypes.c_uint64), ("keep", ctypes.c_int64)),
    )


_MATRIX = (_POINTER, _NUMBER, _NUMBER)  # and what a row and a column are apart
_MATRICES = (_POINTER, _NUMBER, _NUMBER, _NUMBER)  # and one from the next
_CALL, _ROWS = ctypes.POINTER(_Call), ctypes.POINTER(_Rows)
_DTYPES, _ARITHMETICS = ("float32", "bfloat16"), ("widened", "paired")

# What kernels take before the number of threads, and for what each of them is compiled.
_KERNELS: dict[str, tuple[tuple[str, ...], tuple[Any, ...]]] = {
    "exponentials": (_DTYPES, (*[_POINTER] * 3, *[_NUMBER] * 2)),
    "gelu": (_DTYPES, (*[_POINTER] * 4, *[_NUMBER] * 2)),
    "product_and_sum": (_DTYPES, (*[_POINTER] * 4, *[_NUMBER] * 2)),
    "norm_backward": (_DTYPES, (*[_POINTER] * 8, *[_NUMBER] * 2)),
    "softmax": (("bfloat16",), (*[_POINTER] * 4, *[_NUMBER] * 3)),
    "softmax_backward": (("bfloat16",), (*[_POINTER] * 4, *[_NUMBER] * 3)),
    "accumulate": (("bfloat16",), (*[_POINTER] * 2, _REAL, *[_NUMBER] * 3)),
    "product": (
        ("bfloat16",),
        (*_MATRICES, *_MATRICES, *[_POINTER] * 2, *[_NUMBER] * 2, _POINTER, _REAL, *[_NUMBER] * 5, _INT),
    ),
    "add_product": (_ARITHMETICS, (*_MATRIX, *_MATRIX, _POINTER, *[_NUMBER] * 4)),
    "exponentials_of_product": (
        _ARITHMETICS,
        (*_MATRIX, *_MATRIX, *[_POINTER] * 3, _NUMBER, _POINTER, *[_NUMBER] * 3),
    ),
    "attention_forward": (("single", *_ARITHMETICS), (_CALL, *[_ROWS] * 2)),
    "attention_backward": (("single", *_ARITHMETICS), (_CALL, *[_ROWS] * 6)),
}


def is_plain(tensor: Tensor) -> bool:
    """Return True if a tensor is an ordinary CPU tensor that stores its values itself."""
    if type(tensor) not in _PLAIN or not tensor.is_cpu:
        return False
    # of a negated one the memory is not yet what it says; graphs have none, and no name for the question
    return torch.compiler.is_compiling() or not tensor.is_neg()


def overlaps(tensor: Tensor) -> bool:
    """Return True if several elements of a tensor may share the same memory.

    Such a tensor, for example an expanded one, is read-only.
    """
    if tensor.is_contiguous():
        return False
    extent = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride < extent:
            return True
        extent += stride * (size - 1)
    return False


def exponentials(values: Tensor, reference: Tensor, sums: Tensor) -> None:
    """Replace values with ``exp(values - reference)``, and add their row sums to ``sums``.

    Values are ``[n, m]``; reference and sums are ``[n]`` in fp32.
    """
    rows, width = _shape("values", values, 2)
    dtype = values.dtype
    _call(
        f"exponentials_{_name_of(dtype)}",
        _contiguous("values", values, dtype, values.shape),
        _contiguous("reference", reference, _FLOAT, (rows,)),
        _contiguous("sums", sums, _FLOAT, (rows,)),
        *(rows, width),
    )


def gelu(input: Tensor, bias: Tensor, output: Tensor, slope: Tensor | None) -> None:
    """Call the GELU kernel on input, output and derivative ``[..., h]``, and an fp32 bias ``[h]``."""
    shape, dtype, width = input.shape, input.dtype, input.size(-1)
    _call(
        f"gelu_{_name_of(dtype)}",
        _contiguous("input", input, dtype, shape),
        _contiguous("bias", bias, _FLOAT, (width,)),
        _contiguous("output", output, dtype, shape),
        None if slope is None else _contiguous("slope", slope, dtype, shape),
        *(_rows_of(input), width),
    )


def product_and_sum(left: Tensor, right: Tensor, output: Tensor, sums: Tensor) -> None:
    """Call the kernel that writes ``left * right`` ``[..., h]`` to ``output``, and its column sums to
    ``sums``.
    """
    shape, dtype, width = left.shape, left.dtype, left.size(-1)
    _call(
        f"product_and_sum_{_name_of(dtype)}",
        _contiguous("left", left, dtype, shape),
        _contiguous("right", right, dtype, shape),
        _contiguous("output", output, dtype, shape),
        _contiguous("sums", sums, _FLOAT, (width,)),
        *(_rows_of(left), width),
    )


def norm_backward(
    grad: Tensor,
    input: Tensor,
    mean: Tensor | None,
    rstd: Tensor,
    factor: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor | None],
) -> None:
    """Call the norm's backward kernel on gradients and input ``[n, h]``, with fp32 statistics and factors.

    The mean and rstd are ``[n, 1]``; the factor and its gradients are ``[h]``.
    """
    rows, width = _shape("input", input, 2)
    shape, dtype = input.shape, input.dtype
    d_input, d_factor, d_bias = gradients
    _call(
        f"norm_backward_{_name_of(dtype)}",
        _contiguous("gradient", grad, dtype, shape),
        _contiguous("input", input, dtype, shape),
        None if mean is None else _contiguous("mean", mean, _FLOAT, (rows, 1)),
        _contiguous("rstd", rstd, _FLOAT, (rows, 1)),
        _contiguous("factor", factor, _FLOAT, (width,)),
        _contiguous("gradient of the input", d_input, dtype, shape),
        _contiguous("gradient of the factor", d_factor, _FLOAT, (width,)),
        None if d_bias is None else _contiguous("gradient of the bias", d_bias, _FLOAT, (width,)),
        *(rows, width),
    )


def softmax(scores: Tensor, weights: Tensor | None, rounded: Tensor, bits: Tensor | None, most: int) -> None:
    """Call the softmax kernel on tensors ``[..., m]``: fp32 scores and weights, and bf16 rounded weights.

    The random bits are int64, with one element for four values.
    """
    shape, width = scores.shape, scores.size(-1)
    _call(
        "softmax_bfloat16",
        _contiguous("scores", scores, _FLOAT, shape),
        None if weights is None else _contiguous("weights", weights, _FLOAT, shape),
        _contiguous("rounded weights", rounded, _BFLOAT, shape),
        *_bits(bits, most, scores.numel()),
        *(_rows_of(scores), width),
    )


def softmax_backward(grad: Tensor, weights: Tensor, rounded: Tensor, bits: Tensor | None, most: int) -> None:
    """Call the softmax backward kernel.

    Shapes and dtypes are those of ``softmax``.
    """
    shape, width = grad.shape, grad.size(-1)
    _call(
        "softmax_backward_bfloat16",
        _contiguous("gradient", grad, _FLOAT, shape),
        _contiguous("weights", weights, _FLOAT, shape),
        _contiguous("rounded gradient", rounded, _BFLOAT, shape),
        *_bits(bits, most, grad.numel()),
        *(_rows_of(grad), width),
    )


def accumulate(total: Tensor, part: Tensor, factor: float) -> None:
    """Call the accumulation kernel on an fp32 total with contiguous rows and a bf16 part, both ``[n,
    ...]``.
    """
    rows, width = part.size(0), part.numel() // max(1, part.size(0))
    address = _contiguous("part", part, _BFLOAT, part.shape)
    _check(has_contiguous_rows(total), "total", total, "with contiguous rows that do not overlap")
    _call(
        "accumulate_bfloat16",
        _strided("total", total, _FLOAT, part.shape),
        *(address, factor, rows, width, total.stride(0)),
    )


def has_contiguous_rows(tensor: Tensor) -> bool:
    """Return True if each row of a tensor ``[n, ...]`` is contiguous and the rows do not overlap."""
    if tensor.dim() < 2 or not tensor.size(0):
        return False
    return tensor.is_contiguous() or (tensor[0].is_contiguous() and not overlaps(tensor))


def product(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    bias: Tensor | None,
    factor: float,
    *,
    add: bool,
    paired: bool,
) -> None:
    """Multiply bf16 matrices ``[b, n, m]`` and ``[b, m, k]``.

    Each must have a stride of 1 in one dimension.

    The output is ``[b, n, k]``, fp32 or bf16, with contiguous rows; the bias is ``[k]`` in fp32.
    """
    count, rows, inner = _shape("left", left, 3)
    columns = right.size(-1)
    _check(inner > 0, "left", left, "with at least one column")  # nothing would be written
    precise = out.dtype is _FLOAT
    where = _strided("result", out, _FLOAT if precise else _BFLOAT, (count, rows, columns), written=True)
    _check(columns < 2 or out.stride(-1) == 1, "result", out, "with contiguous rows")
    next_product, row, _ = out.stride()
    _call(
        "product_bfloat16",
        *(_factor("left", left, (count, rows, inner)), *left.stride()),
        *(_factor("right", right, (count, inner, columns)), *right.stride()),
        *(where if precise else None, None if precise else where, next_product, row),
        None if bias is None else _contiguous("bias", bias, _FLOAT, (columns,)),
        *(factor, add, count, rows, columns, inner, paired),
    )


def add_product(total: Tensor, left: Tensor, right: Tensor, arithmetic: str) -> None:
    """Call the accumulating matmul kernel on bf16 operands ``[n, m]`` and ``[m, k]``, each with a unit
    stride.

    The total is ``[n, k]``, fp32 and row-major.
    """
    rows, inner = _shape("left", left, 2)
    columns = right.size(-1)
    where = _strided("sum", total, _FLOAT, (rows, columns), written=True)
    _check(columns < 2 or total.stride(-1) == 1, "sum", total, "with contiguous rows")
    _call(
        f"add_product_{arithmetic}",
        *(_factor("left", left, (rows, inner)), *left.stride()),
        *(_factor("right", right, (inner, columns)), *right.stride()),
        *(where, total.stride(0), rows, columns, inner),
    )


def exponentials_of_product(
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    reference: Tensor,
    output: Tensor,
    sums: Tensor,
    arithmetic: str,
) -> None:
    """Call the kernel that exponentiates a matmul's result.

    The operands are those of ``add_product``, and the output is bf16 ``[n, k]``.

    The bias is ``[k]`` and the other tensors are ``[n]``, all in fp32.
    """
    rows, inner = _shape("left", left, 2)
    columns = right.size(-1)
    _call(
        f"exponentials_of_product_{arithmetic}",
        *(_factor("left", left, (rows, inner)), *left.stride()),
        *(_factor("right", right, (inner, columns)), *right.stride()),
        None if bias is None else _contiguous("bias", bias, _FLOAT, (columns,)),
        _contiguous("reference", reference, _FLOAT, (rows,)),
        _contiguous("output", output, _BFLOAT, (rows, columns)),
        *(output.stride(0), _contiguous("sums", sums, _FLOAT, (rows,)), rows, columns, inner),
    )


def attention_forward(
    factors: tuple[Tensor, Tensor, Tensor],
    weighting: Weighting,
    output: Tensor,
    normalizer: Tensor,
    arithmetic: str,
) -> None:
    """Call the attention kernel on queries, keys and values ``[heads, rows or keys, d or dv]``.

    The output is ``[heads, rows, dv]``, and the normalizer is fp32.
    """
    query, _, value = factors
    of_output = (*query.shape[:2], value.size(2))
    dtype = _dtype_of(arithmetic)
    _call(
        f"attention_forward_{arithmetic}",
        _call_of(factors, weighting, dtype),
        _rows("output", output, dtype, of_output, written=True),
        _rows("normalizer", normalizer, _FLOAT, (*query.shape[:2], 1), written=True),
    )


def attention_backward(
    factors: tuple[Tensor, Tensor, Tensor],
    weighting: Weighting,
    result: tuple[Tensor, Tensor],
    grad: Tensor,
    gradients: tuple[Tensor, Tensor, Tensor],
    arithmetic: str,
) -> None:
    """Call the backward kernel of attention.

    The gradients have the shapes of the operands.
    """
    query, key, value = factors
    of_output = (*query.shape[:2], value.size(2))
    dtype = _dtype_of(arithmetic)
    _call(
        f"attention_backward_{arithmetic}",
        _call_of(factors, weighting, dtype),
        _rows("output", result[0], dtype, of_output),
        _rows("normalizer", result[1], _FLOAT, (*query.shape[:2], 1)),
        _rows("gradient", grad, dtype, of_output),
        _rows("gradient of the queries", gradients[0], dtype, query.shape, written=True),
        _rows("gradient of the keys", gradients[1], dtype, key.shape, written=True),
        _rows("gradient of the values", gradients[2], dtype, value.shape, written=True),
    )


def can_pair(loaded: ctypes.CDLL) -> bool:
    """Return True if the kernels are compiled for a processor with bf16 dot-product instructions."""
    return bool(loaded.can_pair())


def _call_of(factors: tuple[Tensor, Tensor, Tensor], weighting: Weighting, dtype: torch.dtype) -> _Call:
    query, key, value = factors
    heads, rows, size = _shape("query", query, 3)
    _, keys, value_size = _shape("value", value, 3)
    begin = -_FURTHEST if weighting.begin is None else weighting.begin
    end = _FURTHEST if weighting.end is None else weighting.end
    _check(heads > 0 and size > 0, "query", query, "with a head size of at least 1")
    repeats, keep = weighting.repeats, weighting.keep
    if repeats < 1 or rows % repeats or not 1 <= keep <= LEVELS or max(abs(begin), abs(end)) > _FURTHEST:
        raise ValueError(
            f"attention with {rows} rows requires a number of repeats that divides {rows}, a keep value "
            f"from 1 to {LEVELS}, and limits of at most {_FURTHEST} keys, but got {weighting}"
        )
    return _Call(
        _rows("query", query, dtype, (heads, rows, size)),
        _rows("key", key, dtype, (heads, keys, size)),
        _rows("value", value, dtype, (heads, keys, value_size)),
        *(heads, rows, keys, size, value_size, repeats, begin, end),
        *(weighting.scale, weighting.gain, weighting.seed, keep),
    )


def _rows(
    what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], written: bool = False
) -> _Rows:
    address = _strided(what, tensor, dtype, shape, written)
    next_head, row, column = tensor.stride()
    _check(column == 1 or shape[2] < 2, what, tensor, "with contiguous rows")
    return _Rows(address, next_head, row)


def _factor(what: str, matrix: Tensor, shape: tuple[int, ...]) -> int:
    address = _strided(what, matrix, _BFLOAT, shape)
    _check(1 in matrix.stride()[-2:], what, matrix, "with contiguous rows or columns")
    return address


def _contiguous(what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Return the memory address of a contiguous tensor.

    Raise an error unless it has the given dtype and shape.
    """
    # what ``is_plain`` asks is here once more: calls of small tensors are the time of such questions
    if tensor.dtype is dtype and tensor.shape == shape and type(tensor) in _PLAIN and tensor.is_cpu:
        address = tensor.data_ptr()
        if address and tensor.is_contiguous() and not tensor.is_neg():
            return address
    if not tensor.is_contiguous():
        _refuse(what, tensor, f"a contiguous {dtype} {list(shape)}")
    return _strided(what, tensor, dtype, shape)


def _strided(
    what: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], written: bool = False
) -> int:
    """Return the memory address of a tensor with arbitrary strides.

    If it is written to, no two elements may share memory.
    """
    if tensor.dtype is not dtype or tensor.shape != shape or not is_plain(tensor):
        _refuse(what, tensor, f"a {dtype} {list(shape)} in a CPU's memory")
    if written and overlaps(tensor):
        _refuse(what, tensor, "a tensor whose values do not share memory, because it is written to")
    address = tensor.data_ptr()
    if not address and tensor.numel():
        _refuse(what, tensor, "a tensor whose storage was not resized to 0")
    return address


def _bits(bits: Tensor | None, most: int, count: int) -> tuple[int | None, int]:
    if bits is None:
        return None, 0
    if not -(1 << 15) <= most < 1 << 15:
        raise ValueError(f"the dropout threshold must be an int16 value, but got {most}")
    _check(
        bits.dim() == 1 and 4 * bits.numel() >= count,
        "bits",
        bits,
        f"16 random bits for each of {count} values",
    )
    return _contiguous("bits", bits, torch.int64, bits.shape), most


def _shape(what: str, tensor: Tensor, dimensions: int) -> tuple[int, ...]:
    _check(tensor.dim() == dimensions, what, tensor, f"{dimensions} dimensions")
    return tuple(tensor.shape)


def _rows_of(tensor: Tensor) -> int:
    return tensor.numel() // max(1, tensor.size(-1))


def _name_of(dtype: torch.dtype) -> str:
    if dtype not in _NAMES:
        raise ValueError(f"compiled kernels support only torch.float32 and torch.bfloat16, but got {dtype}")
    return _NAMES[dtype]


def _dtype_of(arithmetic: str) -> torch.dtype:
    return _FLOAT if arithmetic == "single" else _BFLOAT


def _check(fits: bool, what: str, tensor: Tensor, expected: str) -> None:
    if not fits:
        _refuse(what, tensor, expected)


def _refuse(what: str, tensor: Tensor, expected: str) -> None:
    found = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
    if tensor.layout is torch.strided:
        found += f" with strides {tensor.stride()}"
    raise ValueError(
        f"a compiled kernel requires {expected} as its {what}, but got {type(tensor).__name__} {found}; "
        "call the operation in megatron_npu.ops instead, which falls back to torch for calls that no kernel "
        "supports"
    )


def _call(name: str, *arguments: object) -> None:
    """Call a compiled kernel with the number of threads that torch uses.

    Raises:
        MemoryError: there is not enough memory for the kernel's scratch space.
        RuntimeError: the kernel failed in another way, or the kernels are not available.
    """
    loaded = library()
    if loaded is None:
        raise RuntimeError(
            f"there is no compiled kernel {name}: check megatron_npu.ops.compiled.available() first"
        )
    status = _declared(loaded)[name](*arguments, torch.get_num_threads())
    if status == _NO_MEMORY:
        raise MemoryError(f"the compiled kernel {name} ran out of memory; use a smaller batch")
    if status:
        raise RuntimeError(
            f"the compiled kernel {name} failed with status {status}; its results are incomplete"
        )


@functools.lru_cache(maxsize=2)
def _declared(loaded: ctypes.CDLL) -> dict[str, Callable[..., int]]:
    """Return the kernels of a library by name, with their argument types declared for ctypes.

    Raises:
        RuntimeError: the library was compiled from other sources.
    """
    for name, own in (("size_of_rows", _Rows), ("size_of_call", _Call)):
        size = getattr(loaded, name, lambda: 0)()
        if size != ctypes.sizeof(own):
            raise RuntimeError(
                f"{loaded._name} was not compiled from this version's kernels: {name}() returns {size} "
                f"instead of {ctypes.sizeof(own)}; delete the file to have it compiled again"
            )
    kernels: dict[str, Callable[..., int]] = {}
    for family, (variants, arguments) in _KERNELS.items():
        for variant in variants:
            kernel: Any = getattr(loaded, f"{family}_{variant}")
            kernel.argtypes, kernel.restype = [*arguments, _INT], _INT
            kernels[f"{family}_{variant}"] = cast(Callable[..., int], kernel)
    return kernels
