"""A file system that really is full, a tmpfs of some MiB: is it one line, and is nothing left that is half?

python -m tests.campaign.full_disk: as the superuser, who alone may mount one. ``faults.c`` lets single writes
fail for everybody else; here blocks or inodes run out, at whatever place that is.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.campaign.outcomes import Outcome, last_line, main
from tests.support import processes, tiny, train_runs

_CLONE_NEWNS = 0x00020000
_SCRIPT = tiny.ROOT / "tests/finetune/scripts/dropout.py"
_TRAIN = "--epochs 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --save-interval 1 --no-plot"


def may_mount() -> bool:
    """Let this process have mounts of its own; return whether it may."""
    if os.geteuid() or ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        return False
    return processes.run(["mount", "--make-rprivate", "/"]).returncode == 0


def trials(place: Path, chance: random.Random, only: set[str] | None = None) -> Iterator[Outcome]:
    """Run each command with its results on a full file system, then on the same one with room."""
    if not may_mount():
        raise SystemExit("full_disk needs the superuser: it mounts file systems")
    data = tiny.write_dataset(place / "text", documents=40)
    pretrain = ["pretrain", *tiny.flags_for(data), "--save-interval", "1"]
    whole = place / "whole"
    assert tiny.run(*pretrain, "--save", str(whole)).returncode == 0
    passages = place / "passages.jsonl"
    passages.write_text('{"text": "1 2 3 4 5 6 7 8"}\n' * 3000)
    target = place / "full"
    target.mkdir()
    commands = {
        "pretrain": [*pretrain, "--save", f"{target}/save", "--load", f"{target}/save"],
        "train": [
            *("train", "--user-script", str(_SCRIPT), *_TRAIN.split()),
            *("--save", f"{target}/save", "--load", f"{target}/save"),
        ],
        "convert": [
            "convert",
            "--from",
            "megatron",
            "--to",
            "hf",
            str(whole),
            f"{target}/hf",
            "--proof",
            "tensors",
        ],
        "generate": [
            "generate",
            "--load",
            str(whole),
            *"--prompt 1 --num-tokens 20 --output".split(),
            f"{target}/t",
        ],
        "lambada": [
            "lambada",
            "--load",
            str(whole),
            "--valid-data",
            str(passages),
            "--results",
            f"{target}/r",
        ],
    }
    for name, argv in commands.items():
        if only is None or name in only:
            size = chance.randrange(8, 200) * 1024
            for how, options in (
                ("blocks", f"size={size}"),
                ("inodes", f"nr_inodes={chance.randrange(2, 7)}"),
            ):
                yield _tried(name, argv, how, options, target)


def _tried(name: str, argv: list[str], how: str, options: str, target: Path) -> Outcome:
    processes.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=750", "tmpfs", target], check=True)
    try:
        return Outcome(name, f"no {how} left ({options})", _harmed(name, argv, target))
    finally:
        processes.run(["umount", "-l", target], check=True)


def _run(name: str, argv: list[str]) -> tuple[int, str]:
    done = train_runs.train(*argv[1:]) if name == "train" else tiny.run(*argv)
    return done.returncode, done.stderr


def _harmed(name: str, argv: list[str], target: Path) -> str:
    code, err = _run(name, argv)
    if code == 0:
        return "there was room"
    if "Traceback" in err or str(target) not in err:  # which does not say what could not be written
        return ""
    left = [path.name for path in target.rglob("*") if path.name.endswith(".partial")]
    if left and name in ("convert", "generate", "lambada"):
        return ""
    processes.run(["mount", "-o", "remount,size=1g,nr_inodes=100000", target], check=True)
    if name == "convert":
        shutil.rmtree(target / "hf", ignore_errors=True)
    again, said = _run(name, argv)
    return "" if again or "Traceback" in said else f"{last_line(err)}; still trying"


if __name__ == "__main__":
    sys.exit(main(trials, __doc__))
