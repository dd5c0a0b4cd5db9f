"""A stranger's folder of data reads nothing elsewhere, through the commands that take one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.data import dataset_folders
from megatron_npu.data.preprocessing import command
from megatron_npu.finetune.data import datasets
from tests.conftest import Vocabulary

library = pytest.importorskip("datasets", reason="could not import datasets (pip install megatron_npu[data])")
Read = Callable[[Path], Any]
HEAD = "---\nconfigs:\n- config_name: x\n  {lines}\n---\n"


@pytest.fixture(params=["preprocess", "train"])
def read(
    request: pytest.FixtureRequest, tiny: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Read:
    """Return a function that reads a folder with the configuration 'x', or one of ``save_to_disk``."""
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def preprocess(folder: Path) -> int:
        files = ["--vocab-file", str(tiny.vocab_file), "--merge-file", str(tiny.merge_file)]
        named = ["--hf-name", "x"] if (folder / "README.md").exists() else []
        place = ["--output-prefix", str(tmp_path / "out"), "--json-keys", "text"]
        return command.main(["--hf-dataset", str(folder), *named, *place, *files])

    def train(folder: Path) -> Any:
        name = "x" if (folder / "README.md").exists() else None
        given = {"data_path": str(folder), "data_name": name, "validation_fraction": 0.5, "seed": 1}
        return datasets.load(argparse.Namespace(**given))

    return {"preprocess": preprocess, "train": train}[request.param]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a stranger, beside which there is a file of the user's."""
    rows = [{"text": f"row {number}"} for number in range(4)]
    for place in (tmp_path, tmp_path / "set" / "inside"):
        place.mkdir(exist_ok=True, parents=True)
        (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path / "set"


@pytest.mark.parametrize(
    "lines",
    [
        "data_files: '{outside}/rows.jsonl'",
        "data_files: '../rows.jsonl'",
        "data_files: 'inside/../../*.jsonl'",
        "data_files:\n  - split: train\n    path: ['inside/*.jsonl', '../*.jsonl']",
        "data_dir: '{outside}'",
        "data_dir: '..'",
        "data_files: 'file://{outside}/rows.jsonl'",
        "data_files: 'zip://a.jsonl::{outside}/rows.zip'",
    ],
    ids=["absolute", "parent", "through", "one-of-two", "folder", "parent-folder", "address", "chain"],
)
def test_a_card_leads_nowhere_else(read: Read, folder: Path, lines: str) -> None:
    (folder / "README.md").write_text(HEAD.format(lines=lines.format(outside=folder.parent)))
    with pytest.raises(UsageError, match=r"README\.md refers to '.*', which is outside its folder"):
        read(folder)


def test_a_card_of_files_inside_is_followed(read: Read, folder: Path) -> None:
    (folder / "README.md").write_text(HEAD.format(lines="data_files: 'inside/*.jsonl'"))
    assert read(folder) is not None
    (folder / "README.md").write_text(HEAD.format(lines="data_dir: inside"))
    assert read(folder) is not None


@pytest.fixture
def address() -> Iterator[tuple[str, list[str]]]:
    """Yield the address of a server, and what it is asked."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET  # noqa: N815

        def log_message(self, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/rows.jsonl", asked
        server.shutdown()


def test_no_address_is_asked(read: Read, folder: Path, address: tuple[str, list[str]]) -> None:
    url, asked = address
    (folder / "README.md").write_text(HEAD.format(lines=f"data_files: '{url}'"))
    with pytest.raises(UsageError):
        read(folder)
    assert asked == []


@pytest.mark.parametrize("several", [False, True])
def test_a_saved_set_leads_nowhere_else(read: Read, folder: Path, several: bool) -> None:
    saved, other = folder / "saved", folder / "other"
    rows = library.Dataset.from_list([{"text": f"row {number}"} for number in range(4)])
    rows.save_to_disk(str(other))
    kept = library.DatasetDict(train=rows) if several else rows
    kept.save_to_disk(str(saved))
    assert read(saved) is not None
    state = next(saved.rglob("state.json"))
    content = json.loads(state.read_text())
    mine = content["_data_files"][0]["filename"]
    up = "../.." if several else ".."
    content["_data_files"][0]["filename"] = f"{up}/other/{mine}"
    state.write_text(json.dumps(content))
    refusal = rf"state\.json refers to '{up}/other/{mine}', which is outside its folder"
    with pytest.raises(UsageError, match=refusal):
        read(saved)


def test_a_saved_split_lies_in_its_folder(read: Read, folder: Path) -> None:
    rows = library.Dataset.from_list([{"text": f"row {number}"} for number in range(4)])
    rows.save_to_disk(str(folder / "other"))
    (folder / "saved").mkdir()
    (folder / "saved" / "dataset_dict.json").write_text('{"splits": ["../other"]}')
    with pytest.raises(UsageError, match=r"'\.\./other', which is outside its folder"):
        read(folder / "saved")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link to another user")
@pytest.mark.parametrize("way", ["inside", "train.jsonl"], ids=["folder", "file"])
def test_a_link_of_a_stranger_leads_nowhere_else(read: Read, folder: Path, way: str) -> None:
    shutil.rmtree(folder / "inside")
    link = folder / way
    link.symlink_to(folder.parent / "rows.jsonl" if way == "train.jsonl" else folder.parent / "other")
    (folder.parent / "other").mkdir()
    shutil.copy(folder.parent / "rows.jsonl", folder.parent / "other" / "train.jsonl")
    os.chown(link, 61_184, 61_184, follow_symlinks=False)
    with pytest.raises(UsageError, match=r"is a link of user 61184 to '.*', which is outside the folder"):
        read(folder)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a link to another user")
def test_other_links_are_followed(tmp_path: Path) -> None:
    """Those of the user, as in the hub's cache, and those of a stranger that stay in the folder."""
    (tmp_path / "set").mkdir()
    for name in ("rows.jsonl", "set/train.jsonl"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "set" / "mine").symlink_to(tmp_path / "rows.jsonl")
    (tmp_path / "set" / "theirs").symlink_to("train.jsonl")
    os.chown(tmp_path / "set" / "theirs", 61_184, 61_184, follow_symlinks=False)
    dataset_folders.require_no_link_of_others(tmp_path / "set", "--data-path set")
