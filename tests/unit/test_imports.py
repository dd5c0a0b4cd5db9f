"""The house rule: imports point downward only. Read from the sources, nothing is imported."""

from __future__ import annotations

import ast
import functools
import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "megatron_npu"
sys.path.insert(0, str(ROOT / "scripts"))

from rooms import HEAVY, ROOMS, Room, room_of  # noqa: E402

FILES_OF_A_FOLDER, LINES_OF_A_FILE = 20, 400
# Files that are longer, and why: what they list is looked up, not read.
TABLES = {
    "ops/compiled/abi.py": "the one list of all compiled kernels: what each of them takes",
    "pretrain/flags/arguments.py": "the driver's flags, group by group, with the words of their help",
}


@functools.cache
def imports(file: Path) -> set[str]:
    """Return the full names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files_of(room: Room) -> list[Path]:
    """Return the sources of a room, without those of rooms inside of it."""
    place = PACKAGE / room.name
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    return [file for file in files if room_of(module_of(file)) == room]


def module_of(file: Path) -> str:
    """Return the name of a file's module below the package."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and parts[:-1] else parts)


def test_every_folder_and_file_is_a_room():
    there = {path.name + "/" for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    there |= {path.name for path in PACKAGE.glob("*.py")}
    assert there == {room.name for room in ROOMS if "." not in room.module}
    assert all((PACKAGE / room.name).exists() for room in ROOMS)


def test_no_file_lies_loose_at_the_top():
    assert {path.name for path in PACKAGE.glob("*.py")} == {"__init__.py", "__main__.py", "plugin.py"}


def test_no_folder_has_too_many_files():
    sizes = {
        folder.relative_to(PACKAGE).as_posix(): len([*folder.glob("*.py")])
        for folder in {path.parent for path in PACKAGE.rglob("*.py")}
    }
    assert len(sizes) > 40
    full = {folder: count for folder, count in sizes.items() if count > FILES_OF_A_FOLDER}
    assert not full, "group by subject what a folder holds"


def test_no_file_is_too_long_but_tables():
    lengths = {
        file.relative_to(PACKAGE).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for file in PACKAGE.rglob("*.py")
    }
    long = {name: length for name, length in lengths.items() if length > LINES_OF_A_FILE}
    assert set(long) == set(TABLES), f"split a file where its subjects part, not {long}"
    assert all(TABLES.values())


def test_the_table_itself_points_downward():
    below: set[str] = set()
    for room in ROOMS:
        assert set(room.may.split()) <= below, room.name
        assert set(room.heavy) <= set(HEAVY), room.name
        below.add(room.module)


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_imports_point_downward(room):
    allowed = {room.module, *room.may.split()}
    files = files_of(room)
    assert files
    for file in files:
        for name in imports(file):
            top, _, rest = name.partition(".")
            assert top not in HEAVY or top in room.heavy, f"{file} imports {name}"
            used = room_of(rest) if top == "megatron_npu" else None
            if used is not None:
                assert used.module in allowed, f"{file} imports {name}: is scripts/rooms.py to allow it?"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_may_import_no_more_than_it_does(room):
    files = files_of(room)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    used = {name for file in files for name in imports(file)}
    for name in room.may.split():  # commands are imported by a computed name
        assert f"megatron_npu.{name}" in text or f"megatron_npu.{name}" in used, name
    assert {name.partition(".")[0] for name in used} >= set(room.heavy)


@pytest.mark.parametrize("room", ["base", "patching"])
def test_the_lowest_rooms_import_nothing_of_the_project(room):
    (lowest,) = [other for other in ROOMS if other.module == room]
    for file in files_of(lowest):
        for name in imports(file):
            assert not name.startswith("megatron_npu") or name.startswith(f"megatron_npu.{room}"), file


def test_the_simulator_could_be_a_distribution_of_its_own(tmp_path):
    """What it imports, and what that does, is copied elsewhere; every module of it can be imported there."""
    modules = {room.module: room for room in ROOMS}
    needed, new = set(), {"sim"}
    while new:
        needed |= new
        new = {name for room in new for name in modules[room].may.split()} - needed
    assert needed == {"sim", "base", "process"}
    package = tmp_path / "megatron_npu"
    package.mkdir()
    (package / "__init__.py").touch()
    for name in needed:
        shutil.copytree(PACKAGE / modules[name].name, package / modules[name].name)
    code = (
        "import importlib, pkgutil, megatron_npu.sim as sim\n"
        "names = [each.name for each in pkgutil.walk_packages(sim.__path__, 'megatron_npu.sim.')]\n"
        "for name in names: 'boot' in name or importlib.import_module(name)\n"
        "print(len(names), sim.__file__)\n"
        "from megatron_npu.sim import launcher\n"
        "launcher.main(['--help'])"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "MEGATRON_NPU_AUTOLOAD": "0"}
    result = processes.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    count, _, place = result.stdout.splitlines()[0].partition(" ")
    assert int(count) > 30
    assert place.startswith(str(tmp_path))
    assert "simulated NPUs" in result.stdout


def test_packaging_is_all_that_patching_needs():
    (patching,) = [room for room in ROOMS if room.module == "patching"]
    used = {name.partition(".")[0] for file in files_of(patching) for name in imports(file)}
    own = {"megatron_npu", "packaging", "typing_extensions"}  # the last for type checkers only
    assert used - own <= set(sys.stdlib_module_names)


def test_the_plug_in_imports_neither_torch_nor_megatron():
    code = "import sys, megatron_npu; print(sorted({'torch', 'megatron'} & sys.modules.keys()))"
    result = processes.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_environment_variables_are_read_in_one_place():
    for file in PACKAGE.rglob("*.py"):
        if file.name != "settings.py" and "sim" not in file.parts:
            source = file.read_text(encoding="utf-8")
            for call in ("environ.get", "getenv"):
                assert f'{call}("MEGATRON_NPU' not in source, file


# Modules of one suite that are for others, too, and why they are not in tests/support.
FOR_OTHERS = {
    "tests.adaptors.megatron_core.upstream_tests": "runs where ``tests`` is Megatron's package",
    "tests.unit.test_hostile_files": "tests/campaign/fuzz.py does what this test does, for hours",
}


def test_no_suite_imports_from_another():
    found = []
    for file in sorted((ROOT / "tests").rglob("*.py")):
        suite = file.relative_to(ROOT / "tests").parts[0]
        for name in imports(file):
            parts = name.split(".")
            own = parts[0] != "tests" or len(parts) == 1 or parts[1] in (suite, "support", "conftest")
            if not own and (ROOT / "tests" / parts[1]).is_dir() and not name.startswith(tuple(FOR_OTHERS)):
                found.append(f"{file.relative_to(ROOT)}: {name}")
    assert not found
