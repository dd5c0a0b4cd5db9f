"""Determine which upstream parameters a wrapper uses, and whether they have changed.

A wrapper names the parameters that it uses and passes the other parameters on. Changes to other parameters do
not affect it, but changes to named ones do. How it uses ``*args`` and ``**kwargs`` is determined from its
source.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

_SIGNATURE = re.compile(r"(?P<marks>(?:@\S+ )*)(?P<word>async def|def) (?P<name>\w+)\((?P<parameters>.*)\)")
_REQUIRED = ""  # the text of a default that there is not


class _Unknown(Exception):  # noqa: N818 - the name says what it is
    """Raised when it cannot be determined which parameters a function accepts or uses."""


@dataclass
class Use:
    """The parameters of upstream that a wrapper function uses.

    Attributes:
        own: the name of each positional parameter, and whether it has a default, in order.
        positions: the number of leading parameters on which the function depends, including those that it
            reads from ``*args``.
        read: the positions that it reads from ``*args``, with a default for those not given.
        names: the parameters that it reads by name, and whether it has a default if they are not given.
        hands_on_positions, hands_on_names: whether it has ``*args`` and ``**kwargs``.
    """

    own: list[tuple[str, bool]]
    positions: int
    read: set[int] = field(default_factory=set)
    names: dict[str, bool] = field(default_factory=dict)
    hands_on_positions: bool = False
    hands_on_names: bool = False

    def assumes_default(self, position: int) -> bool:
        """Return True if the function itself has a default for the parameter at ``position``."""
        return self.own[position][1] if position < len(self.own) else position in self.read


def use_of(function: Any) -> Use | None:
    """Return the parameters of upstream that ``function`` uses, or None if they cannot be determined.

    The first parameter, which receives the original, is not included.
    """
    if not isinstance(function, FunctionType):
        return None
    try:
        node = _definition(function)
        return _use(node)
    except (_Unknown, OSError, SyntaxError, TypeError):
        return None


def _definition(function: FunctionType) -> ast.FunctionDef:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    node = tree.body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != function.__code__.co_name:
        raise _Unknown
    return node


def _use(node: ast.FunctionDef) -> Use:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if not positional:
        raise _Unknown
    required = len(positional) - len(arguments.defaults)
    own = [(each.arg, number >= required) for number, each in enumerate(positional)][1:]
    use = Use(own, len(own), hands_on_positions=bool(arguments.vararg), hands_on_names=bool(arguments.kwarg))
    for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        use.names[each.arg] = default is not None
    for call in _calls_of(positional[0].arg, node):
        use.positions = max(use.positions, _leading(call))
        for keyword in call.keywords:
            if keyword.arg is not None:
                use.names.setdefault(keyword.arg, False)
    if arguments.vararg:
        _read_positions(arguments.vararg.arg, node, use)
    if arguments.kwarg:
        _read_names(arguments.kwarg.arg, node, use)
    return use


def _calls_of(name: str, node: ast.AST) -> Iterator[ast.Call]:
    for each in ast.walk(node):
        if isinstance(each, ast.Call) and _is(each.func, name):
            yield each


def _leading(call: ast.Call) -> int:
    """Return the number of positional arguments of a call before its first starred argument."""
    starred = (number for number, each in enumerate(call.args) if isinstance(each, ast.Starred))
    return next(starred, len(call.args))


def _is(node: ast.AST | None, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _uses(name: str, node: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the parent and the grandparent of every node inside ``node`` that uses ``name``."""
    parents = {child: parent for parent in ast.walk(node) for child in ast.iter_child_nodes(parent)}
    for each in parents:
        if _is(each, name):
            yield parents[each], parents[parents[each]]


def _read_positions(rest: str, node: ast.FunctionDef, use: Use) -> None:
    """Record the positions of arguments that are read from ``*rest``.

    Raises:
        _Unknown: ``rest`` is used in a way that cannot be analyzed.
    """
    for part, _ in _uses(rest, node):
        if isinstance(part, ast.Starred) or _is_call(part, "any", "len"):
            continue  # handed on; whether one is set, or how many there are
        index = part.slice if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load) else None
        if not isinstance(index, ast.Constant) or not isinstance(index.value, int) or index.value < 0:
            raise _Unknown
        position = len(use.own) + index.value
        use.read.add(position)
        use.positions = max(use.positions, position + 1)


def _read_names(rest: str, node: ast.FunctionDef, use: Use) -> None:
    """Record the names of arguments that are read from ``**rest``.

    Raises:
        _Unknown: ``rest`` is used in a way that cannot be analyzed.
    """
    for part, whole in _uses(rest, node):
        if isinstance(part, ast.keyword) or (isinstance(part, ast.Attribute) and part.attr == "values"):
            continue  # handed on; whatever they are called
        name = _name_read(part, whole)
        if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
            raise _Unknown  # names of a table, for instance
        assumes = not isinstance(part, ast.Subscript)  # which fails without it
        use.names[name.value] = use.names.get(name.value, False) or assumes


def _name_read(part: ast.AST, whole: ast.AST) -> ast.expr | None:
    """Return the expression for the argument name in ``rest.get(name)``, ``rest[name]`` or ``name in
    rest``.
    """
    if isinstance(part, ast.Attribute) and part.attr in ("get", "pop") and isinstance(whole, ast.Call):
        return whole.args[0] if whole.args else None
    if isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Load):
        return part.slice
    if isinstance(part, ast.Compare) and isinstance(part.ops[0], (ast.In, ast.NotIn)):
        return part.left
    return None


def _is_call(node: ast.AST, *names: str) -> bool:
    return isinstance(node, ast.Call) and any(_is(node.func, name) for name in names)


# --- upstream's side ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    """The pinned signature of an upstream function.

    Defaults are stored as source text, which is empty if there is none.
    """

    head: str
    positional: list[tuple[str, str]]
    keyword: dict[str, str]
    rest: bool
    rest_by_name: bool

    @property
    def defaults(self) -> dict[str, str]:
        return dict(self.positional) | self.keyword

    def at(self, position: int) -> tuple[str, str] | None:
        """Return the name and the default of the parameter at a position, or None if there is none."""
        return self.positional[position] if position < len(self.positional) else None


def _read(signature: str) -> _Function:
    """Parse a signature that is given as a string.

    Raises:
        _Unknown: the string is not the signature of a single function.
    """
    found = _SIGNATURE.fullmatch(signature)
    try:
        node = ast.parse(f"def f({found['parameters']}): ...").body[0] if found else None
    except SyntaxError:
        raise _Unknown from None
    if found is None or not isinstance(node, ast.FunctionDef):
        raise _Unknown
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args)]
    defaults = [_REQUIRED] * (len(names) - len(arguments.defaults)) + [*map(ast.unparse, arguments.defaults)]
    by_name = {
        each.arg: ast.unparse(default) if default else _REQUIRED
        for each, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    }
    return _Function(
        f"{found['marks']}{found['word']} {found['name']}",
        list(zip(names, defaults, strict=True)),
        by_name,
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def conflict(use: Use | None, old: str, new: str) -> str | None:
    """Describe how a difference between two upstream signatures affects a wrapper, or return None if it has
    no effect.

    Args:
        use: the parameters that the function uses. If None, these are unknown, so every change counts.
        old: the signature for which the function was written.
        new: the current signature.
    """
    if use is None:
        return "the parameters that our function uses cannot be determined"
    try:
        was, now = _read(old), _read(new)
    except _Unknown:
        return "the original is not a single function"
    if was.head != now.head:
        return f"{was.head} became {now.head}"
    found = (*_by_position(use, was, now), *_by_name(use, was, now), *_not_taken(use, was, now))
    return next(iter(found), None)


def _by_position(use: Use, was: _Function, now: _Function) -> Iterator[str]:
    for position in range(use.positions):
        before, after = was.at(position), now.at(position)
        if before is None and after is None:
            return
        own = position < len(use.own)
        expected = before[0] if before else use.own[position][0] if own else ""  # ours: of another version
        if after is None:
            yield f"{expected} can no longer be passed by position"
        elif after[0] != expected:
            yield f"{after[0]} is now at the position of {expected or 'nothing'}"
        elif before:
            yield from _of_place(before, after[1], use.assumes_default(position), own)


def _of_place(before: tuple[str, str], default: str, assumes: bool, own: bool) -> Iterator[str]:
    """Yield the effects of changed defaults of parameters that have kept their position."""
    if assumes:
        yield from _of_default(*before, default)
    elif before[1] == _REQUIRED != default and own:
        yield f"{before[0]} is now optional"


def _by_name(use: Use, was: _Function, now: _Function) -> Iterator[str]:
    for name, assumes in use.names.items():
        if name not in was.defaults:  # of another version
            continue
        if name not in now.defaults:
            yield f"{name} was removed"
        elif assumes:
            yield from _of_default(name, was.defaults[name], now.defaults[name])


def _of_default(name: str, before: str, after: str) -> Iterator[str]:
    if after not in (_REQUIRED, before):
        yield (
            f"the default of {name} changed from {before} to {after}" if before else f"{name} is now optional"
        )


def _not_taken(use: Use, was: _Function, now: _Function) -> Iterator[str]:
    """Yield the new parameters of upstream that callers cannot pass through the wrapper."""
    ours = {name for name, _ in use.own} | use.names.keys()
    by_position_alone = now.positional[:1] == [("ctx", _REQUIRED)]  # torch calls an autograd function so
    for name in now.defaults:
        if name in was.defaults or name in ours:
            continue
        if not (use.hands_on_names or (by_position_alone and use.hands_on_positions)):
            yield f"{name} is new, and our function does not accept it"
    if now.rest > was.rest and not use.hands_on_positions:
        yield "our function does not accept the new *args"
    if now.rest_by_name > was.rest_by_name and not use.hands_on_names:
        yield "our function does not accept the new **kwargs"
