"""The cache under several processes, and the reading of shared libraries."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from pathlib import Path

import pytest
from filelock import FileLock

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.sim import build, cache, elf
from tests.conftest import wait_until
from tests.support import processes


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("MEGATRON_NPU_SIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _prepare_slowly(directory: Path) -> None:
    with (directory.parent / "attempts").open("a") as file:
        file.write("x")
    (directory / "first").write_text("1")
    time.sleep(0.3)
    (directory / "second").write_text("2")


def _files_at_once(_: int) -> list[str]:
    return sorted(path.name for path in cache.prepared("thing", _prepare_slowly).iterdir())


def test_one_of_many_processes_prepares_and_all_see_it_complete(own_cache):
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        seen = pool.map(_files_at_once, range(8))
    assert seen == [["first", "second"]] * 8
    assert (own_cache / "attempts").read_text() == "x"


def test_who_waits_for_another_process_says_so(own_cache, capsys):
    own_cache.mkdir()
    with FileLock(own_cache / "thing.lock"):
        waiting = threading.Thread(target=cache.prepared, args=("thing", _prepare_slowly))
        waiting.start()
        said: list[str] = []

        def complains() -> bool:
            assert waiting.is_alive()
            said.append(capsys.readouterr().err)
            return "waiting for another process to prepare thing" in "".join(said)

        wait_until(complains)
    waiting.join()
    assert (own_cache / "attempts").read_text() == "x"


def test_a_failed_preparation_leaves_nothing_and_can_be_repeated(own_cache):
    def fail(directory: Path) -> None:
        (directory / "half").write_text("")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        cache.prepared("thing", fail)
    assert [path.name for path in own_cache.iterdir()] == ["thing.lock"]
    assert sorted(p.name for p in cache.prepared("thing", _prepare_slowly).iterdir()) == ["first", "second"]


def test_the_rest_of_an_interrupted_attempt_is_replaced(own_cache):
    partial = files.partial_folder(own_cache / "thing")
    partial.mkdir(parents=True)
    (partial / "rest").write_text("")
    assert sorted(p.name for p in cache.prepared("thing", _prepare_slowly).iterdir()) == ["first", "second"]


def _make_library(directory: Path) -> None:
    with (directory.parent / "attempts").open("a") as file:
        file.write("x")
    source = directory / "answer.c"
    source.write_text("int answer(void) { return 42; }\n")
    processes.run(["gcc", "-shared", "-fPIC", "-o", directory / "libanswer.so", source], check=True)


@pytest.fixture
def library(own_cache) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    return cache.prepared_libraries("thing", _make_library) / "libanswer.so"


def test_nobody_else_may_write_what_is_prepared(own_cache, library):
    assert {path.stat().st_mode & 0o777 for path in (own_cache, library.parent, library)} == {0o700}
    assert cache.load(library).answer() == 42


@pytest.mark.parametrize("place", ["cache", "cache/thing"])
def test_a_cache_that_others_may_write_to_is_refused(own_cache, library, place):
    (own_cache.parent / place).chmod(0o775)
    with pytest.raises(UsageError, match="has mode 775: others may write to it"):
        cache.prepared_libraries("thing", _make_library)
    with pytest.raises(UsageError, match="has mode 775"):
        cache.load(library)


def test_a_library_that_others_may_write_to_is_not_loaded(library):
    library.chmod(0o777)
    with pytest.raises(UsageError, match="has mode 777"):
        cache.load(library)


@pytest.mark.parametrize("damage", ["cut", "away"])
def test_a_damaged_library_is_prepared_again(own_cache, library, capsys, damage):
    if damage == "cut":
        os.truncate(library, 5000)
    else:
        library.unlink()
    assert cache.load(cache.prepared_libraries("thing", _make_library) / library.name).answer() == 42
    assert "damaged" in capsys.readouterr().err
    assert (own_cache / "attempts").read_text() == "xx"
    assert sorted(path.name for path in own_cache.iterdir()) == ["attempts", "thing", "thing.lock"]


def test_what_nobody_has_used_for_a_month_is_removed(own_cache, library):
    month = time.time() - 31 * 86400
    for name in ("runtime-old", "runtime-new", "site-old", "compute-old"):
        (own_cache / name).mkdir(mode=0o700)
        if "old" in name:
            os.utime(own_cache / name, (month, month))
    cache.prepared_libraries("runtime-1", _make_library)
    assert sorted(path.name for path in own_cache.glob("*-*") if path.is_dir()) == [
        *("compute-old", "runtime-1", "runtime-new", "site-old"),
    ]


def test_the_cache_lies_in_the_users_cache_directory(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_NPU_SIM_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "megatron_npu" / "sim"


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_symbols_of_a_shared_library(tmp_path):
    (tmp_path / "other.c").write_text("int other(void) { return 1; }\n")
    (tmp_path / "main.c").write_text(
        "#include <stdio.h>\nint other(void);\nextern int absent(int);\n"
        "int weak(void) __attribute__((weak));\n"
        'int defined(void) { puts("x"); return other() + absent(1) + (weak ? weak() : 0); }\n'
    )
    processes.run(
        ["gcc", "-shared", "-fPIC", "-Wl,-soname,libother.so", "-o", "libother.so", "other.c"],
        cwd=tmp_path,
        check=True,
    )
    processes.run(
        ["gcc", "-shared", "-fPIC", "-o", "libmain.so", "main.c", "-L.", "-lother"], cwd=tmp_path, check=True
    )
    library = elf.read(tmp_path / "libmain.so")
    assert "libother.so" in library.needed
    assert "defined" in library.defined
    assert {"other", "absent"} <= library.undefined
    assert not {"puts", "weak", "defined"} & library.undefined  # versioned, weak, its own


def test_a_symbol_with_a_binding_of_three_words(monkeypatch):
    """What ``readelf`` says of C++'s unique symbols in a file that is not marked as one of GNU's."""
    listing = "  7: 000000000001f0a8     8 OBJECT  <OS specific>: 10 DEFAULT   24 _ZGVN1s\n"
    monkeypatch.setattr(subprocess, "check_output", lambda *_, **__: listing)
    assert elf.read(Path("lib.so")) == elf.SharedLibrary(defined={"_ZGVN1s"})


def test_a_machine_without_readelf_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match=r"there is no readelf on PATH; .*apt install binutils"):
        elf.read(tmp_path / "lib.so")


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_generated_functions_succeed_unless_success_would_be_a_lie(tmp_path):
    names = {"aclrtSomething", "aclopCompileAndExecute", "HcclSomethingNew"}
    notes = "#include <cstdio>\nnamespace sim {\n"
    notes += "void note_default(const char*) {} void note_refused(const char* name) { puts(name); }\n}\n"
    (tmp_path / "all.cpp").write_text(notes + build._default_functions(names))
    build._compile("-o", tmp_path / "liball.so", tmp_path / "all.cpp")
    library = ctypes.CDLL(str(tmp_path / "liball.so"))
    assert {name: getattr(library, name)() for name in names} == {
        "aclrtSomething": 0,
        "aclopCompileAndExecute": 500000,
        "HcclSomethingNew": 5,
    }
