"""Numbers and names of files in flags."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import NULL_TOKENIZER, Samples
from tests.campaign.accounts.trials import EITHER, REFUSED, Try, Verdict

_HUGE = "1" + "0" * 30
_ARABIC = "\u0663"  # a three
_TRAINING = {
    **dict.fromkeys(
        ("--lr", "--train-iters", "--hidden-dropout", "--init-method-std"),
        ("nan", "1e400", _HUGE, "", _ARABIC, "-0"),
    ),
    **dict.fromkeys(
        (
            "--micro-batch-size",
            "--clip-grad",
            "--seq-length",
            "--weight-decay",
            "--adam-beta2",
            "--num-layers",
        ),
        ("inf", _HUGE, ""),
    ),
}
_SAMPLING = {
    "--temperature": ("nan", "inf", "1e-320", "-0", "1e400", ""),
    "--top-p": ("nan", "1e400", "-0", "2"),
    "--top-k": (_HUGE, "-1", _ARABIC),
    "--num-tokens": (_HUGE, "0", "-0", "\u0664", ""),
    "--seed": (_HUGE, "nan"),
    "--num-samples": ("0", _HUGE, "-0"),
}
_ALLOWED = ("1e-320", "-0", _ARABIC, "\u0664")  # values that may be as good as others
_FINITE = ("--lr", "--clip-grad", "--weight-decay")  # of which a huge value is one, and its effect visible


def numbers(room: Room) -> Iterator[Try]:
    """Yield flags with values that are no numbers, or no good ones."""
    samples = Samples(room)
    for command, flags in ((samples.pretrain(), _TRAINING), (samples.generate(), _SAMPLING)):
        for flag, values in flags.items():
            for value in values:
                what = f"{command[0]} {flag} {value!r}"
                is_fine = value in _ALLOWED or (value == _HUGE and flag in _FINITE)
                expected = EITHER if is_fine else REFUSED
                yield Try("numbers in flags", what, [*command, f"{flag}={value}"], expected, starts=False)
    for words, given in _other_numbers(samples):
        for value in given:
            what = f"{words[0]} {words[-1]} {value!r}"
            expected = EITHER if value == _HUGE and words[-1] == "--keep" else REFUSED
            yield Try("numbers in flags", what, [*words, value], expected, starts=False)


def _other_numbers(samples: Samples) -> list[tuple[list[str], tuple[str, ...]]]:
    return [
        (["serve", "--load", str(samples.checkpoint), "--port"], ("nan", "65536", "-1", _HUGE, "\u0661", "")),
        (
            [*samples.lambada(), "--valid-data", str(samples.passages), "--micro-batch-size"],
            ("0", "nan", _HUGE),
        ),
        ([*samples.preprocess("--input", str(samples.lines)), "--workers"], ("0", "nan", _HUGE, "-0")),
        (
            ["bench", "--suite", "graph", "--model", "bert-tiny", "--devices", "1", "--steps"],
            ("nan", "0", _HUGE),
        ),
        ([*samples.export("exported"), "--max-shard-size"], ("nan", "0", "-5", f"{_HUGE}G", "G", "\u0665")),
        (["checkpoint", "prune", str(samples.checkpoint), "--keep"], ("-1", "nan", _HUGE)),
        (["data", "decode", str(samples.dataset), "--documents"], ("nan", _HUGE)),
    ]


def objects(room: Room) -> dict[str, str]:
    """Make odd files of the stranger; return their paths."""
    folder = room.evil / "objects"
    if not folder.exists():
        folder.mkdir()
        os.mkfifo(folder / "fifo")
        with socket.socket(socket.AF_UNIX) as ear:
            ear.bind(str(folder / "socket"))
        (folder / "dangling").symlink_to("nowhere")
        (folder / "loop").symlink_to("loop")
        (folder / "zero").symlink_to("/dev/zero")
        (folder / "dir").mkdir()
        texts = {"unreadable": b"x", "empty": b"", "nul": bytes(4096), "deep": b"[" * 200_000}
        for name, content in (*texts.items(), (os.fsdecode(b"\xff\xfe.bad"), b"\xff\xfe\0bad")):
            (folder / name).write_bytes(content)
        room.give(folder)
        (folder / "unreadable").chmod(0)
        (folder / "fifo").chmod(0o666)
        (folder / "socket").chmod(0o777)
    found = {path.name: str(path) for path in sorted(folder.iterdir(), key=os.fsencode)}
    return {**found, **{path: path for path in ("/dev/zero", "/proc/self/mem", "/dev/full")}}


# a dashboard shows these until it is stopped; the place "dashboard" has such files
_SERVED = ("deep", "dir", "empty", "nul", "/proc/self/mem", os.fsdecode(b"\xff\xfe.bad"))


def files(room: Room) -> Iterator[Try]:
    """Yield flags with the names of odd files."""
    samples = Samples(room)
    found = objects(room)
    for number, (name, words, after) in enumerate(_file_flags(samples)):
        for key, path in found.items():
            if number % 3 and key in ("dangling", "loop", "nul", "socket"):  # the same code opens them
                continue
            if name == "dashboard" and key in _SERVED:
                continue
            expected = EITHER if key == "empty" or name in ("checkpoint list", "dashboard") else REFUSED
            what = f"{name} {key!r}".encode(errors="replace").decode()
            yield Try("names of files in flags", what, [*words, path, *after], expected, starts=False)


def _file_flags(samples: Samples) -> list[tuple[str, list[str], list[str]]]:
    room, lines = samples.room, str(samples.lines)
    load = ["--load", str(samples.checkpoint)]
    tokens = [
        "preprocess",
        "--input",
        lines,
        "--output-prefix",
        str(room.temporary / "made"),
        "--tokenizer-type",
    ]
    plan = ["plan", "--devices", "2", "--device", "cuda"]
    training = ["--", *samples.pretrain()]
    return [
        ("pretrain --config", ["pretrain", "--config"], []),
        ("lambada --valid-data", [*samples.lambada(), "--valid-data"], []),
        ("generate input", ["generate", *load, "--num-tokens", "2", "--sample-input-file"], []),
        ("preprocess --input", samples.preprocess("--input"), []),
        ("generate --load", ["generate", "--prompt", "1", "--load"], []),
        ("plan --bench", [*plan, "--search", "--search-runs", "1", "--bench"], training),
        ("GPT-2 --vocab-file", [*tokens, "GPT2BPETokenizer", "--merge-file", lines, "--vocab-file"], []),
        ("BERT --vocab-file", [*tokens, "BertWordPieceLowerCase", "--vocab-file"], []),
        ("--tokenizer-model", [*tokens, "HuggingFaceTokenizer", "--tokenizer-model"], []),
        ("convert", ["convert", "--from", "hf", "--to", "megatron"], [str(room.temporary / "converted")]),
        ("data inspect", ["data", "inspect"], []),
        ("data verify", ["data", "verify"], []),
        ("data merge", ["data", "merge", "--output-prefix", str(room.temporary / "merged"), "--input"], []),
        ("checkpoint list", ["checkpoint", "list"], []),
        ("checkpoint verify", ["checkpoint", "verify"], []),
        ("dashboard", ["dashboard"], []),
        ("train --data-path", [*_fine_tuning(room.temporary), "--data-path"], []),
        ("train --user-script", ["train", "--user-script"], []),
        ("train --config", ["train", "--config"], []),
        ("patches check --megatron", ["patches", "check", "--megatron"], []),
    ]


def _fine_tuning(model: Path) -> list[str]:
    return ["train", "--task", "text-classification", "--model-name-or-path", str(model)]


def outputs(room: Room) -> Iterator[Try | Verdict]:
    """Yield flags that name what is to be written, where it cannot or must not be."""
    samples = Samples(room)
    found = objects(room)
    below = str(samples.lines / "below")
    paths = ("/dev/full", "/proc/x", "\udcff/x", "", "a" * 300, below, *(found[name] for name in _NO_OUTPUTS))
    for name, words in _output_flags(samples).items():
        for path in paths:
            what = f"{name} {path[-40:]!r}".encode(errors="replace").decode()
            yield Try(
                "names of outputs in flags",
                what,
                [*words, path, *_after(samples, words)],
                EITHER if path == "\udcff/x" else REFUSED,  # a name like others, for what makes its folder
                limit=200,
                starts=False,
            )
        yield from _links(samples, name, words)


def _links(samples: Samples, name: str, words: list[str]) -> Iterator[Try | Verdict]:
    """Yield an output in a folder that all can write to, where a stranger's links lead to the user's file."""
    room = samples.room
    precious, folder = room.home / "precious", room.place(f"outputs of {name}")
    precious.write_text("precious")
    for suffix in ("", ".partial", ".tmp", ".out", ".bin", ".idx", ".sums.json", "_text_document.bin"):
        (folder / f"made{suffix}").symlink_to(precious)
    room.give(folder)
    room.give(precious, room.user)
    folder.chmod(0o777)
    what = f"{name}: links of a stranger"
    after = _after(samples, words)
    yield Try("names of outputs in flags", what, [*words, str(folder / "made"), *after], EITHER, starts=False)
    if precious.read_bytes() != b"precious":
        yield Verdict("names of outputs in flags", f"{what}: the file", "silent", None, 0.0, "overwritten")


def _after(samples: Samples, words: list[str]) -> list[str]:
    """Return what follows the last flag of a command."""
    return ["--", *samples.pretrain()] if words[0] == "plan" else []


_NO_OUTPUTS = ("zero", "fifo", "socket", "unreadable")


def _output_flags(samples: Samples) -> dict[str, list[str]]:
    plan = ["plan", "--devices", "2", "--device", "cuda"]
    load = ["--load", str(samples.checkpoint)]
    prompts = str(samples.written("prompts.txt", "1 2\n3 4\n"))
    small = "--model bert-tiny --devices 1 --steps 1 --repeat 1 --seq-length 16".split()
    bench = ["bench", "--suite", "mixed-precision", *small]  # which compiles nothing
    return {
        "generate --output": [*samples.generate(), "--output"],
        "generate --genfile": ["generate", *load, "--num-tokens", "2", "--genfile"],
        "generate --sample-output-file": [
            *("generate", *load, "--num-tokens", "2", "--sample-input-file", prompts, "--sample-output-file")
        ],
        "lambada --results": [*samples.lambada(), "--valid-data", str(samples.passages), "--results"],
        "pretrain --save": [*samples.pretrain(), "--save"],
        "preprocess --output-prefix": [
            *("preprocess", *NULL_TOKENIZER, "--input", str(samples.lines), "--output-prefix")
        ],
        "data merge --output-prefix": ["data", "merge", str(samples.dataset), "--output-prefix"],
        "convert": samples.export("")[:-1],
        "checkpoint gather --into": ["checkpoint", "gather", str(samples.checkpoint), "--into"],
        **{f"plan {flag}": [*plan, flag] for flag in ("--html", "--json", "--timeline")},
        **{f"bench {flag}": [*bench, flag] for flag in ("--json", "--markdown", "--plot")},
    }
