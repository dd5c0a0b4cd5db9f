"""Entries of search paths that lead to a working directory of another user, and what compilers find there."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from megatron_npu.base import search_paths
from megatron_npu.process import cached_library
from tests.support import processes, tiny

HEADER = '#include_next <cstdint>\nextern "C" int evil() { return 1; }\n'


@pytest.fixture
def open_folder(tmp_path, monkeypatch) -> Path:
    """A working directory that anyone can write to."""
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (":/usr/bin", "/usr/bin"),
        ("/usr/bin:", "/usr/bin"),
        ("/usr/bin:.:sub", "/usr/bin"),
        (":", None),
        ("/usr/bin", "/usr/bin"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("name", search_paths.VARIABLES)
def test_entries_that_lead_there_are_removed(open_folder, name, given, kept):
    (open_folder / "sub").mkdir()
    (open_folder / "sub").chmod(0o777)
    variables = {name: given}
    told = search_paths.clean(variables)
    assert variables.get(name) == kept
    assert [name in line and "can be written by anyone" in line for line in told] == [True] * (given != kept)


def test_entries_that_lead_to_an_own_folder_are_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    variables = {"PATH": ":.:/usr/bin"}
    assert not search_paths.clean(variables)
    assert variables == {"PATH": ":.:/usr/bin"}


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_takes_nothing_from_there(open_folder, tmp_path, monkeypatch):
    """Neither a header, nor a program of its own, nor the compiler itself."""
    (open_folder / "cstdint").write_text(HEADER)
    for name in ("cc1plus", "as", "ld", "collect2", "g++"):
        (open_folder / name).write_text(f"#!/bin/sh\n: > {tmp_path / 'MARK'}\nexit 1\n")
        (open_folder / name).chmod(0o755)
    source = tmp_path / "answer.cpp"
    source.write_text('#include <cstdint>\nextern "C" int answer() { return 1; }\n')
    for name in ("CPATH", "CPLUS_INCLUDE_PATH", "COMPILER_PATH", "LIBRARY_PATH", "GCC_EXEC_PREFIX", "PATH"):
        monkeypatch.setenv(name, f":{os.environ['PATH']}" if name == "PATH" else ":")
    flags = ("-shared", "-fPIC", "-O0")
    library = cached_library.load(cached_library.Recipe(tmp_path / "cache", (source,), (), flags, (), "x"))
    assert library.answer() == 1
    assert not hasattr(library, "evil")
    assert not (tmp_path / "MARK").exists()


def test_a_command_says_what_it_ignores(open_folder):
    environment = {**tiny.environment(), "CPATH": ":/usr/include"}
    done = processes.run(
        tiny.command("patches", "list", "--help"),
        cwd=open_folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "warning: the entry '' of CPATH is ignored" in done.stderr
