"""Fuse a language model's output layer with its loss, and compute the logits only when they are needed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_map_only

from megatron_npu import devices
from megatron_npu.ops.linear_cross_entropy import linear_cross_entropy
from megatron_npu.ops.swapping import linears
from megatron_npu.ops.swapping.found import (
    Found,
    Left,
    Replacement,
    bound_elsewhere,
    has_forward_of,
    own_forward,
)

_WHAT = "output layer"
_FEWEST_WORDS = 256  # below, logits are small, and torch's loss is as good
_WORTH_GATHERING = 0.75  # of the rows of a batch; with more of them counting, all are multiplied

# What steps turned out to do: {output layer: why its logits were made}, read by the ledger.
calls_left: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()


class Unmade(Tensor):
    """Logits ``[..., v]`` that are not computed yet, represented by hidden states, weight and bias.

    The loss uses them directly, also if they are reshaped to one row per token. Any other access to the
    values computes the logits, once, with their gradients; sizes, dtype and device are known without that.
    Until then, they have no graph (``requires_grad`` is False): wrappers such as DDP and FSDP look for a
    graph in the outputs, and the loss has it.
    """

    _layer: nn.Module
    _hidden: Tensor
    _weight: Tensor
    _bias: Tensor | None
    _seen: tuple[int, int, int]
    _made: Tensor | None
    _viewed: Unmade | None

    @staticmethod
    def __new__(
        cls,
        layer: nn.Module,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        viewed: Unmade | None = None,
    ) -> Unmade:
        """Create deferred logits from ``hidden`` ``[..., h]``, ``weight`` ``[v, h]`` and a bias ``[v]``.

        All have one dtype. ``viewed`` are the logits that these are a view of.
        """
        shape = (*hidden.shape[:-1], weight.size(0))
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=hidden.dtype, device=hidden.device)
        made._layer, made._hidden, made._weight, made._made = layer, hidden, weight, None
        made._bias, made._viewed = bias, viewed
        made._seen = _changes(weight, bias)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer queries such as the size without the logits, and compute the logits for all other torch
        functions.
        """
        if func in _KNOWN_WITHOUT:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.clone:  # which DDP does with every output; one that is returned as it is, it views
            return cls(args[0]._layer, args[0]._hidden, args[0]._weight, args[0]._bias)
        if func in (Tensor.view, Tensor.reshape) and isinstance(args[0], Unmade) and not kwargs:
            viewed = args[0]._as_rows(args[1:])
            if viewed is not None:
                return viewed
        return cls.__torch_dispatch__(func, types, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function in its place
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Compute the logits, and call ``func`` with them."""
        args, kwargs = tree_map_only(Unmade, Unmade.whole, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _as_rows(self, shape: tuple[Any, ...]) -> Unmade | None:
        """Return a view of the deferred logits whose last dimension is the vocabulary.

        Return None if another shape is requested.
        """
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        if len(sizes) < 2 or not all(isinstance(size, int) for size in sizes) or sizes[-1] != self.size(-1):
            return None
        hidden = self._hidden.reshape(*sizes[:-1], self._hidden.size(-1))
        return Unmade(self._layer, hidden, self._weight, self._bias, viewed=self)

    def losses(self, target: Tensor, ignored: int) -> Tensor | None:
        """Return the loss of each token, ``[t]``, in fp32.

        The loss is 0 where ``target`` ``[t]`` is ``ignored``.

        The result is None if a target is not in the vocabulary or the number of targets is wrong, so that
        torch's loss reports it, or if the logits have been computed and may have been changed. On a CPU,
        ignored rows are skipped.
        """
        if self._is_made():
            return None
        counts = target != ignored
        if target.numel() * self.size(-1) != self.numel():
            return None
        rows = self._hidden.reshape(-1, self._hidden.size(-1))
        if target.device.type == "cpu":
            if bool((counts & ~_between(target, self.size(-1))).any()):
                return None
            alive = counts.nonzero().squeeze(1)
            if 0 < alive.numel() < _WORTH_GATHERING * counts.numel():
                found = self._losses_of(rows.index_select(0, alive), target[alive])
                return found.new_zeros(target.shape).index_copy(0, alive, found)
        return self._losses_of(rows, target.masked_fill(~counts, 0)).masked_fill(~counts, 0.0)

    def _losses_of(self, rows: Tensor, target: Tensor) -> Tensor:
        return linear_cross_entropy(rows, self._weight, target, bias=self._bias, recompute=False)

    def _is_made(self) -> bool:
        return self._made is not None or (self._viewed is not None and self._viewed._is_made())

    def whole(self) -> Tensor:
        """Compute the logits, and return them.

        Raises:
            RuntimeError: the weights changed before the logits were first used.
        """
        if self._made is None and self._viewed is not None:
            with torch.enable_grad():
                self._made = self._viewed.whole().view(self.shape)
        if self._made is None:
            weight, bias = self._weight, self._bias
            put_away = not weight.untyped_storage().size()  # a shard
            if put_away or self._seen != _changes(weight, bias):
                raise RuntimeError(
                    "the logits of this training step were not computed, and the weights have changed since "
                    "then. Read the logits before optimizer.step()."
                )
            calls_left.setdefault(self._layer, "a training step reads or changes its logits")
            with torch.enable_grad():
                self._made = F.linear(self._hidden, weight, bias)
        return self._made


class _Steps:
    """Counter of the steps that all optimizers of this process have performed."""

    def __init__(self) -> None:
        self.taken = 0
        register_optimizer_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.taken += 1


_steps = functools.cache(_Steps)


def _changes(weight: Tensor, bias: Tensor | None) -> tuple[int, int, int]:
    """Return values that differ after the weight or the bias has changed.

    Multi-tensor functions of torch_npu 2.13 (``_foreach_add_``), which optimizers call, do not count as
    changes in ``_version``; on an NPU, any optimizer's step therefore counts as one.
    """
    of_bias = 0 if bias is None else bias._version
    if weight.device.type != "npu":
        return weight._version, of_bias, 0
    return weight._version, of_bias, _steps().taken


def _between(target: Tensor, words: int) -> Tensor:
    return (target >= 0) & (target < words)


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_KNOWN_WITHOUT = {
    *map(_getter, ("shape", "dtype", "device", "layout", "ndim", "is_sparse", "is_quantized", "is_nested")),
    *map(_getter, ("requires_grad", "grad_fn", "is_leaf", "is_cpu", "is_cuda", "is_meta")),
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.get_device),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.__len__, Tensor.__hash__),
}


def recognise(model: Any) -> tuple[str, Found]:
    """Return the path of a model's output layer, with its replacement or the reason why it is left unchanged.

    Args:
        model: a model whose vocabulary loss has been replaced with ours.
    """
    layer = getattr(model, "get_output_embeddings", lambda: None)()
    path = next((name for name, module in model.named_modules() if module is layer), "")
    if layer is None:
        return "", None
    if not has_forward_of(layer, nn.Linear):
        return path, Left(_WHAT, f"{type(layer).__name__} is not a plain linear layer")
    if layer.bias is not None and not devices.current().is_host:
        return path, Left(_WHAT, "it has a bias, which only the CPU implementation of the loss supports")
    if layer.weight.size(0) < _FEWEST_WORDS:
        return path, Left(_WHAT, f"its vocabulary has fewer than {_FEWEST_WORDS} tokens")
    fast = isinstance(linears.recognise(layer), Replacement)
    forward = _of_linear_operation if fast else _of_torch
    return path, Replacement(_WHAT, "linear_cross_entropy, fused with the loss", forward)


def has_taken(module: nn.Module) -> bool:
    """Return True if a module is an output layer whose forward method is already replaced."""
    return getattr(vars(module).get("forward"), "__func__", None) in (_of_linear_operation, _of_torch)


def _of_linear_operation(module: Any, input: Tensor) -> Tensor:
    return _logits(module, input, linears.forward)


def _of_torch(module: Any, input: Tensor) -> Tensor:
    return _logits(module, input, own_forward)


def _logits(module: Any, input: Tensor, plain: Callable[[Any, Tensor], Tensor]) -> Tensor:
    """Return the logits, or deferred logits if gradients are needed.

    Logits with gradients are for a loss.
    """
    weight: Tensor = module.weight
    bias: Tensor | None = module.bias
    given: tuple[Tensor, ...] = (input, weight) if bias is None else (input, weight, bias)
    if not _is_for_a_loss(module, given):
        return plain(module, input)
    if torch.is_autocast_enabled(input.device.type):
        dtype = torch.get_autocast_dtype(input.device.type)
        given = tuple(each.to(dtype) for each in given)
    return Unmade(module, *given) if len({each.dtype for each in given}) == 1 else plain(module, input)


def _is_for_a_loss(module: Any, given: tuple[Tensor, ...]) -> bool:
    """Return True if the logits need gradients, and no code is known that reads all of the logits.

    Args:
        module: the output layer.
        given: its input, its weight and its bias.
    """
    learns = torch.is_grad_enabled() and any(each.requires_grad for each in given)
    if not learns or bound_elsewhere(given[0]) or torch.jit.is_tracing():
        return False
    if module._forward_pre_hooks or module._forward_hooks:  # DeepSpeed's ZeRO-3 puts the weight away in one
        calls_left.setdefault(module, "it has hooks, which may use its output or its weight")
        return False
    return True
