"""A file that a command is to write is checked before the command computes anything."""

from __future__ import annotations

import pytest

from megatron_npu.base import output_files
from megatron_npu.base.errors import UsageError
from megatron_npu.planning import command


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("", r"\. cannot be written: it is a folder"),
        ("folder", "it is a folder"),
        ("absent/file", "the folder .*absent does not exist"),
        ("file/below", "the folder .*file does not exist"),
        ("x" * 255, "File name too long"),
        ("x" * 256, "File name too long"),
        ("x" * 256 + "/file", "File name too long"),
        ("x/" * 2500 + "file", "File name too long"),
        ("/proc/file", "the folder /proc is not writable"),
    ],
)
def test_what_cannot_be_written_is_one_sentence(file, reason, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for flag in ("--json", "--html", "--timeline"):
        with pytest.raises(UsageError, match=f"(?:{reason}).*Pass the path of a file in an existing folder"):
            command.main(["--devices", "1", flag, file, "--", "pretrain", "--absent"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_the_check_leaves_what_is_there(tmp_path):
    file = tmp_path / "kept"
    file.write_text("kept")
    output_files.require_writable(file)
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]
