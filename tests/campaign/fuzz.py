"""Fuzz the readers of files for minutes: fuzz.py --minutes N [--seed S] [--readers NAME …]

What tests/unit/test_hostile_files.py does with a few examples, with as many as there is time for. Prints for
each reader how many files were read, refused, and reached the payload. What reached it is kept as a file, and
so is the first of each kind that made a reader raise what is no refusal.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import re
import shutil
import time
import warnings
from pathlib import Path

from megatron_npu.base.errors import UsageError
from tests.support import plain_readers
from tests.unit import test_hostile_files as hostile

TOKENS = re.compile(rb'"[^"]*"|-?[0-9.]+|[\[\]{}:,]|\w+')
ODD: list[object] = [
    None,
    True,
    -1,
    0,
    2**31,
    10**30,
    1e308,
    float("nan"),
    "",
    "../x",
    "\0",
    "\ud800",
    [],
    {},
]
SPELLED = [*(json.dumps(value).encode() for value in ODD), b"[" * 100_000, b"9" * 5000, b"\xff", b" "]


def harmed(whole: bytes, draw: random.Random) -> bytes:
    """Return a file with a few places changed, cut out or overwritten, or with another pickle in it."""
    if draw.random() < 0.1:
        whole = hostile.repacked(whole, draw.choice(hostile.CORPUS))
    content = bytearray(whole)
    if draw.random() < 0.3 and (tokens := [*TOKENS.finditer(whole)]):  # for files of text
        for token in sorted(draw.sample(tokens, min(3, len(tokens))), key=lambda it: -it.start()):
            content[slice(*token.span())] = draw.choice([*SPELLED, draw.choice(tokens)[0]])
        return bytes(content)
    for _ in range(draw.randint(1, 6)):
        place = draw.randint(0, len(content))
        piece = draw.choice([*hostile.CORPUS, draw.randbytes(draw.randint(0, 8))])
        if draw.random() < 0.3 and place < len(content):
            content[place] ^= 1 << draw.randrange(8)
        else:
            content[place : place + draw.choice([0, 1, len(piece), 1 << 20])] = piece
    return bytes(content)


def outcome(reader: hostile.Reader, file: Path, content: bytes) -> str:
    """Read it; return ``reached``, ``read``, ``refused`` or the error's name."""
    hostile.reached.clear()
    file.write_bytes(content)
    try:
        reader(file)
        said = "read"
    except UsageError:
        said = "refused"
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of the tokenizers' library is no Exception
        said = type(error).__name__
    return "reached" if hostile.reached else said


def main() -> int:
    every = {**hostile.READERS, **plain_readers.whole()}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", nargs="+", choices=every, default=[*every])
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    draw, found = random.Random(given.seed), False
    for name in given.readers:
        reader, whole = every[name]
        end = time.monotonic() + 60 * given.minutes / len(given.readers)
        said: collections.Counter[str] = collections.Counter()
        last = Path(f"fuzz-{name}-{given.seed}-last")  # what it was reading, if it crashes
        while time.monotonic() < end:
            content = harmed(whole, draw)
            result = outcome(reader, last, content)
            said[result] += 1
            raised = name not in hostile.RAISES and result not in ("read", "refused")
            if result == "reached" or (raised and said[result] == 1):
                found = True
                Path(f"fuzz-{name}-{given.seed}-{result}-{said[result]}").write_bytes(content)
        last.unlink(missing_ok=True)
        shutil.rmtree(plain_readers.folder_of(last), ignore_errors=True)
        print(name, sum(said.values()), dict(said.most_common()), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
