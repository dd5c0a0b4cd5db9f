"""The few files by which ``upstream`` knows a Megatron."""

from __future__ import annotations

from pathlib import Path


def make_core(root: Path, version: str, namespace: bool = True) -> Path:
    """Write the few files of a megatron-core that ``upstream`` reads."""
    core = root / "megatron" / "core"
    core.mkdir(parents=True)
    major, minor, patch = version.split(".")
    (core / "package_info.py").write_text(
        f'MAJOR = {major}\nMINOR = {minor}\nPATCH = {patch}\nPRE_RELEASE = ""\n'
    )
    (core / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    if not namespace:
        (root / "megatron" / "__init__.py").write_text("raise AssertionError('must not be imported')\n")
    return root.resolve()


def make_legacy(root: Path) -> Path:
    """Write the file by which ``upstream`` knows the tree of 2023, in a regular package."""
    model = root / "megatron" / "model"
    model.mkdir(parents=True)
    (model / "transformer.py").touch()
    (root / "megatron" / "__init__.py").touch()
    return root.resolve()
