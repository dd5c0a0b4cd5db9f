"""What is harmed: each way in which this project makes processes and files, as small as it can be."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_npu import checksums
from megatron_npu.training import checkpoint_files, whole_checkpoints
from tests import warm
from tests.acceleration import runs as train_runs
from tests.adaptors.megatron_core import stock as core
from tests.adaptors.megatron_lm import runs as lm
from tests.campaign import agent
from tests.end_to_end import tiny

ITERATIONS, INTERVAL, EVALUATION = 12, 4, 6
SCRIPT = tiny.ROOT / "tests/acceleration/scripts/dropout.py"
_TRAIN = f"--log-interval 1 --save-interval {INTERVAL} --eval-interval {EVALUATION}"


@dataclass(frozen=True)
class Way:
    """One kind of run.

    Attributes:
        name, ranks: as they stand in the table.
        arguments: of ``megatron-npu``, given the folder of the trial; its results go into ``save`` there.
        outcome: what it has made there, which must be as if nobody had harmed it.
        progress: how many iterations it has logged there; None: it is no training.
        modules, tree, more: of the warm interpreter, and its environment.
        writes: whether processes of their own write its checkpoints.
        own: whether it is a program of ours.
        workers: whether processes of their own prepare its data.
    """

    name: str
    ranks: int
    arguments: Callable[[Path], list[str]]
    outcome: Callable[[Path], object]
    progress: Callable[[Path], int] | None = None
    modules: tuple[str, ...] = warm.DRIVER
    tree: Path | None = None
    more: Mapping[str, str] = field(default_factory=dict)
    writes: bool = False
    own: bool = True
    workers: bool = True

    @property
    def label(self) -> str:
        return f"{self.name}, {self.ranks} ranks" if self.ranks > 1 else self.name

    def command(self, folder: Path, *more: str, restarts: int = 0) -> list[str]:
        """Return the command line; of several ranks, under an agent."""
        arguments = [*self.arguments(folder), *more]
        if self.ranks == 1:
            return [sys.executable, "-m", "megatron_npu", *arguments]
        return [sys.executable, agent.__file__, str(self.ranks), str(restarts), *arguments]

    def faulty(self, folder: Path) -> str:
        """Return what is wrong with the checkpoints in a folder, empty: nothing."""
        save = folder / "save"
        if self.progress is None or not self.own or not save.is_dir():
            return ""
        for iteration in checkpoint_files.iterations(save):
            place = checkpoint_files.directory(save, iteration)
            incomplete = whole_checkpoints.incomplete(place) if self.name == "pretrain" else []
            if found := checksums.damaged(place) or incomplete:
                return f"{place.name}: {found}"
        return ""

    def is_complete(self, outcome: object, calm: object) -> bool:
        """Return whether a run that has ended has made what it must."""
        if isinstance(outcome, dict) and isinstance(calm, dict) and not self.own:
            return max(outcome, default=0) == max(calm)  # ``Trial.check`` has compared them
        return outcome == calm

    def newest(self, folder: Path) -> int:
        """Return the iteration of the newest whole checkpoint."""
        tracker = folder / "save" / checkpoint_files.TRACKER
        return int(tracker.read_text() or 0) if tracker.exists() else 0  # empty for a moment, asynchronously


def _logged(folder: Path) -> int:
    metrics = folder / "save" / "metrics.jsonl"
    return metrics.read_bytes().count(b'"event": "train"') if metrics.exists() else 0


def _losses(folder: Path) -> dict[int, float]:
    """Return the loss of each iteration that was logged, the last time that it was."""
    metrics = folder / "save" / "metrics.jsonl"
    if not metrics.exists():
        return {}
    rows = [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
    return {row["iteration"]: row["losses"][-1] for row in rows if row["event"] == "train"}


_LINE = re.compile(r"^.*iteration +(\d+)/.*lm loss(?: value)?: ([0-9.E+-]+)", re.MULTILINE)


def _printed(folder: Path) -> dict[int, str]:
    """Return the losses that a stock script has printed.

    Not the second ones after a start: upstream (0.16.1) takes the mean with the first one.
    """
    log = folder / "log.txt"
    found: dict[int, str] = {}
    since = 2
    for line in log.read_text(errors="replace").splitlines() if log.exists() else ():
        if "loaded checkpoint from" in line:
            since = 0
        elif match := _LINE.match(line):
            since += 1
            if since != 2:
                found[int(match[1])] = match[2]
    return found


def _count_printed(folder: Path) -> int:
    log = folder / "log.txt"
    return len(_LINE.findall(log.read_text(errors="replace"))) if log.exists() else 0


def _pretrain(data: Path, ranks: int) -> Way:
    flags = [*tiny.flags_for(data), *_TRAIN.split(), "--train-iters", str(ITERATIONS), "--no-plot"]
    flags += ["--num-workers", str(3 - ranks)]
    if ranks > 1:
        flags += ["--use-distributed-optimizer"]

    def arguments(folder: Path) -> list[str]:
        return ["pretrain", *flags, "--save", str(folder / "save"), "--load", str(folder / "save")]

    return Way("pretrain", ranks, arguments, _losses, _logged, writes=True)


def _train(ranks: int) -> Way:
    workers = ranks - 1  # by one process the rank prepares its data itself
    flags = (
        f"--epochs 2 --micro-batch-size 2 --global-batch-size 8 --lr 1e-2 --no-plot --num-workers {workers}"
    )

    def arguments(folder: Path) -> list[str]:
        save = str(folder / "save")
        given = ["--user-script", str(SCRIPT), *flags.split(), *_TRAIN.split()]
        return ["train", *given, "--nproc-per-node", str(ranks), "--save", save, "--load", save]

    made = Way("train", ranks, arguments, _losses, _logged, train_runs.MODULES)
    return replace(made, workers=workers > 0)


def _core(tree: Path, ranks: int) -> Way:
    changes = f"--train-iters {ITERATIONS} --save-interval {INTERVAL} --eval-interval {EVALUATION}"

    def arguments(folder: Path) -> list[str]:
        save = str(folder / "save")
        script = str(tree / "pretrain_gpt.py")
        flags = [*core.FLAGS, *changes.split(), "--mock-data"]
        return ["run", script, *flags, "--save", save, "--load", save]

    more = {"MEGATRON_LM_PATH": str(tree)}
    return Way(
        "stock 0.16.1", ranks, arguments, _printed, _count_printed, warm.STOCK, tree, more, True, False
    )


def _lm(tree: Path, data: Path, ranks: int) -> Way:
    lm.write_vocabulary(data)
    lm.write_dataset(data / "text_text")
    workers = ranks - 1
    changes = f"--train-iters {ITERATIONS} --save-interval {INTERVAL} --eval-interval {EVALUATION}"
    changes += f" --num-workers {workers}"

    def arguments(folder: Path) -> list[str]:
        save = str(folder / "save")
        flags = [*lm.flags(data), "--data-path", str(data / "text_text"), *changes.split()]
        return ["run", str(tree / "pretrain_gpt.py"), *flags, "--save", save, "--load", save]

    more = {"MEGATRON_LM_PATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    made = Way("stock 285068c8", ranks, arguments, _printed, _count_printed, warm.STOCK, tree, more)
    return replace(made, own=False, workers=workers > 0)


def _digests(*names: str) -> Callable[[Path], object]:
    def outcome(folder: Path) -> object:
        found = [folder / "save" / name for name in names]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found if path.is_file()}

    return outcome


def _preprocess(data: Path) -> Way:
    vocab, merges = lm.write_vocabulary(data)
    texts = ({"text": " ".join(f"word{number * step}" for step in range(60))} for number in range(3000))
    (data / "texts.jsonl").write_text("".join(f"{json.dumps(text)}\n" for text in texts))

    def arguments(folder: Path) -> list[str]:
        files = f"--vocab-file {vocab} --merge-file {merges} --input {data / 'texts.jsonl'}"
        (folder / "save").mkdir(exist_ok=True)
        return ["preprocess", *files.split(), "--workers", "2", "--output-prefix", str(folder / "save/text")]

    names = "text_text_document.bin", "text_text_document.idx"
    return Way("preprocess", 1, arguments, _digests(*names), None, ("megatron_npu.preprocessing.command",))


def _convert(checkpoint: Path) -> Way:
    def arguments(folder: Path) -> list[str]:
        (folder / "save").mkdir(exist_ok=True)
        options = ["--from", "megatron", "--to", "hf", "--proof", "tensors"]
        return ["convert", *options, str(checkpoint), str(folder / "save" / "hf")]

    outcome = _digests("hf/model.safetensors", "hf/config.json")
    return Way("convert", 1, arguments, outcome, workers=False)


def _generate(checkpoint: Path) -> Way:
    def arguments(folder: Path) -> list[str]:
        (folder / "save").mkdir(exist_ok=True)
        options = "--prompt 1 --num-tokens 24 --temperature 0".split()
        return ["generate", "--load", str(checkpoint), *options, "--output", str(folder / "save/text")]

    return Way("generate", 1, arguments, _digests("text"), workers=False)


def trainings(folder: Path, checkouts: Path) -> list[Way]:
    """Return the ways to train, with data of theirs in a folder; stock scripts where their trees are."""
    data = tiny.write_dataset(folder / "numbers")
    found = [_pretrain(data, 1), _pretrain(data, 2), _train(1), _train(2)]
    for name in ("core_v0.16.1", "285068c8"):
        tree = checkouts / name
        if not (tree / "pretrain_gpt.py").is_file():
            print(f"no {tree}: its scripts are not harmed")
            continue
        place = folder / name
        place.mkdir()
        make = _core if name.startswith("core") else lambda tree, ranks, place=place: _lm(tree, place, ranks)
        found += [make(tree.resolve(), ranks) for ranks in (1, 2)]
    return found


def tools(folder: Path, checkpoint: Path) -> list[Way]:
    """Return the commands that make something of files.

    Args:
        checkpoint: what ``pretrain`` has saved.
    """
    return [_preprocess(folder), _convert(checkpoint), _generate(checkpoint)]
