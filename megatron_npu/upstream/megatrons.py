"""Find the Megatron on the Python path, with its version and folder, without importing it."""

from __future__ import annotations

import ast
import hashlib
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError

_logger = logging.getLogger(__name__)

NAMES = ("megatron_core", "megatron_lm", "megatron_deepspeed", "megatron_deepspeed_core")
# Tested versions of megatron-core: first that works, first that is not yet supported.
OLDEST_CORE, FIRST_TOO_NEW_CORE = (0, 12), (0, 21)
LEGACY_VERSION = "285068c8"
BIGSCIENCE_VERSION = "8387ae17"
DEEPSPEEDAI_VERSION = "4efb479d"
# These trees state no version: they are recognised by the SHA-256 of these files, concatenated.
_LEGACY_FILES = ("model/transformer.py", "schedules.py", "optimizer/optimizer.py", "arguments.py")
_BY_DIGEST = {
    "ea09827de4da290fe48eaaec8f60cb95ed25031b179df8bd0469a805e8f372d6": LEGACY_VERSION,
    "f73edf7a672785bbcc21d3670744fa99d88734a30a15bf40512fbbc431cbc31b": BIGSCIENCE_VERSION,
    "a216689b4ea84c86853c3aa6e964338c6c0f5f4cbe7de21f8f6426de18ea4738": DEEPSPEEDAI_VERSION,
}


@dataclass(frozen=True)
class Upstream:
    """A copy of Megatron on the disk.

    Attributes:
        name: ``megatron_core``, ``megatron_lm`` (the tree of January 2023), ``megatron_deepspeed``
            (bigscience's) or ``megatron_deepspeed_core`` (deepspeedai's, which contains megatron-core).
        version: megatron-core's version, such as ``0.16.1``; for the other trees, the commit, such as
            ``285068c8``, or ``unknown`` for another tree of that time (the pins then show the differences).
        root: the folder that contains the ``megatron`` package.
        shadowed: the other folders on the path that also contain a copy of Megatron, with their versions.
    """

    name: str
    version: str
    root: Path
    shadowed: tuple[tuple[Path, str], ...] = ()

    def require_supported(self, program: Path | None = None) -> None:
        """Check that the version is supported, and that there is no second Megatron on the path.

        Args:
            program: the file of the running program; if it is in the second Megatron, the message says how to
                put that one first.

        Raises:
            UsageError: the version is too old or too new (``MEGATRON_NPU_DRIFT=warn`` only warns about newer
                ones), or there are two different versions on the path.
        """
        if self.name == "megatron_core":
            self._require_supported_version()
            self._require_alone(program)
        # The trees of old are regular packages: nothing on the path can mix into them.

    def _require_supported_version(self) -> None:
        release = tuple(int(part) for part in self.version.split(".")[:2])
        supported = (
            f"only versions from {_dotted(OLDEST_CORE)} up to, but not including, "
            f"{_dotted(FIRST_TOO_NEW_CORE)} are supported"
        )
        remedy = "Install a supported version, for example: pip install megatron-core==0.16.1"
        given = f"megatron-core {self.version} in {self.root}"
        if release < OLDEST_CORE:
            raise UsageError(f"{given} is too old; {supported}", remedy=remedy)
        if release >= FIRST_TOO_NEW_CORE:
            if settings.DRIFT.get() != "warn":
                also = f"or set {settings.DRIFT.name}=warn to apply the patches anyway, at your own risk."
                raise UsageError(f"{given} is too new; {supported}", remedy=f"{remedy}; {also}")
            _logger.warning(
                "%s is newer than the tested versions (%s). The patches are applied anyway; "
                "the line before the first step lists those whose function has changed",
                given,
                supported,
            )

    def _require_alone(self, program: Path | None) -> None:
        wanted = settings.MEGATRON_PATH.get()
        if wanted and Path(wanted).resolve() == self.root:
            return  # the user has said which one is meant
        others = [(path, version) for path, version in self.shadowed if version != self.version]
        if others:
            listed = ", ".join(f"{version} in {path}" for path, version in others)
            raise UsageError(
                f"two Megatrons are on the path: {self.version} in {self.root} (first) and {listed}; only "
                "one is supported, because otherwise modules from both may be mixed",
                remedy=_choice(wanted, [path for path, _ in others], program),
            )


def _choice(wanted: str, others: Sequence[Path], program: Path | None) -> str:
    """Return what to do about two Megatrons on the path.

    Args:
        wanted: the value of ``MEGATRON_LM_PATH``.
        others: the folders of all Megatrons but the first.
        program: the file of the running program.
    """
    name, starter = settings.MEGATRON_PATH.name, "start the script with `megatron-npu run`"
    rest = ":$PYTHONPATH" if os.environ.get("PYTHONPATH") else ""
    if wanted and Path(wanted).resolve() in others:
        return (
            f"{name} is {wanted}, which does not come first: put it first with "
            f"PYTHONPATH={Path(wanted).resolve()}{rest}, or {starter}."
        )
    own = next((path for path in others if program and program.resolve().is_relative_to(path)), None)
    if program and own:
        return (
            f"{program.name} belongs to {own}, which does not come first: set both {name}={own} and "
            f"PYTHONPATH={own}{rest}, or set {name}={own} and {starter}."
        )
    return f"Remove one from the path, or set {name} to the first one to confirm it."


def _dotted(release: tuple[int, ...]) -> str:
    return ".".join(map(str, release))


def find(path: str | Path | None = None, given_by: str = "") -> Upstream:
    """Find Megatron in ``path`` or on ``sys.path``.

    ``path`` can be a checkout, a site-packages folder or an unpacked wheel.

    Args:
        given_by: the variable or flag that specifies ``path``, for the error message.

    Raises:
        UsageError: no Megatron is found.
    """
    roots = [Path(path).resolve()] if path is not None else _roots_on_path()
    found = [upstream for upstream in map(inside, roots) if upstream is not None]
    if not found:
        raise _none_found(path, given_by)
    first = found[0]
    rest = tuple((upstream.root, upstream.version) for upstream in found[1:] if upstream.root != first.root)
    return Upstream(first.name, first.version, first.root, rest)


def named(path: str | None) -> tuple[str | None, str]:
    """Return the Megatron path given by ``--megatron`` or ``MEGATRON_LM_PATH``, and the name of its
    source.
    """
    if path:
        return path, "--megatron"
    path = settings.MEGATRON_PATH.get() or None
    return path, settings.MEGATRON_PATH.name if path else ""


def _none_found(path: str | Path | None, given_by: str) -> UsageError:
    inside = "a folder megatron/ that contains megatron-core or Megatron-LM"
    if path is None:
        checkout = settings.MEGATRON_PATH.get()
        nor = f", nor in {checkout} ({settings.MEGATRON_PATH.name})" if checkout else ""
        return UsageError(
            f"there is no Megatron on the Python path{nor}; {inside} is required",
            remedy="Run: pip install megatron-core==0.16.1, or put a Megatron-LM checkout on PYTHONPATH.",
        )
    given = f" ({given_by})" if given_by else ""
    remedy = f"Correct {given_by or 'the path'}."
    if not Path(path).is_dir():
        return UsageError(
            f"the folder {path}{given} does not exist; it must contain megatron/", remedy=remedy
        )
    return UsageError(f"there is no Megatron in {path}{given}; {inside} is required", remedy=remedy)


def _roots_on_path() -> list[Path]:
    """Return the folders in which ``import megatron`` searches, in order.

    Each entry of ``sys.path`` is searched separately. A regular package (with ``__init__.py``) takes
    precedence over the portions of a namespace package (megatron-core from 0.16 on), even over those that
    come before it.
    """
    regular: list[Path] = []
    portions: list[Path] = []
    for entry in sys.path:
        spec = PathFinder.find_spec("megatron", [entry or "."])
        if spec is None:
            continue
        roots = portions if spec.origin is None else regular
        for location in spec.submodule_search_locations or ():
            root = Path(location).resolve().parent
            if root not in roots:
                roots.append(root)
    return regular + portions


def inside(root: Path) -> Upstream | None:
    """Return the Megatron whose ``megatron`` folder is inside ``root``, or None if there is none."""
    package = root / "megatron"
    if (package / "model" / "transformer.py").is_file():
        return Upstream(_legacy_name(root), _legacy_version(package), root)
    if not (package / "core").is_dir():
        return None
    version = _core_version(package / "core" / "package_info.py")
    return None if version is None else Upstream("megatron_core", version, root)


def _legacy_name(root: Path) -> str:
    """Return the name of an older checkout, which is Megatron-LM or one of the two Megatron-DeepSpeed
    forks.
    """
    model = root / "megatron" / "model" / "gpt_model.py"
    if not model.is_file() or "from deepspeed" not in model.read_text(encoding="utf-8", errors="replace"):
        return "megatron_lm"
    return "megatron_deepspeed" + ("_core" if (root / "megatron" / "core").is_dir() else "")


def _legacy_version(package: Path) -> str:
    """Return the commit of a checkout that does not state a version, or ``unknown``."""
    digest = hashlib.sha256()
    for name in _LEGACY_FILES:
        path = package / name
        digest.update(path.read_bytes() if path.is_file() else b"")
    return _BY_DIGEST.get(digest.hexdigest(), "unknown")


def _core_version(package_info: Path) -> str | None:
    """Read the version from ``package_info.py`` (MAJOR, MINOR, PATCH and PRE_RELEASE) without executing
    the file.
    """
    try:
        tree = ast.parse(package_info.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return None
    values: dict[str, Any] = {
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
