"""What a tree is called in baselines and on the page, and which files of it are its unit tests."""

from __future__ import annotations

from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons

# What no tag has: the tree of core_v0.19.0 calls itself 0.19.1; main 0.20.0, before there is a release
TREES = {"0.19.1": "core_v0.19.0", "0.20.0": "core_main_d98e8a64"}


def core_tag(version: str) -> str:
    """Return the tag of a Megatron-LM tree whose megatron-core calls itself ``version``, or main's folder."""
    return TREES.get(version, f"core_v{version}")


def name_of(checkout: Path) -> str:
    """Return the name of the tree in baselines and on the page."""
    found = megatrons.find(checkout)
    return core_tag(found.version) if found.name == "megatron_core" else f"{found.name}_{found.version}"


def files(checkout: Path, folders: list[str] | None) -> list[str]:
    """Return the test files below the named folders (None: all), as paths in the checkout.

    Megatron-DeepSpeed has unit tests beside ``tests/unit_tests``, too. Its functional tests, which judge the
    logs of a cluster, are left out.
    """
    of_core = name_of(checkout).startswith("core_")
    base = checkout / "tests" / "unit_tests" if of_core else checkout / "tests"
    found: dict[Path, None] = {}
    for name in folders or ["."]:
        path = base / name
        if not path.exists():
            raise UsageError(
                str(path), "a folder or file of upstream's unit tests", "Check the checkout and --folder."
            )
        inside = [path] if path.is_file() else sorted(path.rglob("test_*.py"))
        found |= dict.fromkeys(file for file in inside if "functional_tests" not in file.parts)
    return [str(path.relative_to(checkout)) for path in found]


def folder_of(file: str) -> str:
    """Return the folder of a test file that it counts for."""
    inner = file.removeprefix("tests/").removeprefix("unit_tests/")
    return inner.partition("/")[0] if "/" in inner else "(top level)"
