"""One flipped bit in every kind of file that a run reads: who notices it? Prints a table of what no one has.

python -m tests.campaign.flips [--seed N] [--times N]: what is harmed is drawn from the seed. A flip counts as
noticed if the command that reads the file refuses it, or says that something is wrong; or if the losses are
those of an unharmed run, to the digits that are printed.
"""

from __future__ import annotations

import argparse
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import tiny

SIZE = "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
RUN = "--micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --split 100,0,0 --eval-iters 0 --no-plot"
_SAYS = re.compile(r"damaged|warning:|no checksums|has no checksums")


class Flip(NamedTuple):
    """A file with one bit changed, and what became of it.

    Attributes:
        kind: of file.
        where: byte and bit.
        noticed: how; empty: by no one.
    """

    kind: str
    where: str
    noticed: str


def _pretrain(data: Path, *flags: str) -> tuple[int, str, list[float]]:
    vocabulary = f"--tokenizer-type NullTokenizer --vocab-size {tiny.SIZE}"
    done = tiny.run("pretrain", *f"{SIZE} {RUN} {vocabulary}".split(), "--data-path", str(data), *flags)
    losses = [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]
    return done.returncode, done.stderr, losses


def _flip(path: Path, chance: random.Random) -> str:
    content = bytearray(path.read_bytes())
    byte, bit = chance.randrange(len(content)), chance.randrange(8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return f"byte {byte} of {len(content)}, bit {bit}"


def _kinds(place: Path) -> Iterator[tuple[str, Path]]:
    """Yield what may be harmed, relative to ``place``."""
    yield "tokens (.bin)", Path("data/text.bin")
    yield "index (.idx)", Path("data/text.idx")
    yield "checksums of data (.sums.json)", Path("data/text.sums.json")
    yield "tracker", Path("saved/latest_checkpointed_iteration.txt")
    for path in sorted((place / "saved" / "iter_0000004").rglob("*")):
        if path.is_file():
            yield f"checkpoint: {path.name}", path.relative_to(place)


def trials(place: Path, chance: random.Random, times: int) -> Iterator[Flip]:
    """Train, then harm a copy of one file after the other, and go on from it."""
    (place / "data").mkdir()
    data = tiny.write_dataset(place / "data" / "text", documents=40)
    flags = [
        "--save",
        str(place / "saved"),
        "--save-interval",
        "2",
        "--train-iters",
        "4",
        "--log-interval",
        "1",
    ]
    code, said, _ = _pretrain(data, *flags)
    assert code == 0, said
    _, _, whole = _pretrain(data, "--load", str(place / "saved"), "--train-iters", "6", "--log-interval", "1")
    for kind, path in list(_kinds(place)):
        for _ in range(times):
            shutil.copy2(place / path, place / "kept")
            where = _flip(place / path, chance)
            code, said, losses = _pretrain(
                data, "--load", str(place / "saved"), "--train-iters", "6", "--log-interval", "1"
            )
            shutil.copy2(place / "kept", place / path)
            yield Flip(kind, where, _verdict(code, said, losses == whole))


def _verdict(code: int, said: str, same: bool) -> str:
    last = said.strip().splitlines()[-1][:90] if said.strip() else ""
    if "Traceback" in said:
        return ""
    if code:
        return f"refused: {last}"
    if _SAYS.search(said):
        return f"said: {last}"
    return "changes nothing" if same else ""


def main() -> int:
    """Print the table; return how many flips no one has noticed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--times", type=int, default=1, help="flips of each kind of file")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for flip in trials(Path(folder), random.Random(given.seed), given.times):
            found.append(flip)
            print(f"| {flip.kind} | {flip.where} | {flip.noticed or '**no one**'} |", flush=True)
    missed = [flip for flip in found if not flip.noticed]
    print(f"{len(found)} flips; noticed by no one: {len(missed)}")
    return len(missed)


if __name__ == "__main__":
    sys.exit(main())
