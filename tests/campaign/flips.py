"""One flipped bit in every kind of file that a command reads: who notices it? Prints a table.

python -m tests.campaign.flips [--seed N] [--times N] [--ways pretrain,train,stock,convert]: what is harmed is
drawn from the seed. A flip counts as noticed if the command refuses the file or says that something is wrong,
or if the losses, or the files that it makes, are those of an unharmed run.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from tests.campaign.outcomes import Outcome, last_line
from tests.support import stock_core, tiny, train_runs

SIZE = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --split 100,0,0 --eval-iters 0 --no-plot"
TREE = tiny.ROOT / "checkouts" / "core_v0.16.1"
SCRIPT = tiny.ROOT / "tests/finetune/scripts/dropout.py"
TRACKER = "latest_checkpointed_iteration.txt"
_SAYS = re.compile(r"damaged|warning:|no checksums|has no checksums")

Seen = tuple[int, str, object]  # exit code, what was said on standard error, what was made


class Subject(NamedTuple):
    """A command, and what it reads.

    Attributes:
        run: runs it.
        files: that may be harmed, by their kinds.
    """

    run: Callable[[], Seen]
    files: list[tuple[str, Path]]


def _losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", text)]


def _checkpoint(folder: Path, iteration: int) -> list[tuple[str, Path]]:
    """Return all files of a checkpoint, and the tracker that names it."""
    files = sorted(path for path in (folder / f"iter_{iteration:07d}").rglob("*") if path.is_file())
    return [("tracker", folder / TRACKER), *((f"checkpoint: {path.name}", path) for path in files)]


def pretrain(place: Path) -> Subject:
    """Return the driver, which goes on: its data and its checkpoint."""
    data = tiny.write_dataset(place / "text", documents=40)
    words = f"{SIZE} {RUN} --tokenizer-type NullTokenizer --vocab-size {tiny.SIZE} --data-path {data}"
    flags = [*words.split(), "--log-interval", "1"]
    saved = place / "saved"
    done = tiny.run("pretrain", *flags, "--save", str(saved), "--save-interval", "2", "--train-iters", "4")
    assert done.returncode == 0, done.stderr

    more = ("--load", str(saved), "--train-iters", "6", "--override-opt_param-scheduler")

    def run() -> Seen:
        again = tiny.run("pretrain", *flags, *more)
        return again.returncode, again.stderr, _losses(again.stdout)

    kinds = {"tokens (.bin)": "bin", "index (.idx)": "idx", "checksums of data (.sums.json)": "sums.json"}
    own = [(kind, Path(f"{data}.{ending}")) for kind, ending in kinds.items()]
    return Subject(run, [*own, *_checkpoint(saved, 4)])


def train(place: Path) -> Subject:
    """Return ``train``, which goes on: its checkpoint."""
    saved, out = place / "saved", place / "out"
    words = "--epochs 1 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --no-plot --log-interval 1"
    flags = ["--user-script", str(SCRIPT), *words.split()]
    done = train_runs.train(*flags, "--save", saved, "--save-interval", 2, "--exit-interval", 4)
    assert done.returncode == 0, done.stderr
    newest = int((saved / TRACKER).read_text())

    def run() -> Seen:
        shutil.rmtree(out, ignore_errors=True)
        again = train_runs.train(*flags, "--load", saved, "--save", out)
        made = train_runs.losses(out) if (out / "metrics.jsonl").exists() else []
        return again.returncode, again.stderr, made

    return Subject(run, _checkpoint(saved, newest))


def stock(place: Path) -> Subject:
    """Return the script of megatron-core 0.16.1, which goes on: its checkpoint."""
    saved = place / "saved"
    schedule = ("--lr-decay-iters", "100")
    first = ("--save", str(saved), "--save-interval", "2", "--train-iters", "4")
    done = stock_core.pretrain(TREE, place, *schedule, *first)
    assert done.returncode == 0, done.stderr

    more = ("--load", str(saved), "--train-iters", "6", "--override-opt_param-scheduler")

    def run() -> Seen:
        again = stock_core.pretrain(TREE, place, *schedule, *more)
        return again.returncode, again.stderr, _losses(again.stdout)

    return Subject(run, _checkpoint(saved, 4))


def convert(place: Path) -> Subject:
    """Return the conversion of a checkpoint of the driver to Hugging Face."""
    saved, out = pretrain(place), place / "hf"

    def run() -> Seen:
        shutil.rmtree(out, ignore_errors=True)
        words = "convert --from megatron --to hf --proof tensors".split()
        done = tiny.run(*words, str(place / "saved"), str(out))
        return done.returncode, done.stderr, _digests(out)

    return Subject(run, [file for file in saved.files if file[0].startswith(("tracker", "checkpoint:"))])


def _digests(folder: Path) -> dict[str, str]:
    """Return what was made, but for the card, which says when."""
    files = [path for path in folder.rglob("*") if path.suffix in (".json", ".safetensors")]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


WAYS = {"pretrain": pretrain, "train": train, "stock": stock, "convert": convert}


def flip(path: Path, chance: random.Random) -> str:
    """Change one bit of a file; return which."""
    content = bytearray(path.read_bytes())
    byte, bit = chance.randrange(len(content)), chance.randrange(8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {byte} of {len(content)}, bit {bit}"


def trials(
    place: Path, chance: random.Random, times: int = 1, ways: str = "pretrain", only: set[str] | None = None
) -> Iterator[Outcome]:
    """Let each command run; then harm one of its files after the other, and let it run again.

    Args:
        times: flips of each kind of file.
        ways: commands, with commas.
        only: kinds of files; None: all.
    """
    for way in ways.split(","):
        folder = place / way
        folder.mkdir()
        subject = WAYS[way](folder)
        code, said, whole = subject.run()
        assert code == 0, said
        files = [(kind, path) for kind, path in subject.files if only is None or kind in only]
        for kind, path in [file for file in files for _ in range(times) if file[1].stat().st_size]:
            shutil.copy2(path, folder / "kept")
            where = flip(path, chance)
            code, said, made = subject.run()
            shutil.copy2(folder / "kept", path)
            yield Outcome(f"{way}: {kind}", where, _verdict(code, said, made == whole))


def _verdict(code: int, said: str, same: bool) -> str:
    if "Traceback" in said:
        return ""
    if code:
        return f"refused: {last_line(said)}"
    if _SAYS.search(said):
        return f"said: {last_line(said)}"
    return "changes nothing" if same else ""


def main() -> int:
    """Print the table; return how many flips no one has noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="flips of each kind of file")
    parser.add_argument("--ways", default=",".join(WAYS), help="commands, with commas")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for outcome in trials(Path(folder), random.Random(given.seed), given.times, given.ways):
            found.append(outcome)
            print(f"| {outcome.kind} | {outcome.what} | {outcome.noticed or '**no one**'} |", flush=True)
    missed = [outcome for outcome in found if not outcome.noticed]
    print(f"{len(found)} flips; noticed by no one: {len(missed)}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
