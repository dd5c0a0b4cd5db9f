"""Which Megatron is on the path, which version and where: found without importing it."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from megatron_npu import settings
from megatron_npu.errors import UsageError

# Tested versions of megatron-core: first that works, first that is not yet supported.
OLDEST_CORE, NEWEST_CORE = (0, 12), (0, 17)
LEGACY_VERSION = "285068c8"


@dataclass(frozen=True)
class Host:
    """A Megatron on disk.

    Attributes:
        name: ``megatron_core`` or ``megatron_lm`` (the tree of January 2023).
        version: of megatron-core, ``0.16.1``; of megatron_lm, its commit ``285068c8``.
        root: the folder that holds the ``megatron`` package.
        shadowed: other folders on the path that hold one too, with their versions.
    """

    name: str
    version: str
    root: Path
    shadowed: tuple[tuple[Path, str], ...] = ()

    def require_supported(self) -> None:
        """Check the version and that no second Megatron mixes in.

        Raises:
            UsageError: too old, too new, or two different versions on the path.
        """
        if self.name == "megatron_core":
            self._require_supported_version()
        self._require_alone()

    def _require_supported_version(self) -> None:
        release = tuple(int(part) for part in self.version.split(".")[:2])
        if not OLDEST_CORE <= release < NEWEST_CORE:
            age = "old" if release < OLDEST_CORE else "new"
            raise UsageError(
                f"megatron-core {self.version} in {self.root} is too {age}",
                f"a version from {_dotted(OLDEST_CORE)} to before {_dotted(NEWEST_CORE)}",
                "Install one, for example: pip install megatron-core==0.16.1",
            )

    def _require_alone(self) -> None:
        wanted = settings.MEGATRON_PATH.get()
        if wanted and Path(wanted).resolve() == self.root:
            return  # the user has said which one is meant
        others = [(path, version) for path, version in self.shadowed if version != self.version]
        if others:
            listed = ", ".join(f"{version} in {path}" for path, version in others)
            raise UsageError(
                f"two Megatrons are on the path: {self.version} in {self.root} (first) and {listed}",
                "one (a checkout and a wheel may mix their modules)",
                f"Remove one from the path, or set {settings.MEGATRON_PATH.name} to the one that comes first "
                "to say that it is meant.",
            )


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def find(path: str | Path | None = None) -> Host:
    """Return the Megatron in ``path`` (a checkout, a site-packages, an unpacked wheel) or on ``sys.path``.

    Raises:
        UsageError: there is none.
    """
    roots = [Path(path).resolve()] if path is not None else _roots_on_path()
    found = [host for host in map(_inspect, roots) if host is not None]
    if not found:
        place = f"in {path}" if path is not None else "on the Python path"
        raise UsageError(
            f"no Megatron {place}",
            "a folder megatron/ with megatron-core or Megatron-LM in it",
            "Run: pip install megatron-core==0.16.1, or put a Megatron-LM checkout on PYTHONPATH.",
        )
    first = found[0]
    rest = tuple((host.root, host.version) for host in found[1:] if host.root != first.root)
    return Host(first.name, first.version, first.root, rest)


def _roots_on_path() -> list[Path]:
    """Return every folder that a ``import megatron`` looks into, in its order.

    Each entry of ``sys.path`` is asked by itself, because a regular package hides later portions that a
    namespace package (megatron-core from 0.16 on) would mix in.
    """
    roots: list[Path] = []
    for entry in sys.path:
        spec = PathFinder.find_spec("megatron", [entry or "."])
        for location in (spec.submodule_search_locations or ()) if spec else ():
            root = Path(location).resolve().parent
            if root not in roots:
                roots.append(root)
    return roots


def _inspect(root: Path) -> Host | None:
    """Return the Megatron whose ``megatron`` folder lies in ``root``."""
    package = root / "megatron"
    if (package / "model" / "transformer.py").is_file():
        return Host("megatron_lm", LEGACY_VERSION, root)
    if not (package / "core").is_dir():
        return None
    version = _core_version(package / "core" / "package_info.py")
    return None if version is None else Host("megatron_core", version, root)


def _core_version(package_info: Path) -> str | None:
    """Read MAJOR, MINOR, PATCH and PRE_RELEASE from megatron-core's ``package_info.py``, unexecuted."""
    try:
        tree = ast.parse(package_info.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    values = {
        node.targets[0].id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    try:
        version = f"{values['MAJOR']}.{values['MINOR']}.{values['PATCH']}"
    except KeyError:
        return None
    return version + str(values.get("PRE_RELEASE", ""))
