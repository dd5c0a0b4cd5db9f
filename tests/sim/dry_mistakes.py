"""Mistakes that ``plan`` has to find before anything trains, through the real command, on request.

    python -m tests.sim.dry_mistakes [--program NAME ...] [--case NAME ...] [--output FILE]

Each case is a job with one mistake, by the driver and by stock scripts of ``checkouts``; what is printed must
match, with exit code 2. The exit code is 1 if one is not found. Checkpoints are made on a CPU first.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from megatron_npu.base import files, settings
from megatron_npu.commands import cli
from tests.sim import dry_grid
from tests.sim.dry_layouts import CHECKOUTS, DRIVER
from tests.support import stock_lm, tiny

_SIZES = (
    "--num-layers 2 --hidden-size 128 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--micro-batch-size 1 --global-batch-size 2 --lr 1e-3 --train-iters 4 --eval-iters 0 "
    "--num-workers 0 --bf16"
)
_NUMBERS = "--tokenizer-type NullTokenizer --vocab-size 1000"
_MOCK = f"--mock-data {_NUMBERS}"
_LATER = "--train-iters 8 --override-opt_param-scheduler"
OLD = "285068c8"  # it has no made-up data, and saves whole files
TREES = ("core_v0.12.1", "core_v0.16.1", "core_v0.19.0", OLD)


_PATHS = (("megatron_npu", "tests/sim/dry_mistakes.py"),)


@dataclass(frozen=True)
class Case:
    """A job, by words added to the sizes: later ones win.

    Attributes:
        words: ``{saved}``, ``{half}`` and ``{text}`` are paths.
        driver, stock: patterns of what the driver and the stock scripts say; "" if nothing is wrong.
    """

    words: str
    driver: str
    stock: str | None

    def expected(self, program: str) -> str | None:
        """Return the pattern for a program; None: nobody has looked at what it says."""
        return self.driver if program == DRIVER else self.stock


CASES = {
    "right": Case(f"{_MOCK} --load {{saved}} {_LATER}", "", ""),
    "right-data": Case(f"--data-path {{text}} {_NUMBERS}", "", ""),
    "no-such-flag": Case(f"{_MOCK} --nun-layers 2", "nun-layers", "nun-layers"),
    "stages": Case(f"{_MOCK} --num-layers 3 --pipeline-model-parallel-size 2", "--num-layers 3", "divisible"),
    "window": Case(f"{_MOCK} --seq-length 128", "max-position-embeddings", "max_position_embeddings"),
    "hidden": Case(f"{_MOCK} --load {{saved}} {_LATER} --hidden-size 256", "hidden", "mismatch|hidden"),
    "layers": Case(f"{_MOCK} --load {{saved}} {_LATER} --num-layers 4", "layers", "[Mm]issing|layers|shape"),
    "last-stage": Case(
        f"{_MOCK} --load {{saved}} {_LATER} --num-layers 4 --pipeline-model-parallel-size 2",
        "layers",
        "[Mm]issing|layers|shape|mp_rank_00_000",
    ),
    "shard": Case(f"{_MOCK} --load {{half}} {_LATER}", "distcp", "distcp|model_optim_rng"),
    "no-data": Case(
        f"--data-path {{text}}-absent {_NUMBERS}",
        "text-absent",
        "text-absent|'NoneType' object has no attribute 'sizes'",  # the latter in 285068c8
    ),
    # data that are too few are read again, in the job as well; a part of none is a mistake for the driver,
    # and stock scripts then do not validate
    "no-validation": Case(f"--data-path {{text}} {_NUMBERS} --eval-iters 2 --split 100,0,0", "--split", ""),
}


def saved(folder: Path, program: str) -> dict[str, str]:
    """Train on a CPU and save; return the paths that words name."""
    place = folder / program
    if program == OLD:
        stock_lm.write_data(folder)
    else:
        tiny.write_dataset(folder / "text")
    environment = os.environ | {settings.DEVICE.name: "cpu", "OMP_NUM_THREADS": "1"} | _where(program)
    words = [*_start(program), *_SIZES.split(), *_MOCK.split(), "--save", str(place / "saved")]
    words = _fitted(program, words, folder)
    subprocess.run(
        [sys.executable, "-m", "megatron_npu", *words, "--save-interval", "4"],
        env=environment,
        check=True,
        timeout=600,
        stdout=subprocess.DEVNULL,
    )
    shutil.copytree(place / "saved", place / "half")
    next((place / "half").rglob("model_optim_rng.pt" if program == OLD else "*.distcp")).unlink()
    return {"saved": str(place / "saved"), "half": str(place / "half"), "text": str(folder / "text")}


def _where(program: str) -> dict[str, str]:
    return {} if program == DRIVER else {settings.MEGATRON_PATH.name: str((CHECKOUTS / program).resolve())}


def _start(program: str) -> list[str]:
    if program == DRIVER:
        return ["pretrain", "--no-plot"]
    # 0.16.1 needs an interval
    return ["run", str(CHECKOUTS / program / "pretrain_gpt.py"), "--eval-interval", "100"]


def _fitted(program: str, words: list[str], folder: Path) -> list[str]:
    """Return the words that a program takes in place of made-up data and numbers as tokens."""
    mocked = "--mock-data" in words
    if program != OLD:  # upstream's made-up data of stock scripts have tokens up to 4,096
        return [*words, *["--vocab-size", "5000"] * (program != DRIVER and mocked)]
    files_of = f"--vocab-file {folder}/vocab.json --merge-file {folder}/merges.txt"
    data = f" --data-path {folder}/text" if mocked else ""
    given = " ".join(words)
    for numbers in (_MOCK, _NUMBERS):
        given = given.replace(numbers, files_of + data)
    return given.split()


def planned(program: str, case: Case, paths: dict[str, str]) -> dict:
    """Plan a case; return the exit code, the last lines that were printed, and the seconds."""
    words = [*_SIZES.split(), *case.words.format(**paths).split()]
    words = _fitted(program, words, Path(paths["text"]).parent)
    begin = time.monotonic()
    with (
        mock.patch.dict(os.environ, _where(program)),
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
    ):
        code = cli.main(["plan", "--devices", "2", "--no-remedy", "--", *_start(program), *words])
    seconds = round(time.monotonic() - begin, 1)
    lines = (err.getvalue() or out.getvalue()).strip().splitlines()
    lines = [line.replace(str(Path(paths["text"]).parent), "") for line in lines]
    lines = [re.sub(r"/\S*/(?=checkouts/|site-packages/)", "", line) for line in lines]  # of this machine
    found = re.search(case.expected(program) or "fits: ", "\n".join([out.getvalue(), *lines]))
    right = found is not None and code == (2 if case.expected(program) else 0)
    return {"code": code, "said": lines[-6:], "seconds": seconds, "right": right}


def _keep(output: Path | None, name: str, row: dict) -> None:
    """Add a row to the JSON file of results, if there is one."""
    if output is not None:
        before = json.loads(output.read_text()) if output.exists() else {}
        files.write(
            output,
            json.dumps(before | {name: dry_grid.stamped(row, dry_grid.commit(_PATHS))}, indent=1) + "\n",
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--program", nargs="+", choices=(DRIVER, *TREES), default=[DRIVER, *TREES])
    parser.add_argument("--case", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    found: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        for program in options.program:
            paths = saved(Path(folder), program)
            for name in options.case:
                if CASES[name].expected(program) is None:
                    continue
                row = found[f"{program}/{name}"] = planned(program, CASES[name], paths)
                _keep(options.output, f"{program}/{name}", row)
                said = row["said"][-1] if row["said"] else ""
                print(f"{program}/{name}: {'right' if row['right'] else 'WRONG'} {row['code']} ", end="")
                print(f"{row['seconds']} s {said}", flush=True)
                if not row["right"]:
                    print("\n".join(row["said"]), flush=True)
    return int(not all(row["right"] for row in found.values()))


if __name__ == "__main__":
    sys.exit(main())
