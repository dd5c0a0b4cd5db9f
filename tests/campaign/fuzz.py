"""Fuzz the readers of files that are pickles, or hold some, for minutes: fuzz.py --minutes N [--seed S]

What tests/unit/test_hostile_files.py does with a few examples, with as many as there is time for. Prints for
each reader how many files were read, refused, and reached the payload; a file that reached it is kept.
"""

from __future__ import annotations

import argparse
import collections
import random
import time
import warnings
from pathlib import Path

from megatron_npu.errors import UsageError
from tests.unit import test_hostile_files as hostile


def harmed(whole: bytes, draw: random.Random) -> bytes:
    """Return a file with a few places changed, cut out or overwritten, or with another pickle in it."""
    if draw.random() < 0.1:
        whole = hostile.repacked(whole, draw.choice(hostile.CORPUS))
    content = bytearray(whole)
    for _ in range(draw.randint(1, 6)):
        place = draw.randint(0, len(content))
        piece = draw.choice([*hostile.CORPUS, draw.randbytes(draw.randint(0, 8))])
        if draw.random() < 0.3 and place < len(content):
            content[place] ^= 1 << draw.randrange(8)
        else:
            content[place : place + draw.choice([0, 1, len(piece), 1 << 20])] = piece
    return bytes(content)


def outcome(name: str, file: Path, content: bytes) -> str:
    """Read it; return ``reached``, ``read``, ``refused`` or the error's name."""
    hostile.reached.clear()
    file.write_bytes(content)
    reader, _ = hostile.READERS[name]
    try:
        reader(file)
        said = "read"
    except UsageError:
        said = "refused"
    except Exception as error:
        said = type(error).__name__
    return "reached" if hostile.reached else said


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    draw, lost = random.Random(given.seed), 0
    for name, (_, whole) in hostile.READERS.items():
        end = time.monotonic() + 60 * given.minutes / len(hostile.READERS)
        found: collections.Counter[str] = collections.Counter()
        last = Path(f"fuzz-{name}-{given.seed}-last")  # what it was reading, if it crashes
        while time.monotonic() < end:
            content = harmed(whole, draw)
            said = outcome(name, last, content)
            found[said] += 1
            if said == "reached":
                lost += 1
                Path(f"fuzz-{name}-{given.seed}-{lost}").write_bytes(content)
        last.unlink(missing_ok=True)
        print(name, sum(found.values()), dict(found.most_common()), flush=True)
    return 1 if lost else 0


if __name__ == "__main__":
    raise SystemExit(main())
