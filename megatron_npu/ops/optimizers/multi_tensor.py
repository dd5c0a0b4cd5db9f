"""Compute norms of lists of tensors and scale them, with the calling convention of ``amp_C``.

Every function is called as ``function(chunk_size, overflow, tensor_lists, ...)``. ``chunk_size`` is part of
apex's convention and is not used; ``overflow`` is a single integer on the device, which functions that check
set to 1 on inf or nan, and which is never reset here.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from megatron_npu.ops.dispatch import Make, Operation

# Values whose squares are added up in one go. torch's kernel for the CPU does so in a few fp32 lanes:
# over 20 million values its norm is 1e-3 off.
_CHUNK = 1 << 13
_dtype_of = operator.attrgetter("dtype")
_PLAIN = frozenset((Tensor, torch.nn.Parameter))

TensorLists = list[list[Tensor]]


class MultiTensorApply:
    """Replacement for ``apex.multi_tensor_apply.MultiTensorApply``, which calls an operation with its
    chunk size.
    """

    available = True
    warned = False

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(
        self, operation: Callable[..., Any], overflow: Tensor, tensor_lists: TensorLists, *args: Any
    ) -> Any:
        """Call an operation, and return ``operation(chunk_size, overflow, tensor_lists, *args)``."""
        return operation(self.chunk_size, overflow, tensor_lists, *args)


def multi_tensor_l2norm(
    chunk_size: int, overflow: Tensor | None, tensor_lists: TensorLists, per_tensor: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the L2 norm over all tensors in the first list, as an fp32 tensor of shape ``[1]``.

    Args:
        tensor_lists: one list of tensors on one device; sums are fp32 for every dtype.
        per_tensor: whether to return the norm of each tensor, ``[n]``, too.
    """
    tensors = tensor_lists[0]
    if not tensors:
        device = overflow.device if overflow is not None else None
        none = torch.zeros(1, dtype=torch.float32, device=device)
        return none, none[:0] if per_tensor else None
    each = _norms(tensors)
    return torch.linalg.vector_norm(each).reshape(1), each if per_tensor else None


def _norms_reference(tensors: list[Tensor]) -> Tensor:
    return torch.stack([tensor.detach().float().square().sum().sqrt() for tensor in tensors])


_norms = Operation("multi_tensor_l2norm", _norms_reference, group="multi_tensor")


@_norms.on("cpu", "cuda", "npu", note="`torch._foreach_norm`; CPU tensors in chunks¹")
def _norms_by_device(tensors: list[Tensor]) -> Tensor:
    """Return the L2 norm of each tensor, as an fp32 tensor ``[n]``."""
    if tensors[0].device.type == "cpu":  # also beside an accelerator: an optimizer that is offloaded
        return torch.stack([_norm_in_chunks(tensor) for tensor in tensors])
    return torch.stack(torch._foreach_norm(tensors, 2, dtype=torch.float32))


def _norm_in_chunks(tensor: Tensor) -> Tensor:
    """Return the L2 norm of a CPU tensor of any size as an fp32 scalar ``[]``, accurate to 1e-6."""
    flat = tensor.detach().reshape(-1)
    whole = flat.numel() - flat.numel() % _CHUNK
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float32)
    if not whole:
        return norm(flat)
    return norm(torch.cat([norm(flat[:whole].view(-1, _CHUNK), dim=1), norm(flat[whole:])[None]]))


def multi_tensor_scale(
    chunk_size: int, overflow: Tensor | None, tensor_lists: TensorLists, scale: float | Tensor
) -> None:
    """Multiply the tensors of the first list by ``scale``, and write the results to the tensors of the second
    list.

    The first list contains the sources.

    ``overflow`` is set if a source is inf or nan, but not if a product is; None skips the check. Products are
    computed in fp32 and rounded once, to the target's dtype.
    """
    sources, targets = tensor_lists
    in_place = []
    for source, target in zip(sources, targets, strict=True):
        if torch.promote_types(source.dtype, target.dtype) is not target.dtype:
            _scale_and_narrow(source, target, overflow, scale)
            continue
        if source is not target and source.data_ptr() != target.data_ptr():
            target.copy_(source)
        in_place.append(target)
    _scale_in_place(in_place, overflow, scale)


def _scale_and_narrow(source: Tensor, target: Tensor, overflow: Tensor | None, scale: float | Tensor) -> None:
    """Multiply in a wider dtype if the dtype of the target cannot represent the source exactly."""
    wide = torch.promote_types(torch.promote_types(source.dtype, target.dtype), torch.float32)
    product = source.to(wide, copy=True)
    _scale_in_place([product], overflow, scale)
    target.copy_(product)


def _scale_in_place(tensors: list[Tensor], overflow: Tensor | None, scale: float | Tensor) -> None:
    if overflow is None and tensors:
        torch._foreach_mul_(tensors, scale)
    elif overflow is not None:
        for (bunch,) in group_by_dtypes((tensor,) for tensor in tensors):
            unscale(bunch, overflow, scale)


def copy_all(this: list[Tensor], that: list[Tensor], overflow_buf: Tensor | None = None) -> None:
    """Copy each tensor of ``this`` to the corresponding tensor of ``that``, converting dtypes as ``copy_``
    does.

    The signature is that of Megatron's ``_multi_tensor_copy_this_to_that``, whose overflow flag is ignored,
    because copies are not checked.
    """
    if overflow_buf is not None:
        overflow_buf.fill_(0)
    if this:
        with torch.no_grad():
            torch._foreach_copy_(local_parts(that), local_parts(this))


class CopiesTogether(TorchFunctionMode):
    """Context manager that defers calls of ``copy_`` and ``float``, and performs all of them together on
    exit.

    The context manager is intended for loops over parameters in code that we do not control, which then take
    one launch in total instead of one per parameter. Code inside the context must not read the results of the
    deferred copies.
    """

    def __init__(self) -> None:
        super().__init__()
        self._rows: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Defer a copy, and return the tensor that will receive the data."""
        if func is Tensor.copy_ and not kwargs and _alike(*args):
            self._rows.append((args[0], args[1]))
            return args[0]
        if func is Tensor.float and not kwargs and args[0].dtype is not torch.float32:
            target = torch.empty_like(args[0], dtype=torch.float32)
            self._rows.append((target, args[0]))
            return target
        return func(*args, **(kwargs or {}))

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        if error[0] is None:
            for targets, sources in group_by_dtypes(self._rows):
                copy_all(sources, targets)


def _alike(target: Tensor, source: Any, *rest: Any) -> bool:
    """Return True if a call of ``copy_`` can be combined with others.

    Both tensors must be on the same device, without broadcasting.
    """
    is_tensor = isinstance(source, Tensor) and not rest
    return is_tensor and target.device == source.device and target.shape == source.shape


def local_parts(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    """Return this rank's parts of distributed (FSDP) tensors, for torch's multi-tensor functions."""
    tensors = tuple(tensors)
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    with torch.no_grad():  # then to_local is the memory itself
        return tuple(t.to_local() if hasattr(t, "to_local") else t for t in tensors)


def unscale(tensors: list[Tensor], found: Tensor, factor: float | Tensor) -> None:
    """Multiply the tensors by ``factor`` in place.

    In the same pass, set ``found`` if a value is inf or nan.

    Args:
        tensors: tensors of one dtype, on one device.
        found: one number on the device, set to 1 or left unchanged.
        factor: usually 1 / loss scale.
    """
    device = tensors[0].device
    flag = torch.zeros(1, dtype=torch.float32, device=device)
    factor = torch.as_tensor(factor, dtype=torch.float32, device=device).reshape(1)
    _scale(tensors, flag, factor)
    found.logical_or_(flag.to(torch.bool).reshape(found.shape))


def _scale_reference(tensors: list[Tensor], found: Tensor, factor: Tensor) -> None:
    """Compute ``unscale`` in plain torch; ``found`` and ``factor`` are fp32 tensors of shape ``[1]``."""
    for tensor in tensors:
        found.masked_fill_(~tensor.isfinite().all(), 1.0)
        tensor.mul_(factor)


_scale = Operation("multi_tensor_scale", _scale_reference, group="multi_tensor")
_scale.on("cpu", "npu", note="torch's loss-scaling kernel")(torch._amp_foreach_non_finite_check_and_unscale_)


@_scale.on(
    "cuda",
    note="torch's loss-scaling kernel; bf16, which it does not support, with norms and multiplications",
)
def _scale_cuda(tensors: list[Tensor], found: Tensor, factor: Tensor) -> None:
    if tensors[0].dtype is not torch.bfloat16:
        torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, factor)
        return
    if not (tensors := [tensor for tensor in tensors if tensor.numel()]):  # an empty one has no largest value
        return
    largest = torch.stack(torch._foreach_norm(tensors, float("inf")))
    found.masked_fill_(~largest.isfinite().all(), 1.0)
    torch._foreach_mul_(tensors, factor.reshape(()))


def group_by_dtypes(rows: Iterable[tuple[Tensor, ...]]) -> Iterator[tuple[list[Tensor], ...]]:
    """Yield batches of tensors for torch's fused kernels, each on one device and with one combination of
    dtypes.

    The tensors of a row are on one device; their dtypes may differ.
    """
    bunches: dict[tuple[Any, ...], list[tuple[Tensor, ...]]] = {}
    for row in rows:
        bunches.setdefault((row[0].device, *map(_dtype_of, row)), []).append(row)
    for bunch in bunches.values():
        yield tuple(list(column) for column in zip(*bunch, strict=True))


@_norms.example()
def _norms_example(make: Make) -> None:
    multi_tensor_l2norm(0, None, [[make(33, 65).detach(), make(7).detach()]])


@_scale.example()
def _scale_example(make: Make) -> None:
    source = make(33, 65).detach()
    overflow = torch.zeros(1, dtype=torch.int, device=source.device)
    multi_tensor_scale(0, overflow, [[source], [torch.empty_like(source)]], 0.5)
    if overflow.item():
        raise ArithmeticError("finite values were mistaken for inf or NaN")
