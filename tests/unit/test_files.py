"""What is written is there whole or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.base import files, given_files
from megatron_npu.commands import cli
from megatron_npu.generation import sample_files


@pytest.mark.parametrize("content", ["Grüße\n", b"\x00\xff"])
def test_a_file_has_its_content_and_nothing_else_is_left(tmp_path: Path, content: str | bytes) -> None:
    files.write(tmp_path / "file", content)
    written = (tmp_path / "file").read_bytes()
    assert written == (content if isinstance(content, bytes) else content.encode("utf-8"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_write_that_fails_leaves_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    files.write(path, "old")
    monkeypatch.setattr(files.os, "replace", _fail)
    with pytest.raises(OSError, match="full"):
        files.write(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_old_file_stays_until_the_block_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "file"
    files.write(path, "old")
    with pytest.raises(KeyboardInterrupt), files.writing(path) as stream:  # noqa: PT012
        stream.write(b"half of the n")
        assert path.read_text() == "old"
        assert files.partial_file(path).exists()
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_the_umask_is_respected(tmp_path: Path) -> None:
    former = os.umask(0o027)
    try:
        files.write(tmp_path / "file", "text")
    finally:
        os.umask(former)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(("users", "then"), [(0o022, 0o027), (0o077, 0o077), (0o002, 0o027)])
def test_the_umask_is_only_ever_tightened(users: int, then: int) -> None:
    former = os.umask(users)
    try:
        assert files.tighten_umask() == users
        assert os.umask(users) == then
        with contextlib.suppress(SystemExit):
            cli.main(["ledger", "--help"])  # every command does it, before all else
        assert os.umask(users) == then
    finally:
        os.umask(former)


def test_a_folder_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder"
    with files.new_folder(path) as partial:
        (partial / "a").write_text("")
        assert not path.exists()
    assert [each.name for each in path.iterdir()] == ["a"]
    assert list(path.parent.iterdir()) == [path]


def test_a_folder_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), files.new_folder(tmp_path / "folder") as partial:  # noqa: PT012
        (partial / "a").write_text("")
        _fail()
    assert list(tmp_path.iterdir()) == []


def test_the_rest_of_a_killed_attempt_does_not_enter_a_folder(tmp_path: Path) -> None:
    partial = files.partial_folder(tmp_path / "folder")
    partial.mkdir()
    (partial / "rest").write_text("")
    with files.new_folder(tmp_path / "folder"):
        pass
    assert list((tmp_path / "folder").iterdir()) == []


def test_a_folder_with_content_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "old").write_text("")
    with pytest.raises(OSError, match="not empty"), files.new_folder(tmp_path / "folder"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "old").exists()


def _old_folder(path: Path) -> Path:
    path.mkdir()
    (path / "old").touch()
    return path


def _replace(path: Path) -> None:
    with files.new_folder(path, replace=True) as partial:
        (partial / "new").touch()


def _content(path: Path) -> list[str]:
    return [each.name for each in path.iterdir()]


def test_a_folder_takes_the_place_of_another(tmp_path: Path) -> None:
    path = _old_folder(tmp_path / "folder")
    _replace(path)
    assert _content(path) == ["new"]
    assert _content(tmp_path) == ["folder"]


def test_a_folder_that_cannot_come_into_its_place_leaves_the_old_one(tmp_path: Path, monkeypatch) -> None:
    path = _old_folder(tmp_path / "folder")
    replace = os.replace

    def refusing(source: Path, destination: Path) -> None:
        replace(source, destination) if source.name != ".folder.partial" else _fail()

    monkeypatch.setattr(os, "replace", refusing)
    with pytest.raises(OSError, match="full"):
        _replace(path)
    assert _content(path) == ["old"]
    assert _content(tmp_path) == ["folder"]


@pytest.mark.parametrize("steps", range(8))
def test_a_process_that_is_killed_while_it_replaces_a_folder_loses_none(tmp_path: Path, steps: int) -> None:
    path = _old_folder(tmp_path / "folder")
    with pytest.MonkeyPatch.context() as patch:
        _die_after(steps, patch)
        with contextlib.suppress(KeyboardInterrupt):
            _replace(path)
    files.restore_replaced(tmp_path)
    assert _content(path) in (["old"], ["new"])
    _replace(path)
    assert _content(path) == ["new"]
    assert _content(tmp_path) == ["folder"]


def _die_after(steps: int, patch: pytest.MonkeyPatch) -> None:
    """Let so many more steps of the file system happen, and from then on none, as of a killed process."""
    left = iter(range(steps))
    for module, name in ((os, "replace"), (files.shutil, "rmtree"), (Path, "mkdir")):
        patch.setattr(module, name, _while_alive(getattr(module, name), left))


def _while_alive(function: Callable[..., object], left: Iterator[int]) -> Callable[..., object]:
    def step(*args: object, **options: object) -> object:
        if next(left, None) is None:
            raise KeyboardInterrupt
        return function(*args, **options)

    return step


def _fail(*_: object) -> None:
    raise OSError("the disk is full")


def test_lines_end_where_editors_end_them(tmp_path):
    path = tmp_path / "prompts"
    path.write_bytes("one\u2028still one\u0085\x0b\x1c\r\ntwo\n\nfour".encode())
    assert given_files.lines(path) == ["one\u2028still one\u0085\x0b\x1c", "two", "", "four"]
    path.write_bytes(b"")
    assert given_files.lines(path) == []
    assert sample_files.read_prompts(str(write_text(path, "a\u2028b\nc\n"))) == ["a\u2028b", "c"]


def write_text(path, text):
    """Write a text; return its path."""
    path.write_text(text, encoding="utf-8")
    return path


def test_a_folder_that_another_process_is_writing_is_left_to_it(tmp_path: Path) -> None:
    """Two conversions to one folder: the second removed the files of the first."""
    with files.new_folder(tmp_path / "folder") as partial:
        (partial / "file").touch()
        with (
            pytest.raises(OSError, match=r"another process is writing to this folder.*folder'"),
            files.new_folder(tmp_path / "folder"),
        ):
            pass
        assert (partial / "file").exists()
    assert (tmp_path / "folder" / "file").exists()


@pytest.mark.parametrize("block", [files.writing, files.new_folder])
def test_what_the_system_refuses_is_named(tmp_path: Path, block: Callable[[Path], Any]) -> None:
    """An error of a write says no more than that there is no room."""
    named = pytest.raises(OSError, match=r"No space left on device: '.*/result'")
    with named, block(tmp_path / "result"), open("/dev/full", "wb", buffering=0) as full:
        full.write(b"text")


def test_a_link_that_another_user_has_made_is_not_written_through(tmp_path: Path, monkeypatch) -> None:
    mine, theirs, target = tmp_path / "mine", tmp_path / "theirs", tmp_path / "precious"
    target.write_text("a\n")
    for link in (mine, theirs):
        link.symlink_to("precious")
    with open(mine, "a", opener=files.own_opener) as stream:
        stream.write("b\n")
    other = os.geteuid() + 12345
    if os.geteuid() == 0:
        os.lchown(theirs, other, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: other)
    with pytest.raises(PermissionError, match="a link that another user has created"):
        open(theirs, "a", opener=files.own_opener)  # noqa: SIM115
    assert target.read_text() == "a\nb\n"


def _link_at_partial(path: Path, target: Path) -> None:
    """Put a link where another user, who has guessed the process number, would put it."""
    target.write_text("precious")
    files.partial_file(path).symlink_to(target)


def test_a_link_at_the_temporary_name_is_not_written_through(tmp_path: Path) -> None:
    path, target = tmp_path / "result", tmp_path / "target"
    _link_at_partial(path, target)
    files.write(path, "new")
    assert target.read_text() == "precious"
    assert path.read_text() == "new"
    assert not path.is_symlink()


def test_a_pipe_at_a_temporary_name_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "result"
    os.mkfifo(f"{path}.1.partial")
    files.write(path, "new")
    assert path.read_text() == "new"
