"""Check the values that a template's methods return.

These methods are written by users, so errors name the class, the method and the expected value.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data.loading import Collate, require_length


class Datasets(NamedTuple):
    """The result of ``train_valid_test_datasets_provider``.

    Every split except the first may be None.
    """

    train: Any
    valid: Any
    test: Any
    collate_fn: Collate | None


def datasets(template: Any, *given: Any, collates: bool) -> Datasets:
    """Call a template's ``train_valid_test_datasets_provider``, and check the result.

    Args:
        template: the template.
        given: arguments of the call.
        collates: whether a fourth value is required; otherwise it is optional.

    Raises:
        UsageError: the method returns other values, or a method has a different signature.
    """
    _require_signatures(template, given)
    method = template.train_valid_test_datasets_provider
    returned = method(*given)
    sizes = (4,) if collates else (3, 4)
    expected = "train_dataset, valid_dataset, test_dataset" + (", collate_fn" if collates else "")
    if not isinstance(returned, tuple | list) or len(returned) not in sizes:
        raise _wrong(method, returned, expected)
    found = Datasets(*returned, *[None] * (4 - len(returned)))
    if found.collate_fn is not None:
        if not callable(found.collate_fn):
            expected = "a function that collates samples into a batch as the fourth value"
            raise _wrong(method, found.collate_fn, expected)
        _require_one_argument(method, found.collate_fn)
    for name in ("train", "valid", "test"):
        dataset = getattr(found, name)
        if name == "train" or dataset is not None:
            require_length(dataset, f"{name}_dataset, which {_name(method)} returns,")
    return found


def model(template: Any) -> tuple[nn.Module, Any, Any]:
    """Call a template's ``model_optimizer_lr_scheduler_provider``, and check the result.

    Its last two results may be None.

    Raises:
        UsageError: the method returns other values.
    """
    method = template.model_optimizer_lr_scheduler_provider
    returned = method()
    if not isinstance(returned, tuple | list) or len(returned) != 3:
        raise _wrong(method, returned, "model, optimizer, lr_scheduler (the last two may be None)")
    found, optimizer, scheduler = returned
    if not isinstance(found, nn.Module):
        raise _wrong(method, found, "a torch.nn.Module", "first value")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer) and not callable(optimizer):
        raise _wrong(method, optimizer, "an optimizer, a function that creates one, or None", "second value")
    if scheduler is not None and not is_scheduler(scheduler) and not callable(scheduler):
        raise _wrong(method, scheduler, "a scheduler, a function that creates one, or None", "third value")
    return found, optimizer, scheduler


def loss(template: Any, returned: Any, *, training: bool = True) -> torch.Tensor:
    """Check that the result of ``run_forward_step`` is a valid loss, and return it.

    Raises:
        UsageError: the result is not a loss.
    """
    method = template.run_forward_step
    if not isinstance(returned, torch.Tensor):
        raise _wrong(method, returned, "the loss as a tensor with one element, such as output.loss")
    if returned.numel() != 1:
        raise _wrong(method, returned, "the loss as a single value, such as the mean of these values")
    if not returned.is_floating_point():
        raise _wrong(method, returned.dtype, "the loss as a floating-point tensor")
    if training and not returned.requires_grad:
        raise _wrong(
            method,
            returned,
            "a loss that depends on the model's weights (computed without .item() or .detach())",
        )
    return returned.reshape(())


def losses(
    template: Any, returned: Any, number: int | None, *, training: bool = True
) -> tuple[torch.Tensor, ...]:
    """Check the losses that ``run_forward_step`` has returned, and return them.

    Args:
        template: the template.
        returned: the result of the method.
        number: the expected number of losses, from ``label_counts``. If None, a single loss that is not in a
            tuple is expected.
        training: whether the losses must depend on the model's weights.

    Raises:
        UsageError: the returned values are not losses, or their number is not the expected one.
    """
    if number is None:
        return (loss(template, returned, training=training),)
    if not isinstance(returned, tuple) or len(returned) != number:
        method, what = (
            template.run_forward_step,
            f"{number} losses, one for each number that label_counts returns",
        )
        raise _wrong(method, returned, what)
    return tuple(loss(template, one, training=training) for one in returned)


def metrics(template: Any, returned: Any) -> dict[str, float]:
    """Return the result of ``run_compute_metrics`` as a dictionary of numbers.

    Raises:
        UsageError: the result is neither a dictionary of numbers, nor a number, nor None.
    """
    method = template.run_compute_metrics
    if returned is None:
        return {}
    named = returned if isinstance(returned, Mapping) else {"metric": returned}
    try:
        return {str(name): float(value) for name, value in named.items() if value is not None}
    except (TypeError, ValueError):
        raise _wrong(method, returned, "a dictionary that maps names to numbers") from None


def as_module(given: Any) -> nn.Module:
    """Check the model that was passed to ``compose``, and return it.

    Raises:
        UsageError: the model is not a module.
    """
    if not isinstance(given, nn.Module):
        raise UsageError(
            f"engine.compose requires model_obj to be a torch.nn.Module, but got {type(given).__name__}. "
            "Pass the model."
        )
    empty = next((name for name, weight in given.named_parameters() if weight.is_meta), None)
    if empty is not None:
        raise UsageError(
            f"the weight {empty!r} of the {type(given).__name__} is on the meta device and has no values; "
            "the model's weights must be initialized. Build the model outside torch.device('meta')."
        )
    return given


def as_scheduler_fn(given: Any, optimizer: Any) -> Callable[[torch.optim.Optimizer], Any] | None:
    """Return a function that creates the user's scheduler, or None if there is no scheduler.

    Raises:
        UsageError: the user passed a scheduler that was created for another optimizer.
    """
    if given is None or not is_scheduler(given):
        return given
    if getattr(given, "optimizer", None) is not optimizer:
        raise UsageError(
            f"the returned scheduler ({type(given).__name__}) was created for another optimizer. Return a "
            "scheduler for the returned optimizer, or a function that creates one from an optimizer, such "
            "as functools.partial(get_linear_schedule_with_warmup, ...)."
        )
    return lambda made: given


def is_scheduler(value: Any) -> bool:
    """Return True if a value is a scheduler object."""
    return isinstance(value, LRScheduler | ReduceLROnPlateau)


def missing(template: Any, name: str, returns: str) -> UsageError:
    """Return the error for a method that a template does not define."""
    return UsageError(
        f"{type(template).__name__} must define the method {name}, which returns {returns}. Define this "
        "method."
    )


def _require_signatures(template: Any, given: tuple[Any, ...]) -> None:
    """Check, before the first call, that the methods of a template accept their arguments."""
    calls: dict[str, tuple[Any, ...]] = {
        "train_valid_test_datasets_provider": given,
        "model_optimizer_lr_scheduler_provider": (),
        "run_forward_step": (None, None),
        "run_compute_metrics": (None, None),
    }
    for name, arguments in calls.items():
        method = getattr(template, name, None)
        if method is None:
            continue
        try:
            inspect.signature(method).bind(*arguments)
        except TypeError as error:
            raise UsageError(
                f"{_name(method)}{inspect.signature(method)} must accept {len(arguments)} "
                f"argument{'s' * (len(arguments) != 1)} besides self, but calling it fails: {error}. Use "
                "the signature of the template."
            ) from None


def _require_one_argument(method: Any, collate: Any) -> None:
    """Check that a collate function accepts a list of samples as its only argument."""
    try:
        inspect.signature(collate).bind([])
    except TypeError as error:
        raise UsageError(
            f"{_name(method)} returned a collate_fn that cannot be called with a list of samples: {error}. "
            "It must accept the list of samples as its only argument. Bind the other arguments with "
            "functools.partial."
        ) from None
    except ValueError:  # of C, whose signature nobody can say
        return


def _wrong(method: Any, returned: Any, expected: str, which: str = "") -> UsageError:
    kind = _kind(returned)
    where = f" as its {which}" if which else ""
    return UsageError(
        f"{_name(method)} must return {expected}{where}, but it returned {kind}. Correct what it returns."
    )


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, torch.dtype):
        return f"a tensor of {value}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, tuple | list):
        return f"{len(value)} value{'s' * (len(value) != 1)}"
    return f"a {type(value).__name__}"


def _name(method: Any) -> str:
    return f"{type(method.__self__).__name__}.{method.__name__}"
