"""Find the statements in the source of a module that define a symbol."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator
from typing import Any

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SCOPES = (*FUNCTIONS, ast.ClassDef)


def locate(tree: ast.Module, qualname: str) -> list[ast.stmt]:
    """Return every statement of ``tree`` that defines ``qualname``, in source order.

    Conditional definitions (``if``, ``try``, ``with``, loops) are included. An import is reduced to the name
    in question; a star import counts for names that nothing else defines. An inherited method is searched in
    base classes in the same file; if a base class is defined elsewhere, the class header represents it. An
    empty list means that the symbol does not exist.
    """
    *path, name = qualname.split(".")
    scopes: list[Any] = [tree]
    for part in path:
        scopes = [node for scope in scopes for node in bindings(scope.body, part)]
        scopes = [node for node in scopes if isinstance(node, ast.ClassDef)]
    found = [node for scope in scopes for node in bindings(scope.body, name)]
    if found:
        return found
    if not path:
        return [node for node in _statements(tree.body) if _is_star_import(node)]
    return [node for scope in scopes for node in _inherited(tree, scope, name, frozenset())]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are executed in the scope of ``body``, including those in nested blocks."""
    for node in body:
        yield node
        if isinstance(node, SCOPES):
            continue
        yield from _statements(getattr(node, "body", ()))
        for clause in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(clause.body)
        yield from _statements(getattr(node, "orelse", ()))
        yield from _statements(getattr(node, "finalbody", ()))


def bindings(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    bound = (_binding(node, name) for node in _statements(body))
    return [node for node in bound if node is not None]


def _binding(node: ast.stmt, name: str) -> ast.stmt | None:
    """Return ``node``, reduced to one name if it is an import, if it binds ``name``, and None otherwise."""
    if isinstance(node, SCOPES):
        return node if node.name == name else None
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return _imported(node, name)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return None
    targets: list[Any] = list(getattr(node, "targets", ())) if not isinstance(node, ast.Delete) else []
    if isinstance(node, (ast.AnnAssign, ast.AugAssign, ast.For, ast.AsyncFor)):
        targets.append(node.target)
    if isinstance(node, (ast.With, ast.AsyncWith)):
        targets += [item.optional_vars for item in node.items if item.optional_vars]
    return node if any(name in plain_names(target) for target in targets) else None


def plain_names(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Starred):
        return plain_names(target.value)
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return {name for part in parts for name in plain_names(part)}


def _imported(node: ast.Import | ast.ImportFrom, name: str) -> ast.stmt | None:
    for alias in node.names:
        first = alias.name.partition(".")[0] if isinstance(node, ast.Import) else alias.name
        if (alias.asname or first) == name:
            narrowed = copy.copy(node)
            narrowed.names = [alias]
            return narrowed
    return None


def _is_star_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and node.names[0].name == "*"


def _inherited(tree: ast.Module, cls: ast.ClassDef, name: str, seen: frozenset[str]) -> list[ast.stmt]:
    """Return the statements that bind ``name`` in the base classes of ``cls``.

    If a base class is in another file, return the header of ``cls`` instead.
    """
    elsewhere = False
    for base in cls.bases:
        label = ast.unparse(base)
        local = [node for node in bindings(tree.body, label) if isinstance(node, ast.ClassDef)]
        if label in seen:
            continue
        for node in local:
            found = bindings(node.body, name) or _inherited(tree, node, name, seen | {label})
            if found:
                return found
        elsewhere = elsewhere or (not local and label != "object")
    if not elsewhere:
        return []
    header = copy.copy(cls)
    header.body = []
    return [header]
