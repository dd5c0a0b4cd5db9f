"""What is harmed: each way in which this project makes processes and files, as small as it can be."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from megatron_npu.checkpoint_files import checksums
from megatron_npu.pretrain.checkpoint import checkpoint_files, whole_checkpoints
from tests.campaign import agent
from tests.support import stock_core as core
from tests.support import stock_lm as lm
from tests.support import tiny, train_runs, warm

ITERATIONS, INTERVAL, EVALUATION = 12, 4, 6
SCRIPT = tiny.ROOT / "tests/finetune/scripts/dropout.py"
WHEELS = ("0.12.1", "0.19.2")  # the oldest and the newest megatron-core, besides the installed one
ASYNCHRONOUSLY = ("--async-save", "--use-persistent-ckpt-worker")
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
        reads: whether it reads a checkpoint, of which each trial has a copy of its own.
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
    reads: bool = False

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
        has_checkpoints = self.progress is not None or self.name == "prune"
        if not has_checkpoints or not self.own or not save.is_dir():
            return ""
        for iteration in checkpoint_files.iterations(save):
            place = checkpoint_files.directory(save, iteration)
            incomplete = whole_checkpoints.incomplete(place) if self.name.startswith("pretrain") else []
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


def _pretrain(data: Path, ranks: int, name: str = "pretrain", *more: str, wheel: Path | None = None) -> Way:
    """Return the driver.

    Args:
        more: flags.
        wheel: the folder of another megatron-core than the installed one.
    """
    flags = [*tiny.flags_for(data), *_TRAIN.split(), "--train-iters", str(ITERATIONS), "--no-plot", *more]
    flags += ["--num-workers", str(3 - ranks)]
    if ranks > 1:
        flags += ["--use-distributed-optimizer"]

    def arguments(folder: Path) -> list[str]:
        return ["pretrain", *flags, "--save", str(folder / "save"), "--load", str(folder / "save")]

    processes = not wheel or "0.12" in wheel.name  # since 0.17 threads write
    env = _on(wheel)
    return Way(name, ranks, arguments, _losses, _logged, warm.DRIVER, None, env, processes)


def _on(wheel: Path | None) -> dict[str, str]:
    """Return the environment of a program on another megatron-core."""
    if wheel is None:
        return {}
    path = os.pathsep.join(filter(None, [str(wheel), str(tiny.ROOT), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "MEGATRON_LM_PATH": str(wheel)}


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


def _core(tree: Path, ranks: int, kind: str = "", *more_flags: str) -> Way:
    """Return the script of a megatron-core.

    Args:
        kind: what its name says besides the version.
    """
    version = tree.name.removeprefix("core_v")
    changes = f"--train-iters {ITERATIONS} --save-interval {INTERVAL} --eval-interval {EVALUATION}".split()
    changes += ["--num-workers", "2"]  # upstream's default
    # since 0.18 the end of document is one of the tokens that are counted; 0.12's mock data count up to it
    tokens = {"0.12.1": ["--vocab-size", "8191"], "0.19.0": ["--vocab-size", "1024"]}.get(version, [])

    def arguments(folder: Path) -> list[str]:
        save = str(folder / "save")
        script = str(tree / "pretrain_gpt.py")
        flags = [*core.FLAGS, *tokens, *changes, *more_flags, "--mock-data"]
        return ["run", script, *flags, "--save", save, "--load", save]

    more = {"MEGATRON_LM_PATH": str(tree)}
    if "--use-persistent-ckpt-worker" in more_flags:  # is spawned, and ends with its parent
        more["TEST_COLD_SPAWN"] = "1"
    modules = warm.STOCK
    made = Way(f"stock {version}{kind}", ranks, arguments, _printed, _count_printed, modules)
    processes = version < "0.17" and not kind  # later ones write in threads
    return replace(made, tree=tree, more=more, writes=processes, own=False)


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
    return Way(
        "preprocess", 1, arguments, _digests(*names), None, ("megatron_npu.data.preprocessing.command",)
    )


def _copied(checkpoint: Callable[[], Path], folder: Path) -> str:
    """Return this trial's own copy of a checkpoint, which may be harmed."""
    (folder / "save").mkdir(exist_ok=True)
    copy = folder / "source"
    if not copy.exists():
        shutil.copytree(checkpoint(), copy)
    return str(copy)


def _convert(checkpoint: Callable[[], Path], kind: str, env: dict[str, str]) -> Way:
    def arguments(folder: Path) -> list[str]:
        options = ["--from", "megatron", "--to", "hf", "--proof", "tensors"]
        return ["convert", *options, _copied(checkpoint, folder), str(folder / "save" / "hf")]

    outcome = _digests("hf/model.safetensors", "hf/config.json")
    return Way(f"convert{kind}", 1, arguments, outcome, more=env, workers=False, reads=True)


def _generate(checkpoint: Callable[[], Path], kind: str, env: dict[str, str]) -> Way:
    def arguments(folder: Path) -> list[str]:
        options = [
            "--load",
            _copied(checkpoint, folder),
            *"--prompt 1 --num-tokens 24 --temperature 0".split(),
        ]
        return ["generate", *options, "--output", str(folder / "save/text")]

    return Way(f"generate{kind}", 1, arguments, _digests("text"), more=env, workers=False, reads=True)


def _lambada(checkpoint: Callable[[], Path], kind: str, env: dict[str, str]) -> Way:
    def arguments(folder: Path) -> list[str]:
        passages = folder / "passages.jsonl"
        passages.write_text("".join(f'{{"text": "{at} {at + 1} {at + 2} {at + 3}"}}\n' for at in range(64)))
        return ["lambada", "--load", _copied(checkpoint, folder), "--valid-data", str(passages)]

    return Way(f"lambada{kind}", 1, arguments, _accuracy, more=env, workers=False, reads=True)


def _accuracy(folder: Path) -> list[str]:
    log = folder / "log.txt"
    return re.findall("number correct: .*", log.read_text(errors="replace"))[-1:] if log.exists() else []


MANY = 24  # checkpoints that ``prune`` finds; it keeps each eighth and the newest two


def _prune(checkpoint: Callable[[], Path]) -> Way:
    def arguments(folder: Path) -> list[str]:
        save = folder / "save"
        if not save.exists():
            newest = checkpoint_files.newest(checkpoint())
            assert newest is not None
            for number in range(1, MANY + 1):
                shutil.copytree(newest, save / f"iter_{number:07d}")
            (save / checkpoint_files.TRACKER).write_text(str(MANY))
        return ["checkpoint", "prune", str(save), "--keep", "2", "--keep-every", "8"]

    def outcome(folder: Path) -> object:
        return checkpoint_files.iterations(folder / "save") if (folder / "save").is_dir() else []

    modules = ("megatron_npu.pretrain.checkpoint.checkpoint_command",)
    return Way("prune", 1, arguments, outcome, modules=modules, workers=False)


def trainings(folder: Path, checkouts: Path) -> list[Way]:
    """Return the ways to train, with data of theirs in a folder; stock scripts where their trees are."""
    data = tiny.write_dataset(folder / "numbers")
    found = [_pretrain(data, 1), _pretrain(data, 2), _train(1), _train(2)]
    found += [_pretrain(data, ranks, "pretrain asynchronously", "--async-save") for ranks in (1, 2)]
    for version in WHEELS:
        if wheel := _there(checkouts, f"megatron_core-{version}", "megatron/core"):
            found += [_pretrain(data, ranks, f"pretrain on {version}", wheel=wheel) for ranks in (1, 2)]
    for name in ("core_v0.16.1", "core_v0.12.1", "core_v0.19.0", "285068c8"):
        if not (tree := _there(checkouts, name, "pretrain_gpt.py")):
            continue
        place = folder / name
        place.mkdir()
        make = _core if name.startswith("core") else lambda tree, ranks, place=place: _lm(tree, place, ranks)
        found += [make(tree, ranks) for ranks in (1, 2)]
        if name == "core_v0.16.1":
            found += [_core(tree, ranks, " asynchronously", *ASYNCHRONOUSLY) for ranks in (1, 2)]
    return found


def _there(checkouts: Path, name: str, inside: str) -> Path | None:
    """Return a tree, or None where it has not been fetched."""
    if (checkouts / name / inside).exists():
        return (checkouts / name).resolve()
    print(f"no {checkouts / name}: it is not harmed")
    return None


def tools(folder: Path, checkpoint: Callable[[Way], Path], trainings: Sequence[Way]) -> list[Way]:
    """Return the commands that make something of files.

    Args:
        checkpoint: returns what a training has saved.
        trainings: the ways to train.
    """
    found = [_preprocess(folder)]
    for kind in ("", *(f" on {version}" for version in WHEELS)):
        for way in trainings:
            if (way.name, way.ranks) == (f"pretrain{kind}", 1):
                source = functools.partial(checkpoint, way)
                env = dict(way.more)
                found += [make(source, kind, env) for make in (_convert, _generate, _lambada)]
                if not kind:
                    found.append(_prune(source))
    return found
