"""pip install in the guide's own layout: a clone named as the package, inside a Megatron-LM tree."""

from __future__ import annotations

import importlib.util
import os
import shutil
import site
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron_npu.doctor.advice import advice
from megatron_npu.doctor.copies import copies
from tests.conftest import ROOT
from tests.support import processes

SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "megatron_npu_autoload.py", "rapidformer.py")
FOLDERS = ("megatron_npu", "patches")
PRETRAIN = """
import sys, torch
print(sys.modules["megatron_npu"].installed(), sys.modules["megatron_npu"].__file__)
"""


class Installed(NamedTuple):
    """A Megatron-LM tree with the clone in it, and the interpreter that it is installed for."""

    root: Path
    python: Path
    package: Path

    def run(self, *arguments: str, cwd: Path | None = None) -> str:
        """Run the interpreter in ``cwd`` (default: the tree); return its output."""
        environment = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
        done = processes.run(
            [str(self.python), *arguments],
            cwd=cwd or self.root,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=[["-e"], []], ids=["editable", "normal"])
def installed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """`git clone … megatron_npu` in a tree, then `pip install -e .` or `pip install .` in the clone."""
    for name in ("pip", "setuptools"):
        if importlib.util.find_spec(name) is None:  # importing setuptools would change this process
            pytest.skip(f"{name} is not installed")
    root = tmp_path_factory.mktemp("installed").resolve() / "Megatron-LM"
    clone, venv = root / "megatron_npu", root.parent / "venv"
    (root / "tests").mkdir(parents=True)
    (root / "pretrain_gpt.py").write_text(PRETRAIN)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in SOURCES:
        shutil.copy(ROOT / name, clone / name)
    processes.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    packages = next(venv.glob("lib/python*/site-packages"))
    # what this project needs is lent; what .pth files do there is not, so this project itself is not
    (packages / "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    _pip_install(python, clone, request.param)
    return Installed(root, python, (clone if request.param else packages) / "megatron_npu")


def _pip_install(python: Path, clone: Path, mode: Sequence[str]) -> None:
    # --force-reinstall: the lent folder may hold a record of this project
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--force-reinstall"]
    done = processes.run(
        [str(python), "-m", "pip", "install", *flags, *mode, str(clone)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


SAY_FILE = "import megatron_npu; print(megatron_npu.installed(), megatron_npu.__file__)"


def test_a_python_that_is_too_old_is_named(tmp_path: Path) -> None:
    """Python 2 prints its version to standard error."""
    old = tmp_path / "python2"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 2.7.18" >&2\nexit 1\n')
    old.chmod(0o700)
    done = processes.run(
        ["bash", str(ROOT / "scripts" / "make_venv.sh"), str(tmp_path / "venv"), "demo"],
        env={**os.environ, "PYTHON": str(old)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    told = f"{old} is not Python 3.10 or newer (--version: Python 2.7.18); set PYTHON to one that is."
    assert done.stderr == f"make_venv.sh: {told}\n"


@pytest.mark.parametrize("cwd", [".", "tests", "megatron_npu", "megatron_npu/megatron_npu", ".."])
def test_the_package_wins_from_any_folder(installed: Installed, cwd: str) -> None:
    said = installed.run("-c", SAY_FILE, cwd=installed.root / cwd)
    where = installed.root / "megatron_npu" / "megatron_npu" if cwd == "megatron_npu" else installed.package
    assert said == f"True {where / '__init__.py'}\n"


def test_a_script_of_the_tree_is_armed_by_torch(installed: Installed) -> None:
    assert installed.run("pretrain_gpt.py") == f"True {installed.package / '__init__.py'}\n"


def test_the_module_runs_as_a_command_and_finds_its_pins(installed: Installed) -> None:
    assert installed.run("-m", "megatron_npu", "--version").startswith("megatron_npu ")
    count = "from megatron_npu import plugin; print(len(list(plugin.pins_directory().glob('*.json'))))"
    assert int(installed.run("-c", count)) == len(list((ROOT / "patches").glob("*.json")))


def test_the_doctor_says_which_copy_is_used(installed: Installed) -> None:
    found = installed.run("-c", "from megatron_npu.doctor.copies import copies; print(copies())")
    assert f"'used': '{installed.package}'" in found
    editable = installed.package.parent == installed.root / "megatron_npu"
    assert (
        f"'installed': '{'editable' if editable else 'a copy'}, from {installed.root}/megatron_npu'" in found
    )
    assert f"{installed.root}/megatron_npu has the same name but is not this package" in found
    assert "hidden_by" not in found
    assert "another" not in found


def test_the_doctor_advises_where_a_folder_hides_the_package(tmp_path: Path) -> None:
    """As where an editable install works through a finder: only folders of the name are on the path."""
    (tmp_path / "megatron_npu").mkdir()
    found = copies(tmp_path, [])
    assert found["hidden_by"] == str(tmp_path / "megatron_npu")
    (line,) = advice({"package": found})
    assert "nothing is patched. Run `pip install -e` again" in line


def test_the_doctor_advises_where_another_copy_comes_first(tmp_path: Path) -> None:
    (tmp_path / "megatron_npu").mkdir()
    (tmp_path / "megatron_npu" / "__init__.py").touch()
    found = copies(tmp_path, [str(ROOT)])
    assert found["another"] == str(tmp_path / "megatron_npu")
    assert "hidden_by" not in found
    (line,) = advice({"package": found})
    assert "another copy of this package" in line


def test_the_doctor_has_nothing_to_say_about_one_copy(tmp_path: Path) -> None:
    assert advice({"package": copies(tmp_path, [str(ROOT)])}) == []
