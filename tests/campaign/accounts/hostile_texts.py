"""A stranger's texts: lines and tables to tokenize, passages, run files in YAML, dataset folders."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import NULL_TOKENIZER, Samples
from tests.campaign.accounts.trials import EITHER, REFUSED, Try

_PLACE = "texts, tables and run files of another account"


def tries(room: Room) -> Iterator[Try]:
    """Yield commands that read one hostile file or folder each."""
    samples = Samples(room)
    for name, (file, content, expected) in TEXTS.items():
        path = _written(room, f"text {name}", file, content)
        words = samples.preprocess("--input", str(path))
        yield Try(_PLACE, f"preprocess: {name}", words, expected, limit=120, starts=False)
    for name, content in PASSAGES.items():
        path = _written(room, f"passages {name}", "a.jsonl", content)
        words = [*samples.lambada(), "--valid-data", str(path)]
        yield Try(_PLACE, f"lambada: {name}", words, limit=120, starts=False)
    for name, content in RUN_FILES.items():
        path = _written(room, f"run file {name}", "run.yaml", content)
        words = ["pretrain", "--config", str(path)]
        yield Try(_PLACE, f"pretrain --config: {name}", words, limit=60, starts=False)
    for name, make in FOLDERS.items():
        folder = room.place(f"dataset {name}")
        make(folder, room.mark(name))
        room.give(folder)
        made = str(room.temporary / "made")
        words = ["preprocess", *NULL_TOKENIZER, "--hf-dataset", str(folder), "--output-prefix", made]
        yield Try(_PLACE, f"preprocess --hf-dataset: {name}", words, limit=200, starts=False)
    for name, (file, content) in TABLES.items():
        path = _written(room, f"table {name}", file, content)
        model = ["--task", "sequence_classification", "--pretrained-model-name-or-path", str(path.parent)]
        words = ["train", *model, "--data-path", str(path.parent), "--epochs", "1"]
        yield Try(_PLACE, f"train: {name}", words, limit=200, starts=False)


def _written(room: Room, name: str, file: str, content: bytes | Callable[[Path], object]) -> Path:
    folder = room.place(name)
    path = folder / file
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.replace(b"{mark}", bytes(room.mark(name))))
    room.give(folder)
    return path


def _tar(path: Path) -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name in ("../../outside", "/tmp/outside"):
            archive.addfile(tarfile.TarInfo(name), io.BytesIO())


def _zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../outside.jsonl", '{"text":"1"}\n')


# name: the file's name, its content, what is expected
TEXTS: dict[str, tuple[str, bytes | Callable[[Path], object], str]] = {
    "nested": ("a.jsonl", b'{"text":' + b"[" * 200_000, REFUSED),
    "a number of 10^4 digits": ("a.jsonl", b'{"text":' + b"9" * 10_000 + b"}", REFUSED),
    "another key": ("a.jsonl", b'{"txt":"1"}', REFUSED),
    "not UTF-8": ("a.jsonl", b'{"text":"\xff"}', REFUSED),
    "a surrogate": ("a.jsonl", b'{"text":"\\ud800"}', REFUSED),
    "zero bytes": ("a.jsonl", bytes(100_000), REFUSED),
    "a token of 10^30": ("a.jsonl", b'{"text":"1' + b"0" * 30 + b'"}', REFUSED),
    "a negative token": ("a.jsonl", b'{"text":"-5"}', REFUSED),
    "a damaged gz": ("a.jsonl.gz", b"\x1f\x8b\x08\0garbage", REFUSED),
    "a cut gz": ("a.jsonl.gz", gzip.compress(b'{"text":"1 2 3"}\n' * 10_000)[:-20], REFUSED),
    "a line of 1 GB in a gz": ("a.jsonl.gz", gzip.compress(b'{"text":"' + b"1 " * (1 << 29), 1), REFUSED),
    "a damaged xz": ("a.jsonl.xz", lzma.compress(b'{"text":"1"}\n')[:-9], REFUSED),
    "a damaged zst": ("a.jsonl.zst", b"\x28\xb5\x2f\xfdgarbage", REFUSED),
    "a damaged parquet": ("a.parquet", b"PAR1" + bytes(100) + b"PAR1", REFUSED),
    "a parquet with a footer of 2 GB": ("a.parquet", b"PAR1" + b"\xff\xff\xff\x7fPAR1", REFUSED),
    "a damaged arrow": ("a.arrow", b"ARROW1\0\0" + os.urandom(300), REFUSED),
    "an arrow stream of 2 GB": ("a.arrow", b"\xff\xff\xff\xff\xf0\xff\xff\x7f", REFUSED),
    "csv without a header": ("a.csv", b"\0\0\0", REFUSED),
    "csv with a field of 10 MB": ("a.csv", b'text\n"' + b"1 " * 5_000_000, REFUSED),
    "an archive": ("a.tar.gz", _tar, REFUSED),
    "a zip": ("a.zip", _zip, REFUSED),
    "a pipe": ("a.jsonl", lambda path: os.mkfifo(path, 0o666), REFUSED),
    "a link to /dev/zero": ("a.jsonl", lambda path: path.symlink_to("/dev/zero"), REFUSED),
    "a script in the name of a table": ("a.py", b'open("{mark}","w")', REFUSED),
    "one good line": ("a.jsonl", b'{"text":"1 2"}\n', EITHER),
}

PASSAGES: dict[str, bytes] = {
    "nested": b'{"text":' + b"[" * 200_000,
    "a number": b'{"text":5}\n',
    "not UTF-8": b'{"text":"\xff"}\n',
    "a token that is not there": b'{"text":"1 2 99999"}\n',
    "empty texts": b'{"text":""}\n',
    "a list": b"[1]\n",
    "one token": b'{"text":"1"}\n',
}

RUN_FILES: dict[str, bytes] = {
    "references that double": b"a: &a [x]\n" + b"".join(b"b%d: [*a,*a]\n" % n for n in range(50)),
    "code": b'lr: !!python/object/apply:os.mkdir ["{mark}"]\n',
    "an unknown tag": b"lr: !evil 1\n",
    "a long list": b"data-path: [" + b"a," * 500_000 + b"a]\n",
    "a zero byte": b"lr: 1\0\n",
    "UTF-16": "lr: 1".encode("utf-16"),
    "quotes": b"lr: " + b"\"'" * 20_000 + b"#\n",
    "the same key 3 * 10^5 times": b"lr: 1\n" * 300_000,
    "another run file": b"config: /dev/zero\n",
    "nested": b"lr: " + b"[" * 100_000,
    "nested mappings": b"lr: " + b"{a: " * 50_000,
    "6,000 digits": b"train-iters: " + b"9" * 6000,
    "a flag with a space": b"'lr 1 --load': x\n",
    "a flag that runs a script": b"user-script: /dev/null/{mark}\n",
    "a preset that is a path": b"preset: ../../../../../../etc/passwd\n",
    "a merge key": b"base: &b {lr: 1}\n<<: *b\n",
    "two documents": b"lr: 1\n---\nlr: 2\n",
    "a directive": b"%YAML 9.9\n---\nlr: 1\n",
    "only a comment mark and tabs": b"\t\t#\n\tlr: 1\n",
    "escape sequences": b'"\\e]0;x\\a\\e[2Jlr": 1\n',
    "a date": b"lr: 2026-11-27\n",
    "sexagesimal": b"train-iters: 1:30:00\n",
    "no and yes": b"lr: no\n",
    "nan": b"lr: .nan\n",
    "infinity": b"lr: .inf\n",
    "null": b"lr: null\n",
    "a mapping in a list": b"data-path: [{a: b}]\n",
}


def _card(text: str) -> Callable[[Path, Path], object]:
    return lambda folder, mark: (folder / "README.md").write_text(text.replace("{mark}", str(mark)))


def _state(filename: str) -> Callable[[Path, Path], object]:
    def make(folder: Path, mark: Path) -> None:
        state = {"_data_files": [{"filename": filename}], "_format_type": None, "_split": None}
        (folder / "state.json").write_text(json.dumps(state))
        (folder / "dataset_info.json").write_text("{}")

    return make


def _script(folder: Path, mark: Path) -> None:
    for name in (f"{folder.name}.py", "dataset.py", "__init__.py"):
        (folder / name).write_text(f'open({str(mark)!r}, "w")\n')


_FILES = "---\nconfigs:\n- config_name: default\n  data_files: {}\n---\n"
FOLDERS: dict[str, Callable[[Path, Path], object]] = {
    "a file elsewhere": _card(_FILES.format("/etc/passwd")),
    "a file above": _card(_FILES.format("../../../../../../etc/passwd")),
    "a file over http": _card(_FILES.format("http://127.0.0.1:9/x.jsonl")),
    "a file over a protocol": _card(_FILES.format("file:///etc/passwd")),
    "a file in a chain of protocols": _card(_FILES.format("zip://a::/etc/passwd")),
    "a card that runs": _card('---\na: !!python/object/apply:os.mkdir ["{mark}"]\n---\n'),
    "a script": _script,
    "a state that leads elsewhere": _state("../../../../../../../etc/passwd"),
    "a state with an absolute path": _state("/etc/passwd"),
    "a state in a pipe": lambda folder, mark: os.mkfifo(folder / "state.json"),
    "a link to /dev/zero": lambda folder, mark: (folder / "train.jsonl").symlink_to("/dev/zero"),
    "a link to a file of the user": lambda folder, mark: (folder / "train.jsonl").symlink_to("/etc/shadow"),
}

TABLES: dict[str, tuple[str, bytes]] = {
    "csv with zero bytes": ("train.csv", b"text,label\n\0\0,1\n"),
    "csv with a column twice": ("train.csv", b"text,text,label\na,b,1\n"),
    "noise in parquet": ("train.parquet", os.urandom(500)),
    "nested": ("train.jsonl", b"[" * 200_000),
    "a script": ("train.py", b'open("{mark}", "w")\n'),
    "a label of 10^30": ("train.csv", b"text,label\na,1" + b"0" * 30 + b"\n"),
}
