"""A small upstream package in a temporary folder, imported for real."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from textwrap import dedent
from types import ModuleType
from typing import Any

import pytest

from megatron_npu.patching.engine import Engine
from megatron_npu.patching.module_patch import Context
from megatron_npu.patching.pins import Pins
from megatron_npu.patching.registry import Registry

PREFIX = "stockpkg"

MODEL = '''
"""A module with one of everything."""
LIMIT = 3

def gelu(x, bias=1):
    """Add."""
    return x + bias

class Base:
    def forward(self, x):
        return ("base", x)

class Core(Base):
    scale = 2

    def method(self, x):
        return ("method", x)

    @staticmethod
    def static(x):
        return ("static", x)

    @classmethod
    def klass(cls, x):
        return ("klass", cls.__name__, x)

    @property
    def size(self):
        return 5

    @size.setter
    def size(self, value):
        self.stored = value
'''


class UpstreamTree:
    """Writes and imports ``stockpkg``, and makes engines for it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.registry = Registry()
        self.engines: list[Engine] = []
        self.first_calls = 0

    def write(self, files: dict[str, str]) -> None:
        """Write files relative to the root; their source may be indented."""
        for name, source in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(source))
        importlib.invalidate_caches()

    def load(self, name: str) -> ModuleType:
        """Import ``stockpkg.name``."""
        return importlib.import_module(f"{PREFIX}.{name}")

    def engine(
        self,
        *,
        arm: bool = True,
        device: str = "cpu",
        version: str = "1.0",
        pins: Pins | None = None,
        drift: str = "error",
        on_first: Callable[[], Any] | None = None,
    ) -> Engine:
        """Return an engine on ``self.registry``; the fixture takes it down."""

        def first() -> Context:
            self.first_calls += 1
            return (on_first and on_first()) or Context("upstream", version, device, pins, drift)

        engine = Engine(self.registry, prefixes=(PREFIX,), on_first=first)
        self.engines.append(engine)
        if arm:
            engine.arm()
        return engine


def forget() -> None:
    """Drop every module of upstream."""
    for name in [name for name in sys.modules if name.partition(".")[0] == PREFIX]:
        del sys.modules[name]


@pytest.fixture
def upstream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[UpstreamTree]:
    """An upstream with the modules ``model`` (one of everything) and ``user`` (takes names by value)."""
    monkeypatch.syspath_prepend(str(tmp_path))
    tree = UpstreamTree(tmp_path)
    tree.write(
        {
            "stockpkg/__init__.py": "",
            "stockpkg/model.py": MODEL,
            "stockpkg/user.py": "from stockpkg.model import Core, LIMIT, gelu\n",
        }
    )
    forget()
    yield tree
    for engine in tree.engines:
        engine.undo()
        engine.disarm()
    forget()
