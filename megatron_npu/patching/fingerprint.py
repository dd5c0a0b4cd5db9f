"""Compute the fingerprint of a symbol's source: a hash of its meaning, and its signature as a string."""

from __future__ import annotations

import ast
import copy
import hashlib
from collections.abc import Iterable
from typing import Any

from megatron_npu.patching.symbols import FUNCTIONS, SCOPES, bindings, plain_names

# Fields that say nothing about meaning, or that Python versions fill differently.
_SILENT_FIELDS = frozenset({"ctx", "type_comment", "kind", "annotation", "returns"})


def fingerprint(nodes: Iterable[ast.AST]) -> str:
    """Return a hash of syntax trees that depends on the code's meaning and not on its formatting.

    Positions, comments, docstrings and annotations are ignored. The hashed text has our own format, so unlike
    that of ``ast.dump`` it does not depend on the Python version.
    """
    text = "\n".join(_dump(node) for node in nodes)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _dump(value: Any) -> str:
    if isinstance(value, ast.Constant):
        return f"{type(value.value).__name__}:{value.value!a}"
    if isinstance(value, ast.AST):
        fields = ((name, _meaning(value, name, content)) for name, content in ast.iter_fields(value))
        told = [f"{name}={_dump(content)}" for name, content in fields if content not in (None, [])]
        return f"{type(value).__name__}({','.join(told)})"
    if isinstance(value, list):
        return f"[{','.join(map(_dump, value))}]"
    return ascii(value)


def _meaning(node: ast.AST, name: str, content: Any) -> Any:
    """Return the part of a field in a syntax tree that affects its meaning.

    Parameter annotations and docstrings are dropped.

    f-strings are normalized.
    """
    if name in _SILENT_FIELDS and not (name == "annotation" and isinstance(node, ast.AnnAssign)):
        return None
    if name == "body" and isinstance(node, SCOPES):
        return content[1:] if ast.get_docstring(node, clean=False) is not None else content
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _merged(content)
    return content


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string, with adjacent literals joined.

    Python versions split them differently.
    """
    merged: list[Any] = []
    for value in values:
        if isinstance(value, ast.Constant):
            if merged and isinstance(merged[-1], ast.Constant):
                value = ast.Constant(merged.pop().value + value.value)
            if not value.value:
                continue
        merged.append(value)
    return merged


def signature(node: ast.AST) -> str:
    """Return the signature of a function or class as a string.

    The signature consists of a function's parameters and defaults (with static, class and property
    decorators), a class's bases and constructor, an import statement, or the names that an assignment binds.
    """
    if isinstance(node, FUNCTIONS):
        word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{_marks(node)}{word} {node.name}({_parameters(node.args)})"
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in [*node.bases, *node.keywords]]
        constructor = [signature(init) for init in bindings(node.body, "__init__")]
        return " ".join([f"class {node.name}({', '.join(bases)})", *constructor])
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return ast.unparse(node)
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    names = sorted(name for target in targets if target is not None for name in plain_names(target))
    return f"{', '.join(names)} = ..."


def _marks(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    decorators = (ast.unparse(decorator) for decorator in node.decorator_list)
    accessors = (".setter", ".getter", ".deleter")
    kept = [
        text
        for text in decorators
        if text in ("staticmethod", "classmethod", "property") or text.endswith(accessors)
    ]
    return "".join(f"@{text} " for text in kept)


def _parameters(arguments: ast.arguments) -> str:
    bare = copy.deepcopy(arguments)
    for node in ast.walk(bare):
        if isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(bare)
