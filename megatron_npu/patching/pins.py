"""Pins: what an upstream symbol looked like when a patch was written against it.

Everything is read from source files; nothing is imported or executed. A pin file belongs to one version
of one upstream. A symbol may equal the pin of any version of its upstream: what was right for one of them is
known to be right.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron_npu.patching.own_parameters import conflict, use_of
from megatron_npu.patching.registry import REPLACEMENTS, Patch

FORMAT = 1

# Fields that say nothing about meaning, or that Python versions fill differently.
_SILENT_FIELDS = frozenset({"ctx", "type_comment", "kind", "annotation", "returns"})
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_SCOPES = (*_FUNCTIONS, ast.ClassDef)


class PinError(Exception):
    """A pin file cannot be read."""


# --- finding a symbol -------------------------------------------------------------------------------


def locate(tree: ast.Module, qualname: str) -> list[ast.stmt]:
    """Return every statement of ``tree`` that binds ``qualname``, in source order.

    Conditional definitions (``if``, ``try``, ``with``, loops) all count. An import is narrowed to the name
    in question; a star import stands for names that nothing else binds. A method that a class inherits
    is found in a base class of the same file; where a base class comes from elsewhere, the header of
    the class stands for it. An empty list means that the symbol is gone.
    """
    *path, name = qualname.split(".")
    scopes: list[Any] = [tree]
    for part in path:
        scopes = [node for scope in scopes for node in _bindings(scope.body, part)]
        scopes = [node for node in scopes if isinstance(node, ast.ClassDef)]
    found = [node for scope in scopes for node in _bindings(scope.body, name)]
    if found:
        return found
    if not path:
        return [node for node in _statements(tree.body) if _is_star_import(node)]
    return [node for scope in scopes for node in _inherited(tree, scope, name, frozenset())]


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that run in the scope of ``body``, nested blocks included."""
    for node in body:
        yield node
        if isinstance(node, _SCOPES):
            continue
        yield from _statements(getattr(node, "body", ()))
        for clause in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
            yield from _statements(clause.body)
        yield from _statements(getattr(node, "orelse", ()))
        yield from _statements(getattr(node, "finalbody", ()))


def _bindings(body: Iterable[ast.stmt], name: str) -> list[ast.stmt]:
    bound = (_binding(node, name) for node in _statements(body))
    return [node for node in bound if node is not None]


def _binding(node: ast.stmt, name: str) -> ast.stmt | None:
    """Return ``node`` (an import narrowed to one name) if it binds ``name``, else None."""
    if isinstance(node, _SCOPES):
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
    return node if any(name in _plain_names(target) for target in targets) else None


def _plain_names(target: ast.expr) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, ast.Starred):
        return _plain_names(target.value)
    parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return {name for part in parts for name in _plain_names(part)}


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
    """Return what binds ``name`` in the base classes of ``cls``; its header if one is in another file."""
    elsewhere = False
    for base in cls.bases:
        label = ast.unparse(base)
        local = [node for node in _bindings(tree.body, label) if isinstance(node, ast.ClassDef)]
        if label in seen:
            continue
        for node in local:
            found = _bindings(node.body, name) or _inherited(tree, node, name, seen | {label})
            if found:
                return found
        elsewhere = elsewhere or (not local and label != "object")
    if not elsewhere:
        return []
    header = copy.copy(cls)
    header.body = []
    return [header]


# --- fingerprint and signature ----------------------------------------------------------------------


def fingerprint(nodes: Iterable[ast.AST]) -> str:
    """Return a hash of what ``nodes`` mean.

    Positions, comments, docstrings and the annotations of parameters and results do not count. The text
    that is hashed is our own, so it is the same under every Python version, unlike ``ast.dump``.
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
    """Return the part of a field that counts: no annotations of parameters, no docstring, tidy f-strings."""
    if name in _SILENT_FIELDS and not (name == "annotation" and isinstance(node, ast.AnnAssign)):
        return None
    if name == "body" and isinstance(node, _SCOPES):
        return content[1:] if ast.get_docstring(node, clean=False) is not None else content
    if name == "values" and isinstance(node, ast.JoinedStr):
        return _merged(content)
    return content


def _merged(values: list[ast.expr]) -> list[ast.expr]:
    """Return the parts of an f-string with neighbouring literals joined; versions split them differently."""
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
    """Return what a caller sees of ``node``, as text.

    Parameters and defaults of a function (with static, class and property marks), bases and constructor of
    a class, the statement of an import, the names that an assignment binds.
    """
    if isinstance(node, _FUNCTIONS):
        word = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
        return f"{_marks(node)}{word} {node.name}({_parameters(node.args)})"
    if isinstance(node, ast.ClassDef):
        bases = [ast.unparse(base) for base in [*node.bases, *node.keywords]]
        constructor = [signature(init) for init in _bindings(node.body, "__init__")]
        return " ".join([f"class {node.name}({', '.join(bases)})", *constructor])
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return ast.unparse(node)
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    names = sorted(name for target in targets if target is not None for name in _plain_names(target))
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


# --- pin files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pin:
    """One symbol of one upstream version: its fingerprint, its signature, the line of its first binding."""

    fingerprint: str
    signature: str
    line: int

    @classmethod
    def of(cls, nodes: list[ast.stmt]) -> Pin:
        """Return the pin of the statements that bind a symbol (at least one)."""
        return cls(fingerprint(nodes), " | ".join(map(signature, nodes)), nodes[0].lineno)


@dataclass
class PinFile:
    """The pins of one upstream version.

    Attributes:
        modules: module name -> SHA-256 of its file.
        targets: ``package.module:Qual.name`` -> pin.
    """

    upstream: str
    version: str
    modules: dict[str, str] = field(default_factory=dict)
    targets: dict[str, Pin] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> PinFile:
        """Read one pin file.

        Raises:
            PinError: it is not one, or of another format.
        """
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']}, not {FORMAT}")
            targets = {target: Pin(**pin) for target, pin in data["targets"].items()}
            return cls(data["upstream"], data["version"], data["modules"], targets)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise PinError(f"{path} is not a readable pin file: {error}") from error

    @property
    def name(self) -> str:
        """The name of its file: ``<upstream>-<version>.json``."""
        return f"{self.upstream}-{self.version}.json"

    def json(self) -> str:
        """Return the content of its file; equal pins give equal text."""
        data = {
            "format": FORMAT,
            "upstream": self.upstream,
            "version": self.version,
            "modules": dict(sorted(self.modules.items())),
            "targets": {target: asdict(pin) for target, pin in sorted(self.targets.items())},
        }
        return json.dumps(data, indent=2) + "\n"


@dataclass
class Pins:
    """All pin files of one upstream, in the order in which they are compared with."""

    upstream: str
    files: list[PinFile] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path, upstream: str, version: str = "") -> Pins:
        """Read every pin file of ``upstream`` in ``directory``, which may be absent.

        Args:
            version: of upstream; its pins come first, then those of the others, the newest first.

        Raises:
            PinError: a file cannot be read.
        """
        files = [PinFile.read(path) for path in Path(directory).glob(f"{upstream}-*.json")]
        files.sort(key=lambda file: (file.version == version, _numbers(file.version)), reverse=True)
        return cls(upstream, [file for file in files if file.upstream == upstream])

    def of(self, target: str) -> dict[str, Pin]:
        """Return the pin of ``target`` in every version that has one."""
        return {file.version: file.targets[target] for file in self.files if target in file.targets}

    def voucher(self, target: str, module: str, digest: str) -> str:
        """Return the version that pins ``target`` in a file of ``module`` with this very digest, or ''."""
        known = (f.version for f in self.files if f.modules.get(module) == digest and target in f.targets)
        return next(known, "")


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)]


# --- comparison -------------------------------------------------------------------------------------


class Source:
    """The source of one module: read at once, parsed when needed.

    Args:
        module: its dotted name.
        path: its file.
    """

    def __init__(self, module: str, path: Path | str) -> None:
        self.module, self.path = module, Path(path)
        self._content = self.path.read_bytes()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed file.

        Raises:
            SyntaxError: this Python cannot parse it.
        """
        return ast.parse(self._content, str(self.path))

    def locate(self, qualname: str) -> list[ast.stmt]:
        """Return the statements that bind ``qualname`` (see ``locate``)."""
        return locate(self.tree, qualname)


@dataclass(frozen=True)
class Verdict:
    """What became of a target.

    Attributes:
        status: ``same``, ``body_changed``, ``signature_changed``, ``gone`` or ``no_pin``.
        kind: the kind of the patch.
        file: the source file, or the module if there is none.
        line: where the target is bound now; 0 if it is not.
        detail: what changed, in words.
        pin: the version whose pin it equals or, if it equals none, was judged by; empty without a pin.
        fits: the signature has changed, but nothing that our function takes of it.
        ours: ``file:line`` of the patch.
    """

    status: str
    target: str
    kind: str
    file: str
    line: int = 0
    detail: str = ""
    pin: str = ""
    fits: bool = False
    ours: str = ""

    @property
    def drifted(self) -> bool:
        """Whether upstream is not what the patch was written against."""
        return self.status in ("body_changed", "signature_changed", "gone")

    @property
    def fails(self) -> bool:
        """Whether the patch must not be applied.

        One that calls the original survives a changed body, ``around`` also a signature that ``fits``.
        """
        survives = self.fits or (self.status == "body_changed" and self.kind not in REPLACEMENTS)
        return self.drifted and not survives

    @property
    def place(self) -> str:
        """``file:line``."""
        return f"{self.file}:{self.line}" if self.line else self.file


def compare(patch: Patch, source: Source | None, pins: Pins) -> Verdict:
    """Compare the target of ``patch`` in ``source`` (None: no such file) with the pins of its upstream."""
    return replace(_compare(patch, source, pins), ours=patch.ours)


def _compare(patch: Patch, source: Source | None, pins: Pins) -> Verdict:
    if source is None:
        return Verdict("gone", patch.target, patch.kind, patch.module, 0, "the module has no source file")
    file = str(source.path)
    voucher = pins.voucher(patch.target, patch.module, source.digest)
    if voucher:
        return Verdict("same", patch.target, patch.kind, file, pin=voucher)
    try:
        nodes = source.locate(patch.qualname)
    except SyntaxError as error:
        return Verdict("gone", patch.target, patch.kind, file, error.lineno or 0, f"unreadable: {error.msg}")
    if not nodes:
        return Verdict("gone", patch.target, patch.kind, file, 0, "nothing in the file defines it")
    status, detail, pin, fits = _judge(patch, Pin.of(nodes), pins.of(patch.target))
    return Verdict(status, patch.target, patch.kind, file, nodes[0].lineno, detail, pin, fits)


def _judge(patch: Patch, found: Pin, known: dict[str, Pin]) -> tuple[str, str, str, bool]:
    """Return status, detail, the version whose pin decided, and whether a changed signature fits."""
    if not known:
        return "no_pin", "no pin", "", False
    for version, pin in known.items():
        if pin.fingerprint == found.fingerprint:
            return "same", "", version, False
    for version, pin in known.items():
        if pin.signature == found.signature:
            return "body_changed", "body changed, same signature", version, False
    version, pin, reason = _nearest(patch, found.signature, known)
    detail = f"signature changed from {pin.signature!r} to {found.signature!r}"
    if patch.kind != "around":
        return "signature_changed", detail, version, False
    told = f"{reason}: {detail}" if reason else f"nothing that our function takes: {detail}"
    return "signature_changed", told, version, reason is None


def _nearest(patch: Patch, signature: str, known: dict[str, Pin]) -> tuple[str, Pin, str | None]:
    """Return the first pin with all that the patch takes, and None; else the first, and what conflicts."""
    use = use_of(patch.make) if patch.kind == "around" else None
    reasons = {version: conflict(use, pin.signature, signature) for version, pin in known.items()}
    version = next((version for version, reason in reasons.items() if reason is None), next(iter(known)))
    return version, known[version], reasons[version]


def by_target(verdicts: Iterable[Verdict]) -> list[list[Verdict]]:
    """Return the verdicts of each target together, the worst first; targets in order of their first one."""
    groups: dict[str, list[Verdict]] = {}
    for verdict in verdicts:
        groups.setdefault(verdict.target, []).append(verdict)
    return [sorted(group, key=lambda v: (not v.fails, not v.drifted)) for group in groups.values()]


class SourceTree:
    """The sources under a folder, each read once.

    Args:
        root: the folder that holds upstream's top-level package, and a folder ``tasks`` with what the script
            in it imports.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._sources: dict[str, Source | None] = {}

    def find(self, module: str) -> Source | None:
        """Return the source of ``module``, or None if there is no file."""
        if module not in self._sources:
            bases = [folder.joinpath(*module.split(".")) for folder in (self.root, self.root / "tasks")]
            paths = [
                path for base in bases for path in (base / "__init__.py", base.with_name(f"{base.name}.py"))
            ]
            path = next((path for path in paths if path.is_file()), None)
            self._sources[module] = Source(module, path) if path else None
        return self._sources[module]

    def pin(self, patches: Iterable[Patch], upstream: str, version: str) -> tuple[PinFile, list[str]]:
        """Pin the targets of ``patches``.

        Returns:
            The pins, and the targets that are not there.
        """
        pinned, missing = PinFile(upstream, version), []
        for patch in patches:
            source = self.find(patch.module)
            nodes = source.locate(patch.qualname) if source else []
            if source is None or not nodes:
                missing.append(patch.target)
                continue
            pinned.modules[patch.module] = source.digest
            pinned.targets[patch.target] = Pin.of(nodes)
        return pinned, missing
