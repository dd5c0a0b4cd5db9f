"""A stranger's datasets of .bin and .idx, and checkpoints."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import EITHER, REFUSED, Try
from tests.support.payload import Runs

_DATASETS = "datasets of another account"
_CHECKPOINTS = "checkpoints of another account"
_LOADING = ("generate", "checkpoint gather", "pretrain --load")
_TRACKER = "latest_checkpointed_iteration.txt"
Change = Callable[[Path, Path], object]  # of a folder, and of the mark


def datasets(room: Room) -> Iterator[Try]:
    """Yield four commands on each hostile dataset."""
    samples = Samples(room)
    for name, change in DATASETS.items():
        folder = room.place(f"dataset {name}")
        for path in samples.dataset.parent.glob("text.*"):
            shutil.copy(path, folder)
        change(folder, room.mark(name))
        room.give(folder)
        prefix = str(folder / "text")
        merged = ["data", "merge", prefix, str(samples.dataset), "--output-prefix", str(room.temporary / "m")]
        commands = {
            "pretrain": samples.pretrain(folder / "text"),
            "data inspect": ["data", "inspect", prefix],
            "data verify": ["data", "verify", prefix],
            "data merge": merged,
        }
        for command, words in commands.items():
            # inspect reads lengths alone
            expected = EITHER if command == "data inspect" and "bin" in name else REFUSED
            yield Try(_DATASETS, f"{command}: {name}", words, expected, limit=150, starts=False)


def _index(change: Callable[[bytearray], object]) -> Change:
    def make(folder: Path, mark: Path) -> None:
        content = bytearray((folder / "text.idx").read_bytes())
        (folder / "text.sums.json").unlink()
        change(content)
        (folder / "text.idx").write_bytes(bytes(content))

    return make


def _at(place: int, form: str, value: int) -> Change:
    packed = struct.pack(form, value)
    return _index(lambda content: content.__setitem__(slice(place, place + len(packed)), packed))


def _instead(name: str, target: str) -> Change:
    """Return what puts a link, or a pipe for an empty target, in the place of a file."""

    def make(folder: Path, mark: Path) -> None:
        path = folder / name
        path.unlink(missing_ok=True)
        path.symlink_to(target) if target else os.mkfifo(path)

    return make


def _cut(folder: Path, mark: Path) -> None:
    (folder / "text.bin").write_bytes((folder / "text.bin").read_bytes()[:100])
    (folder / "text.sums.json").unlink()


DATASETS: dict[str, Change] = {
    "idx: 2^63 sequences": _at(18, "<Q", 1 << 63),
    "idx: 2^40 documents": _at(26, "<Q", 1 << 40),
    "idx: a negative length": _at(34, "<i", -5),
    "idx: a length of 2^31 - 1": _at(34, "<i", (1 << 31) - 1),
    "idx: another dtype": _at(17, "<B", 77),
    "idx: another version": _at(9, "<Q", 1 << 60),
    "idx: cut": _index(lambda content: content.__delitem__(slice(100, len(content)))),
    "idx: empty": _index(bytearray.clear),
    "idx: a pipe": _instead("text.idx", ""),
    "idx: /dev/zero": _instead("text.idx", "/dev/zero"),
    "bin: /dev/zero": _instead("text.bin", "/dev/zero"),
    "bin: cut": _cut,
    "sums: a pipe": _instead("text.sums.json", ""),
    "sums: /dev/zero": _instead("text.sums.json", "/dev/zero"),
    "sums: nested": lambda folder, mark: (folder / "text.sums.json").write_text("[" * 200_000),
    "sums: a list": lambda folder, mark: (folder / "text.sums.json").write_text("[1]"),
}


def checkpoints(room: Room) -> Iterator[Try]:
    """Yield commands on each hostile checkpoint."""
    samples = Samples(room)
    for name, change in CHECKPOINTS.items():
        folder = samples.changed_checkpoint(f"checkpoint {name}", change, room.mark(name))
        into = str(room.temporary / f"gathered {name}")
        commands = {
            "generate": samples.generate(folder),
            "checkpoint verify": ["checkpoint", "verify", str(folder)],
            "checkpoint inspect": ["checkpoint", "inspect", str(folder)],
            "checkpoint gather": [
                "checkpoint",
                "gather",
                str(folder),
                str(samples.checkpoint),
                "--into",
                into,
            ],
            "pretrain --load": [*samples.pretrain(), "--load", str(folder), "--train-iters", "3"],
        }
        for command, words in commands.items():
            # other digits are numbers to Python, and thus to Megatron: they name the iteration that is there
            refuses = command in _LOADING and name != "tracker: other digits"
            expected = REFUSED if refuses else EITHER
            yield Try(_CHECKPOINTS, f"{command}: {name}", words, expected, limit=150, starts=False)


def _unsummed(change: Change) -> Change:
    """Return the change of a checkpoint whose writer stored no checksums."""

    def make(folder: Path, mark: Path) -> None:
        (folder / "checksums.json").unlink(missing_ok=True)
        change(folder, mark)

    return make


def _metadata(folder: Path, mark: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(mark)))


def _common(folder: Path, mark: Path) -> None:
    import torch

    torch.save(Runs(mark), folder / "common.pt")


def _every(pattern: str, change: Callable[[Path], object]) -> Change:
    def make(folder: Path, mark: Path) -> None:
        for path in folder.glob(pattern):
            change(path)

    return make


def _replaced(target: str) -> Callable[[Path], object]:
    def change(path: Path) -> None:
        path.unlink()
        path.symlink_to(target) if target else os.mkfifo(path)

    return change


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _tracker(text: str) -> Change:
    return lambda folder, mark: (folder.parent / _TRACKER).write_text(text)


def _arguments(**changes: object) -> Change:
    def make(folder: Path, mark: Path) -> None:
        for path in folder.glob("*.json"):
            content = json.loads(path.read_text())
            if isinstance(content, dict) and path.name != "checksums.json":
                for part in (content, *(each for each in content.values() if isinstance(each, dict))):
                    part.update({name: value for name, value in changes.items() if name in part})
                path.write_text(json.dumps(content))

    return _unsummed(make)


CHECKPOINTS: dict[str, Change] = {
    ".metadata: a pickle that runs": _unsummed(_metadata),
    ".metadata: a pipe": _unsummed(_instead(".metadata", "")),
    ".metadata: /dev/zero": _unsummed(_instead(".metadata", "/dev/zero")),
    ".metadata: noise": _unsummed(lambda folder, mark: (folder / ".metadata").write_bytes(os.urandom(500))),
    "common.pt: a pickle that runs": _unsummed(_common),
    "a file of the checkpoint is a pipe": _unsummed(_every("*.json", _replaced(""))),
    "a file of the checkpoint is /dev/zero": _unsummed(_every("*.json", _replaced("/dev/zero"))),
    "a file of the checkpoint is nested": _unsummed(
        _every("*.json", lambda path: path.write_text("[" * 200_000))
    ),
    "a file of the checkpoint is a list": _unsummed(_every("*.json", lambda path: path.write_text("[1]"))),
    "checksums: a pipe": _instead("checksums.json", ""),
    "checksums: nested": lambda folder, mark: (folder / "checksums.json").write_text("[" * 200_000),
    "checksums that lead elsewhere": lambda folder, mark: (folder / "checksums.json").write_text(
        json.dumps({"../../../../../etc/passwd": "0" * 64})
    ),
    "tracker: /dev/zero": lambda folder, mark: _instead(_TRACKER, "/dev/zero")(folder.parent, mark),
    "tracker: a pipe": lambda folder, mark: _instead(_TRACKER, "")(folder.parent, mark),
    "tracker: negative": _tracker("-5"),
    "tracker: other digits": _tracker("\u0662"),
    "tracker: a path": _tracker("../../../etc"),
    "tracker: 10^4 digits": _tracker("9" * 10_000),
    "weights: /dev/zero": _unsummed(_every("*.distcp", _replaced("/dev/zero"))),
    "weights: a pipe": _unsummed(_every("*.distcp", _replaced(""))),
    "weights: noise": _unsummed(
        _every("*.distcp", lambda path: path.write_bytes(os.urandom(path.stat().st_size)))
    ),
    "weights: a flipped bit": _every("*.distcp", _flip),
    "arguments: negative layers": _arguments(num_layers=-1),
    "arguments: 10^9 layers": _arguments(num_layers=10**9),
    "arguments: layers are text": _arguments(num_layers="2; x"),
    "arguments: no heads": _arguments(num_attention_heads=0),
    "arguments: a tokenizer in /dev/zero": _arguments(
        tokenizer_type="GPT2BPETokenizer", vocab_file="/dev/zero"
    ),
    "arguments: a tokenizer over http": _arguments(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model="http://127.0.0.1:9/x"
    ),
}
