"""Libraries that are compiled once into a cache, and of what is loaded from it."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import stat
import sys
import time
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.process import cached_library, user_cache
from tests.conftest import wait_until
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("-shared", "-fPIC", "-O0")
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def recipe(folder: Path, answer: int = 1, flags: tuple[str, ...] = FLAGS) -> cached_library.Recipe:
    """Return that of a library whose ``answer`` gives a number."""
    source = folder / f"answer{answer}.cpp"
    folder.mkdir(exist_ok=True, parents=True)
    if not source.exists():  # a process that reads it while another one empties it would compile twice
        source.write_text(f'extern "C" int answer() {{ return {answer}; }}\n')
    return cached_library.Recipe(folder / "cache", (source,), (), flags, (), "set SWITCH=0")


@pytest.fixture
def compilations(tmp_path, monkeypatch) -> Path:
    """A file with a line for each compilation from here on, also in other processes."""
    compiler, log = shutil.which("g++"), tmp_path / "compilations"
    if compiler is None:
        pytest.skip("no g++")
    script(tmp_path / "bin", f'echo "$@" >> {log}\nexec {compiler} "$@"', monkeypatch)
    log.touch()
    return log


def script(folder: Path, body: str, monkeypatch) -> None:
    """Let ``g++`` be a script."""
    folder.mkdir()
    (folder / "g++").write_text(f"#!/bin/sh\n{body}\n")
    (folder / "g++").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def the_library(given: cached_library.Recipe) -> Path:
    (found,) = given.folder.glob("*.so")
    return found


def test_it_is_compiled_once_and_nobody_else_may_write_there(tmp_path, compilations):
    given = recipe(tmp_path)
    assert cached_library.load(given).answer() == cached_library.load(given).answer() == 1
    assert len(compilations.read_text().splitlines()) == 1
    assert (
        stat.S_IMODE(given.folder.stat().st_mode) == stat.S_IMODE(the_library(given).stat().st_mode) == 0o700
    )
    assert not list(given.folder.glob("*.partial"))


def _answer(folder: Path) -> int:
    return int(cached_library.load(recipe(folder)).answer())


def test_one_of_many_processes_compiles(tmp_path, compilations):
    recipe(tmp_path)
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        assert pool.map(_answer, [tmp_path] * 4, chunksize=1) == [1] * 4
    assert len(compilations.read_text().splitlines()) == 1


@needs_compiler
def test_a_descriptor_that_somebody_has_closed_brings_no_other_library(tmp_path):
    """A child that is forked may close all descriptors; the number of the next library comes again."""
    program = f"""if True:
        import os
        from pathlib import Path
        from tests.unit.test_cached_library import cached_library, recipe
        first = cached_library.load(recipe(Path({str(tmp_path / "a")!r})))
        used = len(os.listdir("/proc/self/fd"))
        os.closerange(3, used + 8)
        second = cached_library.load(recipe(Path({str(tmp_path / "b")!r}), answer=2))
        print(first.answer(), second.answer())
    """
    command = [sys.executable, "-c", program]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "1 2\n", done.stderr


@pytest.mark.parametrize("length", [0, 10, 5000, -1])
def test_one_that_was_cut_short_is_compiled_again(tmp_path, compilations, length):
    """A loaded one would end the process with SIGBUS, so each is loaded in a process of its own."""
    given = recipe(tmp_path)
    cached_library.load(given)
    os.truncate(the_library(given), length % the_library(given).stat().st_size)
    code = "import sys, pathlib; from tests.unit import test_cached_library as t; "
    code += "print(t._answer(pathlib.Path(sys.argv[1])))"
    result = processes.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (0, "1\n"), result.stderr
    assert len(compilations.read_text().splitlines()) == 2


def test_one_that_the_loader_refuses_is_compiled_again(tmp_path, compilations):
    given = recipe(tmp_path)
    cached_library.load(given)
    library = the_library(given)
    library.write_bytes(b"\x7fELF of another machine")
    with user_cache.opened(given.folder, "") as folder:
        user_cache.seal(folder, library.name)
    assert cached_library.load(given).answer() == 1
    assert len(compilations.read_text().splitlines()) == 2


def test_one_that_cannot_be_loaded_because_proc_is_hidden_is_one_sentence(
    tmp_path, compilations, monkeypatch
):
    """Found by the campaign: ``plan`` showed the traceback of a rank, and this would be compiled again."""
    given = recipe(tmp_path)
    cached_library.load(given)
    monkeypatch.setattr(user_cache, "_DESCRIPTORS", str(tmp_path / "hidden"))
    with pytest.raises(UsageError, match=r"hidden does not exist, .*\. Mount /proc \(mount -t proc"):
        cached_library.load(given)
    assert len(compilations.read_text().splitlines()) == 1


@needs_compiler
def test_what_is_swapped_after_the_look_is_not_loaded(tmp_path, monkeypatch):
    """Of file and folder: between the look and the loader both names lead elsewhere."""
    given, planted = recipe(tmp_path / "own", 1), recipe(tmp_path / "planted", 2)
    cached_library.load(given)
    cached_library.load(planted)
    swapped = the_library(given)
    shutil.copy(the_library(planted), planted.folder / swapped.name)
    looked = user_cache.is_whole

    def swap(descriptor: int) -> bool:
        given.folder.rename(tmp_path / "away")
        planted.folder.rename(given.folder)
        return looked(descriptor)

    monkeypatch.setattr(user_cache, "is_whole", swap)
    assert cached_library.load(given).answer() == 1
    assert (tmp_path / "away").is_dir()


@needs_compiler
def test_two_libraries_of_one_process_are_two(tmp_path):
    """The loader knows them by their descriptors, which must not be used again."""
    found = [cached_library.load(recipe(tmp_path, answer)) for answer in (1, 2, 3)]
    assert [library.answer() for library in found] == [1, 2, 3]


@needs_compiler
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_refused(tmp_path, mode):
    given = recipe(tmp_path)
    cached_library.load(given)
    given.folder.chmod(mode)
    with pytest.raises(UsageError, match=f"has mode {mode:o}: others may write to it.*XDG_CACHE_HOME"):
        cached_library.load(given)


@needs_compiler
def test_a_file_that_others_may_write_to_is_refused(tmp_path):
    given = recipe(tmp_path)
    cached_library.load(given)
    the_library(given).chmod(0o720)
    with pytest.raises(UsageError, match=r"\.so has mode 720: others may write to it.*Remove .*\.so, or set"):
        cached_library.load(given)


@needs_compiler
@pytest.mark.parametrize("what", ["folder", "file"])
def test_what_belongs_to_somebody_else_is_refused(tmp_path, monkeypatch, what):
    given = recipe(tmp_path)
    cached_library.load(given)
    owner = 12345
    if os.geteuid() == 0:
        os.chown(given.folder if what == "folder" else the_library(given), owner, -1)
    elif what == "folder":
        owner = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        pytest.skip("root, who can give files away")
    with pytest.raises(UsageError, match=f"belongs to user {owner}, not to"):
        cached_library.load(given)


@needs_compiler
def test_a_link_is_refused(tmp_path):
    given, other = recipe(tmp_path / "own"), recipe(tmp_path / "other", 2)
    cached_library.load(given)
    cached_library.load(other)
    library = the_library(given)
    library.unlink()
    library.symlink_to(the_library(other))
    with pytest.raises(UsageError, match="symbolic links"):
        cached_library.load(given)


def test_each_cause_has_its_own_remedy(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        with pytest.raises(UsageError, match=r"no g\+\+ on PATH.*Install g\+\+ \(apt.*, or set SWITCH=0"):
            cached_library.load(recipe(tmp_path))
    said = {
        "error: unknown flag": r"cannot compile the sources, .*: error: unknown flag.*newer g",
        "fatal error: Killed signal terminated program cc1plus": r"cannot compile .*gigabyte of memory",
        "fatal error: /tmp/x.s: No space left on device": r"cannot compile the sources, .*TMPDIR",
    }
    for number, (line, expected) in enumerate(said.items()):
        with monkeypatch.context() as patch:
            script(tmp_path / f"bin{number}", f'echo "{line}"; exit 1', patch)
            with pytest.raises(UsageError, match=f"{expected}.*, or set SWITCH=0"):
                cached_library.load(recipe(tmp_path))
    assert not list((tmp_path / "cache").glob("*.so*"))


def test_a_compilation_that_does_not_end_is_ended(tmp_path, monkeypatch):
    """With what it has started: g++ itself only waits."""
    monkeypatch.setattr(cached_library, "_LONGEST", 1)
    script(tmp_path / "bin", f"sleep 600 & echo $! > {tmp_path}/pid; wait", monkeypatch)
    with pytest.raises(UsageError, match=r"did not finish within 1 s.*less busy, or set"):
        cached_library.load(recipe(tmp_path))
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not _runs(child))
    assert not list((tmp_path / "cache").glob("*.so*"))


def _runs(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@needs_compiler
def test_a_file_system_that_runs_nothing_is_said(tmp_path, monkeypatch):
    found = os.statvfs(tmp_path)
    fields = [*found[:8], found.f_flag | os.ST_NOEXEC, *found[9:]]
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: os.statvfs_result(fields))
    with pytest.raises(UsageError, match=r"mounted noexec.*XDG_CACHE_HOME, or set SWITCH=0"):
        cached_library.load(recipe(tmp_path))


@needs_compiler
def test_a_cache_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "cache").write_text("")
    with pytest.raises(
        UsageError, match=r"the cache .*cache cannot be used \(.*XDG_CACHE_HOME, or set SWITCH=0"
    ):
        cached_library.load(recipe(tmp_path))


def test_waiting_for_another_process_ends(tmp_path, monkeypatch, compilations):
    monkeypatch.setattr(cached_library, "_LONGEST", -59.5)
    given = recipe(tmp_path)
    given.folder.mkdir(mode=0o700)
    key = cached_library._key(given, Path(shutil.which("g++") or "").resolve())
    with (
        user_cache.locked(given.folder / f"{key}.lock", "", lambda: None),
        pytest.raises(UsageError, match="another process has held"),
    ):
        cached_library.load(given)
    assert not compilations.read_text()


@needs_compiler
def test_what_nobody_has_used_for_a_month_is_removed(tmp_path):
    first = recipe(tmp_path, 1)
    cached_library.load(first)
    old = the_library(first)
    rest = first.folder / "0.so.x.partial"
    rest.touch()
    month = time.time() - 31 * 86400
    for path in (old, rest):
        os.utime(path, (month, month))
    kept = first.folder / "0123.so"
    kept.touch(0o700)
    cached_library.load(recipe(tmp_path, 2))
    assert not old.exists()
    assert not rest.exists()
    assert kept.exists()


@needs_compiler
def test_what_is_used_stays(tmp_path):
    given = recipe(tmp_path)
    cached_library.load(given)
    month = time.time() - 31 * 86400
    os.utime(the_library(given), (month, month))
    cached_library.load(given)
    cached_library.load(recipe(tmp_path, 2))
    assert len(list(given.folder.glob("*.so"))) == 2


@needs_compiler
def test_ctrl_c_ends_the_compiler(tmp_path, monkeypatch):
    script(
        tmp_path / "bin",
        f"sleep 600 & echo $! > {tmp_path}/pid; sleep 1; kill -INT {os.getpid()}; wait",
        monkeypatch,
    )
    with pytest.raises(KeyboardInterrupt):
        cached_library.load(recipe(tmp_path))
    wait_until(lambda: not _runs(int((tmp_path / "pid").read_text())))


def test_the_users_cache_is_where_xdg_says(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert user_cache.root() == tmp_path / "megatron_npu"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which its specification tells to ignore
    monkeypatch.setenv("HOME", str(tmp_path))
    assert user_cache.root() == tmp_path / ".cache" / "megatron_npu"
