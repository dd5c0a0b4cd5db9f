"""A file that a command is to write is checked before the command computes anything."""

from __future__ import annotations

import pytest

from megatron_npu.base import output_files
from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import lambada
from megatron_npu.generation import generate
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


@pytest.mark.parametrize("output", ["data", "sub/../data", "link", "folder/inside", "way/data"])
def test_an_input_is_not_replaced(output, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("sub", "folder"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data").write_text("kept")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "way").symlink_to(".")
    with pytest.raises(UsageError, match=r"this command reads .*Use another path for the output"):
        output_files.require_writable(None, output, inputs=[None, "link", "folder"])
    output_files.require_writable("other", inputs=["link", "folder"])


def test_two_outputs_are_two_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="each output must be a different file"):
        output_files.require_writable("one", None, tmp_path / "one")


def test_generate_and_lambada_replace_none_of_their_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    step = tmp_path / "saved" / "iter_0000002"
    step.mkdir(parents=True)
    for file in (tmp_path / "in", step / "common.pt"):
        file.write_text("kept")
    for words in (
        "--sample-input-file in --sample-output-file in",
        "--sample-input-file in --genfile in",
        "--prompt 1 --output in --vocab-file in",
        "--prompt 1 --output saved/iter_0000002/common.pt",
    ):
        with pytest.raises(UsageError, match="this command reads"):
            generate.main(["--load", "saved", *words.split()])
    for results in ("in", "saved/iter_0000002/common.pt"):
        with pytest.raises(UsageError, match="this command reads"):
            lambada.main(["--load", "saved", "--valid-data", "in", "--results", results])
