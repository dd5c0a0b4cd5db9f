"""A stranger's control characters on the terminal, pages of plans, addresses of storages, and hubs."""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import NULL_TOKENIZER, Samples, config
from tests.campaign.accounts.trials import EITHER, REFUSED, Try, Verdict, made
from tests.support import foreign_stores

_TERMINAL, _PAGES = "control characters of another account", "pages of plans"
_STORAGES, _HUBS = "addresses of storages", "hubs"
_EVIL = "\x1b]0;x\x07\x1b[2J\x9b1m"


def terminals(room: Room) -> Iterator[Try]:
    """Yield commands that report on files with control characters in names and content."""
    samples = Samples(room)
    for name, change in _CHECKPOINTS.items():
        folder = samples.changed_checkpoint(f"seen {name}", change)
        for words in (
            *(["checkpoint", action, str(folder)] for action in ("list", "verify", "inspect")),
            ["checkpoint", "prune", str(folder), "--keep", "1", "--dry-run"],
            samples.generate(folder),
            [*samples.pretrain(), "--load", str(folder), "--train-iters", "3"],
        ):
            what = f"{' '.join(words[:2]) if words[0] == 'checkpoint' else words[0]}: {name}"
            yield Try(_TERMINAL, what, words, EITHER, starts=False)
    yield from _texts(samples)


def _texts(samples: Samples) -> Iterator[Try]:
    room = samples.room
    folder = room.place("seen texts")
    (folder / f"{_EVIL}.jsonl").write_text('{"text": [')
    (folder / f"{_EVIL}.txt").write_text("1 2 x")
    (folder / "passages.jsonl").write_text(json.dumps({"text": f"1 2 {_EVIL}"}) + "\n")
    (folder / "train.csv").write_text(f"text,{_EVIL}\na,{_EVIL}\n")
    (folder / "table.json").write_text(json.dumps([{_EVIL: _EVIL}]))
    for path in samples.dataset.parent.glob("text.*"):
        shutil.copy(path, folder / f"{_EVIL}{path.suffixes[-1]}")
    (folder / f"{_EVIL}.sums.json").write_text(json.dumps({"files": {_EVIL: [1, _EVIL]}}))
    room.give(folder)
    for name in (f"{_EVIL}.jsonl", f"{_EVIL}.txt", ""):
        words = samples.preprocess("--input", str(folder / name))
        yield Try(_TERMINAL, f"preprocess: {name!a}", words, EITHER, starts=False)
    passages = [*samples.lambada(), "--valid-data", str(folder / "passages.jsonl")]
    yield Try(_TERMINAL, "lambada: passages", passages, EITHER, starts=False)
    for action in ("inspect", "verify", "count"):
        words = ["data", action, str(folder / _EVIL)]
        yield Try(_TERMINAL, f"data {action}", words, EITHER, starts=False)
    yield Try(_TERMINAL, "pretrain: a dataset", samples.pretrain(folder / _EVIL), EITHER, starts=False)
    train = ["train", "--task", "sequence_classification", "--pretrained-model-name-or-path", str(folder)]
    yield Try(_TERMINAL, "train", [*train, "--data-path", str(folder)], EITHER, starts=False)
    plan = ["plan", "--devices", "2", "--device", "cuda", "--search", "--search-runs", "1", "--bench"]
    yield Try(
        _TERMINAL, "plan --bench", [*plan, str(folder / "table.json"), "--", *samples.pretrain()], EITHER
    )
    for name, (text, header) in _models().items():
        model = room.place(f"seen model {name}")
        (model / "config.json").write_text(text)
        written = json.dumps(header).encode()
        body = struct.pack("<f", 1e30) * 4
        (model / "model.safetensors").write_bytes(struct.pack("<Q", len(written)) + written + body)
        room.give(model)
        yield Try(_TERMINAL, f"convert: {name}", samples.convert(model), EITHER, starts=False)


def _models() -> dict[str, tuple[str, dict[str, object]]]:
    tensor = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}
    return {
        "the kind of a model": (config(model_type=_EVIL, architectures=[_EVIL]), {"a": tensor}),
        "the name of a tensor": (config(), {_EVIL: tensor}),
        "a dtype": (config(torch_dtype=_EVIL), {_EVIL: {**tensor, "dtype": _EVIL}}),
        "a key": (config(**{_EVIL: _EVIL, "rope_scaling": {"rope_type": _EVIL}}), {"a": tensor}),
    }


def _arguments(iteration: Path) -> None:
    (iteration / "checksums.json").unlink()
    for path in iteration.glob("*.json"):
        content = json.loads(path.read_text())
        for part in (content, *(each for each in content.values() if isinstance(each, dict))):
            for name in ("tokenizer_type", "data_path", "task", "split", "lr_decay_style"):
                if name in part:
                    part[name] = [_EVIL] if isinstance(part[name], list) else _EVIL
        path.write_text(json.dumps(content))


def _rewritten(change: Callable[[dict[str, object]], object]) -> Callable[[Path], None]:
    def make(iteration: Path) -> None:
        path = iteration / "checksums.json"
        content = json.loads(path.read_text())
        change(content)
        path.write_text(json.dumps(content))

    return make


_CHECKPOINTS: dict[str, Callable[[Path], object]] = {
    "arguments": _arguments,
    "names of files": lambda iteration: (iteration / f"{_EVIL}.distcp").write_bytes(b""),
    "names in the checksums": _rewritten(lambda content: content["files"].update({_EVIL: [1, "0"]})),  # type: ignore[attr-defined]
    "the checksums": _rewritten(lambda content: content.update(dict.fromkeys(content, _EVIL))),
    "the format": _rewritten(lambda content: content.update({"format": _EVIL, "version": _EVIL})),
    "the tracker": lambda iteration: (iteration.parent / "latest_checkpointed_iteration.txt").write_text(
        _EVIL
    ),
    "the machine": lambda iteration: (iteration / "machine.json").write_text(
        json.dumps({"host": _EVIL, "machines": [_EVIL], "elsewhere": {_EVIL: _EVIL}})
    ),
    "lists of machines": lambda iteration: (iteration / "machine.json").write_text(
        json.dumps({"host": [_EVIL], "machines": {}, "elsewhere": {"a": [_EVIL], "b": 1}})
    ),
    "a folder": lambda iteration: (iteration.parent / f"iter_{_EVIL}").mkdir(),
}


def pages(room: Room) -> Iterator[Verdict]:
    """Yield plans whose flags and tables hold marks of HTML, and whether the page shows them as text."""
    samples = Samples(room)
    mark = "<img src=x onerror=alert(1)>"
    page, line = room.temporary / "plan.html", room.temporary / "timeline.json"
    words = ["plan", "--devices", "2", "--device", "cuda", "--html", str(page), "--timeline", str(line)]
    for flag in ("--save", "--wandb-project", "--tensorboard-dir", "--data-cache-path"):
        page.unlink(missing_ok=True)
        training = [*words, "--", *samples.pretrain(), flag, f"{room.temporary}/{mark}"]
        found = made(room, Try(_PAGES, f"plan --html: {flag}", training, EITHER, limit=300))
        if page.exists() and mark in page.read_text():
            found = found._replace(verdict="executed", told=f"the page holds {mark}")
        yield found


def storages(room: Room) -> Iterator[Try]:
    """Yield runs with addresses of storages."""
    samples = Samples(room)
    secret = samples.written("secret", "secret")
    place = room.place("storage")
    (place / "iter_0000005").mkdir()
    (place / "iter_0000005" / "_SUCCESS").touch()
    (place / "iter_0000005" / "common.json").symlink_to(secret)
    os.mkfifo(place / "iter_0000005" / "checksums.json")
    room.give(place)
    addresses = (
        *("", "x", "file://", "file:///nowhere/x", "file:///dev/zero", "file:///proc/self", "://x", "s3://"),
        *("s3://bucket/run", "msc://profile/run", "gs://a/b", "az://a/b", "abfs://a@b/c", "hdfs://a/b"),
        *("http://127.0.0.1:9/x", "https://127.0.0.1:9/x", "ftp://127.0.0.1:9/x", "sftp://127.0.0.1:9/x"),
        *("simplecache::file:///nowhere", "filecache::http://127.0.0.1:9/x", "zip://x::file:///etc/passwd"),
        *(
            "reference://x",
            "github://a:b@c/d",
            "data:,x",
            "git://x",
            "dir://x",
            "tar://x::file:///etc/passwd",
        ),
        *("evil://x", "file://\x1b[2J", "file:///" + "a" * 5000, f"file://{place}", "file://\udcff/x"),
        *("libarchive://x::file:///etc/passwd", "jupyter://127.0.0.1:9/x", "webhdfs://127.0.0.1:9/x"),
    )
    for address in addresses:
        words = [*samples.pretrain(), "--object-storage", address]
        saved = ["--save", str(room.temporary / "stored"), "--load", str(room.temporary / "stored")]
        told = address.replace(str(place), "a folder of another account")
        what = f"pretrain --object-storage {told[:60]!a}"
        yield Try(_STORAGES, what, [*words, *saved], REFUSED, limit=150, starts=False)
    with foreign_stores.serving(lambda connection: None) as port:
        for scheme in ("http", "ftp", "webhdfs"):
            words = [*samples.pretrain(), "--object-storage", f"{scheme}://127.0.0.1:{port}/x"]
            what = f"pretrain --object-storage {scheme}: a server that says nothing"
            yield Try(_STORAGES, what, [*words, *saved], REFUSED, limit=200, starts=False)


def hubs(room: Room) -> Iterator[Try]:
    """Yield commands that ask a hub, which is another program."""
    samples = Samples(room)
    text = samples.written("sentences.csv", "text,label\na,0\nb,1\n" * 4)
    named = ["--pretrained-model-name-or-path", "evil/model", "--data-path", str(text)]
    tokens = ["preprocess", "--input", str(samples.lines), "--output-prefix", str(room.temporary / "hub")]
    commands = {
        "train": ["train", "--task", "sequence_classification", *named, "--epochs", "1"],
        "preprocess --hf-dataset": ["preprocess", *NULL_TOKENIZER, "--hf-dataset", "evil/data", *tokens[3:]],
        "preprocess --tokenizer-model": [
            *tokens,
            "--tokenizer-type",
            "HuggingFaceTokenizer",
            "--tokenizer-model",
            "evil/model",
        ],
    }
    for name, behave in _BEHAVIOURS.items():
        with foreign_stores.serving(behave) as port:
            for command, words in commands.items():
                variables = {"HF_ENDPOINT": f"http://127.0.0.1:{port}"}
                what = f"{command}: a hub that {name}"
                yield Try(_HUBS, what, words, REFUSED, variables=variables, limit=200)


def _answers(content: bytes) -> foreign_stores.Behaviour:
    def behave(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(content)
        connection.close()

    return behave


_BEHAVIOURS: dict[str, foreign_stores.Behaviour] = {
    "says nothing": lambda connection: None,
    "closes the connection": socket.socket.close,
    "sends noise": _answers(os.urandom(4096)),
    "sends to a file": _answers(
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\nContent-Length: 0\r\n\r\n"
    ),
    "sends nested JSON": _answers(
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200000\r\n\r\n"
        + b"[" * 200_000
    ),
    "fails": _answers(b"HTTP/1.1 500 \x1b[2J\r\nContent-Length: 0\r\n\r\n"),
}
