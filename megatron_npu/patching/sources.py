"""Parse source files of a Megatron version on demand, without importing or executing them."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

from megatron_npu.patching.patch import Patch
from megatron_npu.patching.pins import Pin, PinFile
from megatron_npu.patching.symbols import locate


class Source:
    """The source code of one module.

    The file is read immediately and parsed when needed.

    Args:
        module: the dotted name of the module.
        path: its file.
    """

    def __init__(self, module: str, path: Path | str) -> None:
        self.module, self.path = module, Path(path)
        self._content = self.path.read_bytes()

    @cached_property
    def digest(self) -> str:
        """The SHA-256 hash of the source file."""
        return hashlib.sha256(self._content).hexdigest()

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree of the source file.

        Raises:
            SyntaxError: this version of Python cannot parse the file.
        """
        return ast.parse(self._content, str(self.path))

    def locate(self, qualname: str) -> list[ast.stmt]:
        """Return the statements that bind ``qualname`` (see ``locate``)."""
        return locate(self.tree, qualname)


class SourceTree:
    """The source files in a folder, each of which is read only once.

    Args:
        root: the folder that contains upstream's top-level package, and possibly a folder ``tasks`` with
            scripts.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)
        self._sources: dict[str, Source | None] = {}

    def find(self, module: str) -> Source | None:
        """Return the source of ``module``, or None if the module has no file."""
        if module not in self._sources:
            bases = [folder.joinpath(*module.split(".")) for folder in (self.root, self.root / "tasks")]
            paths = [
                path for base in bases for path in (base / "__init__.py", base.with_name(f"{base.name}.py"))
            ]
            path = next((path for path in paths if path.is_file()), None)
            self._sources[module] = Source(module, path) if path else None
        return self._sources[module]

    def pin(self, patches: Iterable[Patch], upstream: str, version: str) -> tuple[PinFile, list[str]]:
        """Create pins for the targets of ``patches``.

        Returns:
            The pins, and the targets that were not found.
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
