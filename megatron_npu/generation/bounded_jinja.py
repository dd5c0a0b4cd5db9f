"""Limit the memory that a Jinja template may use.

Jinja's sandbox limits what a template may call, but not how much it creates: ``"a".ljust(10**9)`` is one
call. Each text or list that a template creates is therefore paid from a budget, before it is created where
its size may be a multiple of what is already there.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.runtime import LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MOST = 1 << 26  # bytes of a value
TOTAL = 1 << 31  # bytes of all values that a text creates
_ITEM = 8  # bytes of an item of a list
_EACH = ("expandtabs", "indent")  # add a width at each tab or line
_WIDE = (*_EACH, "center", "ljust", "rjust", "zfill", "batch")  # have a width
_budget: ContextVar[list[float]] = ContextVar("budget")


@contextlib.contextmanager
def spending() -> Iterator[None]:
    """Limit what is created in the ``with`` block to ``TOTAL`` bytes."""
    token = _budget.set([TOTAL])
    try:
        yield
    finally:
        _budget.reset(token)


def spend(size: float) -> None:
    """Pay for a value.

    Raises:
        SecurityError: the value is larger than ``MOST``, or the budget is used up.
    """
    left = _budget.get(None) or [TOTAL]
    left[0] -= size
    if size > MOST or left[0] < 0:
        raise SecurityError("the template would create values that are too large")


def size_of(value: Any, most: float = MOST) -> float:
    """Return about how many bytes a value has as a text; more than ``most`` if it has more."""
    if isinstance(value, str | bytes):
        return len(value) if isinstance(value, bytes) or value.isascii() else 4 * len(value)
    if isinstance(value, int):
        return value.bit_length() / 3
    if not isinstance(value, list | tuple | dict | set | frozenset):
        return _ITEM
    total: float = _ITEM * (1 + len(value))
    items = [*value, *value.values()] if isinstance(value, dict) else value
    for item in items if total <= most else ():
        total += size_of(item, most - total)
        if total > most:
            break
    return total


class _Code(CodeGenerator):
    """A generator of code that calls the environment for slices and for ``~``, which Jinja inlines."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write a call of ``concat``."""
        self.write("environment.joined((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        """Write a call of ``sliced`` for a slice."""
        if not isinstance(node.arg, nodes.Slice):
            super().visit_Getitem(node, frame)
            return
        self.write("environment.sliced(")
        self.visit(node.node, frame)
        for each in (node.arg.start, node.arg.stop, node.arg.step):
            self.write(", ")
            self.write("None") if each is None else self.visit(each, frame)
        self.write(")")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A Jinja sandbox whose templates pay for each value.

    Constants are not computed when a template is compiled, because no limit of time applies there.

    Args:
        options: of Jinja's environment.
    """

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Code

    def __init__(self, **options: Any) -> None:
        super().__init__(optimized=False, finalize=_paid, **options)
        for name in [*self.filters]:
            self.add_filter(name, self.filters[name])

    def add_filter(self, name: str, function: Callable[..., Any]) -> None:
        """Add a filter that pays for its result."""
        first = hasattr(function, "jinja_pass_arg")  # Jinja passes a context before the value

        @functools.wraps(function)  # with Jinja's marks of what it is passed
        def paying(*arguments: Any, **options: Any) -> Any:
            before, given = arguments[:first], [_listed(each) for each in arguments[first:]]
            spend(_size_of_call(name, given, options))
            return _paid(function(*before, *given, **options))

        self.filters[name] = paying

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator of ``intercepted_binops``."""
        spend(_size_of_operator(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def call(self, context: Any, function: Any, /, *arguments: Any, **options: Any) -> Any:  # type: ignore[override]
        """Call a function or method."""
        owner = getattr(function, "__self__", None)
        given = arguments
        if isinstance(owner, str):
            given = tuple(map(_listed, arguments))
            spend(_size_of_call(function.__name__, [owner, *given], options))
        return _paid(super().call(context, function, *given, **options))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the safe form of ``str.format``, which pays for its result."""
        safe = super().wrap_str_format(value)
        if safe is None:
            return None

        def paying(*arguments: Any, **options: Any) -> str:
            spend(_size_of_format(value.__self__, [*arguments, *options.values()]))
            return safe(*arguments, **options)

        return paying

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]
        """Join the parts of a text."""
        found = [*parts]
        spend(sum(map(size_of, found)))
        return "".join(found)

    def joined(self, parts: Iterable[Any]) -> str:
        """Join values as ``~`` does."""
        return self.concat([str(_paid(each)) for each in parts])

    def sliced(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """Return a slice of a value."""
        return _paid(value[start:stop:step])


def _paid(value: Any) -> Any:
    spend(size_of(value))
    return value


def _size_of_operator(operator: str, left: Any, right: Any) -> float:
    if operator == "**":
        return size_of(left) * max(right, 1) if isinstance(right, int) and isinstance(left, int) else 0
    if operator == "%":
        return _size_of_format(left, [right]) if isinstance(left, str) else 0
    return size_of(left) + size_of(right) if operator == "+" else _size_of_product(left, right)


def _size_of_product(left: Any, right: Any) -> float:
    value, times = (right, left) if isinstance(left, int) else (left, right)
    if isinstance(value, int):
        return size_of(value) + size_of(times)
    return size_of(value) * max(times, 0) if isinstance(times, int) else 0


def _listed(value: Any) -> Any:
    """Return the items of a generator, whose size would be unknown, and any other value as it is."""
    return [*value] if isinstance(value, Iterator) and not isinstance(value, LoopContext) else value


def _size_of_call(name: str, given: Sequence[Any], options: dict[str, Any]) -> float:
    """Return about how many bytes the result of a filter or of a method of a text has.

    Args:
        name: of the filter or method.
        given: the value or text, and the arguments.
        options: named arguments.
    """
    value, others = given[0], [*given[1:], *options.values()]
    known = size_of(value)
    if name == "format":
        return _size_of_format(value, others)
    if name == "replace":
        old, new = (*map(str, others[:2]), "", "")[:2]
        return known + (str(value).count(old) * size_of(new) if known <= MOST else 0)
    if name == "join":  # both orders, of the filter and of the method
        return known + max(map(size_of, others), default=0.0) + _separators(value, others)
    width = max((each for each in others if isinstance(each, int)), default=0)
    if name == "tojson":
        return known * (1 + width)
    if name in _WIDE:
        return known + width * (_breaks(value) if name in _EACH else 1)
    if name in ("translate", "wordwrap"):
        return known * max(map(size_of, others), default=1)
    return known


def _separators(value: Any, others: Sequence[Any]) -> float:
    """Return the size of all separators of ``text.join(items)`` or ``items|join(text)``, in bytes."""
    texts = [each for each in (value, *others) if isinstance(each, str)]
    items = [len(each) for each in (value, *others) if isinstance(each, str | list | tuple | dict)]
    return max(items, default=0) * min(map(size_of, texts), default=0.0)


def _breaks(value: Any) -> int:
    return 1 + str(value).count("\n") + str(value).count("\t") if size_of(value) <= MOST else 1


def _size_of_format(text: Any, values: Iterable[Any]) -> float:
    """Return about how many bytes a text has at most when values are formatted into it."""
    fields = str(text).count("%") + str(text).count("{")
    widths = sum(int(digits[:20]) for digits in re.findall(r"[0-9]+", str(text)))
    given = [item for each in values for item in (each if isinstance(each, tuple | list) else [each])]
    is_width = re.search(r"\*|\{[^}]*\{", str(text)) is not None  # of an integer that is given
    sizes = (each if is_width and isinstance(each, int) else size_of(each) for each in given)
    return size_of(text) + widths + fields * max(sizes, default=0.0)
