"""``evaluate``, which runs lm-eval: folders, tasks, caches, metrics, checkpoints, signals."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.campaign.accounts import hostile_checkpoints, surroundings, trials
from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples
from tests.campaign.accounts.trials import DONE, EITHER, REFUSED, Ended, Later, Try, Verdict
from tests.support.payload import Runs

_PLACE = "evaluate"
_TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{template}"
doc_to_target: "{{{{' '+text.split(' ')[-1]}}}}"
metric_list: [{{metric: {metric}}}]
{more}
"""
# what forks share; lm-eval's evaluations import it
_SHARED = ("lm_eval.evaluator", "lm_eval.models", "lm_eval.tasks", "megatron_npu.evaluation.lm_eval_model")
_PLAIN = "{{text.split(' ')[:-1]|join(' ')}}"
_ESCAPE = "{{{{ cycler.__init__.__globals__.os.close(cycler.__init__.__globals__.os.open('{}',65)) }}}}"
_DAMAGED = (
    *(
        ".metadata: a pickle that runs",
        "common.pt: a pickle that runs",
        "tracker: /dev/zero",
        "weights: noise",
    ),
    *("weights: a flipped bit", "weights: a pipe", "arguments: 10^9 layers", "arguments: no heads"),
)


def tries(room: Room) -> Iterator[Try | Later]:
    """Yield evaluations, if lm-eval is installed."""
    if importlib.util.find_spec("lm_eval") is None:
        return
    os.environ["HOME"] = str(room.home)  # where the packages that a fork shares look for their caches
    for name in _SHARED:
        importlib.import_module(name)
    samples = Samples(room)
    own = room.folder / "tasks"
    own.mkdir(exist_ok=True)
    _write_task(samples, own / "mine.yaml")
    room.give(own, room.user)
    words = evaluate(samples, "mine", "--include_path", str(own))
    folder = _hostile(samples)
    yield Try(_PLACE, "plain", words, DONE, limit=400)
    yield Try(_PLACE, "a stranger's working directory", words, DONE, cwd=folder, limit=400)
    for task in ("theirs", "list", "mine,theirs", "./theirs", "theirs/theirs.yaml", "theirs/*.yaml"):
        what = f"--tasks {task} in a stranger's working directory"
        yield Try(_PLACE, what, evaluate(samples, task), REFUSED, cwd=folder, limit=400)
    for what, typed in _typed(words).items():
        yield Try(_PLACE, f"{what} in a stranger's working directory", typed, REFUSED, cwd=folder, limit=400)
    for name, more in _words(folder).items():
        yield Try(_PLACE, name, evaluate(samples, "theirs", *more), REFUSED, limit=400)
    for word in ("ls tasks", "validate --tasks theirs"):
        more = ["evaluate", *word.split(), "--include_path", str(folder / "theirs")]
        yield Try(_PLACE, f"{word} --include_path", more, REFUSED, limit=400)
    yield from _of_metrics(samples, own, folder)
    for name in (
        "HF_HOME",
        "HF_DATASETS_CACHE",
        "HF_MODULES_CACHE",
        "HF_METRICS_CACHE",
        "LM_HARNESS_CACHE_PATH",
    ):
        expected = REFUSED if name.startswith("LM") else EITHER
        variables = {name: str(folder)}
        yield Try(
            _PLACE, f"{name} of another", [*words, "--cache_requests", "true"], expected, variables=variables
        )
    yield from _damaged(samples, own)
    for argument in (
        *("max_length=-1", "max_length=nan", "batch_size=x", "load=/dev/zero", "evil=1", "fp16=x"),
        *("max_length=0", "max_gen_toks=x", "tensor_model_parallel_size=x", "load="),
    ):
        changed = [*words, "--model_args", argument]  # which lm-eval merges with those before
        yield Try(_PLACE, f"--model_args {argument}", changed, REFUSED, limit=300, starts=False)
    yield from _signals(samples, own)


def evaluate(samples: Samples, tasks: str, *more: str) -> list[str]:
    """Return the evaluation of some tasks."""
    load = f"load={samples.checkpoint}"
    return ["evaluate", "--model", "megatron_npu", "--model_args", load, "--tasks", tasks, *more]


def _write_task(samples: Samples, path: Path, lines: int = 3, **changes: str) -> None:
    file = samples.written(f"{path.stem}.jsonl", '{"text": "1 2 3 4 5"}\n' * lines)
    values = {"name": path.stem, "file": str(file), "template": _PLAIN, "metric": "acc", "more": ""}
    path.write_text(_TASK.format(**{**values, **changes}))


def _hostile(samples: Samples) -> Path:
    """Make a stranger's working directory with tasks, metrics, caches and run files."""
    room = samples.room
    folder = surroundings.hostile(room)
    mark = room.mark("evaluate")
    code = (
        f"import os\nos.close(os.open({str(mark)!r}, os.O_CREAT | os.O_WRONLY))\ndef run(docs): return docs\n"
    )
    for name in ("theirs", "list", "hellaswag"):
        (folder / name).mkdir(exist_ok=True)
        _write_task(samples, folder / name / f"{name}.yaml", more="process_docs: !function evil.run")
        (folder / name / "evil.py").write_text(code)
    (folder / "template").mkdir(exist_ok=True)
    _write_task(samples, folder / "template" / "theirs.yaml", template=_ESCAPE.format(mark))
    for metric in ("rouge", "bleu", "squad_v2", "theirs_metric"):
        (folder / metric).mkdir(exist_ok=True)
        (folder / metric / f"{metric}.py").write_text(code)
    for place in ("evaluate_modules", "modules/evaluate_modules", "huggingface/modules/evaluate_modules"):
        for metric in ("rouge", "theirs_metric"):
            module = folder / place / "metrics" / f"evaluate-metric--{metric}" / ("0" * 64)
            module.mkdir(parents=True, exist_ok=True)
            (module / f"{metric}.py").write_text(code)
        for each in (folder / place, *(folder / place).rglob("*")):
            if each.is_dir():
                (each / "__init__.py").write_text(code)
    (folder / "wandb").mkdir(exist_ok=True)
    (folder / "wandb" / "settings").write_text("[default]\nbase_url = http://127.0.0.1:9\n")
    (folder / "cache_rank0.db").write_bytes(pickle.dumps(Runs(mark)))
    (folder / "requests.pickle").write_bytes(pickle.dumps(Runs(mark)))
    run = {"include_path": str(folder / "theirs"), "use_cache": str(folder / "cache")}
    (folder / "run.yaml").write_text(json.dumps(run))
    return room.give(folder)


def _typed(words: list[str]) -> dict[str, list[str]]:
    """Return what else can be typed, such as other ways to name a stranger's tasks."""
    return {
        "--tasks theirs --tasks mine": [words[0], "--tasks", "theirs/theirs.yaml", *words[1:]],
        "-wt theirs": [*words, "-wt", "theirs/theirs.yaml"],
        "--device evil": [*words, "--device", "evil;x"],
        "--batch_size 0": [*words, "--batch_size", "0"],
        "--tasks nowhere": [words[0], *words[1:], "--tasks", "nowhere"],
        "--wandb_args": [*words, "--wandb_args", "project=mine,mode=offline"],
    }


def _words(folder: Path) -> dict[str, list[str]]:
    return {
        "--include_path of a stranger": ["--include_path", str(folder / "theirs")],
        "--include_path with a template that runs": ["--include_path", str(folder / "template")],
        "--config of a stranger": ["--config", str(folder / "run.yaml")],
        "-C of a stranger": ["-C", str(folder / "run.yaml")],
        "--config in /dev/zero": ["--config", "/dev/zero"],
        "--use_cache of a stranger": ["--use_cache", str(folder / "cache")],
        "--use_cach, abbreviated": ["--use_cach", str(folder / "cache")],
        "--output_path of a stranger": ["--output_path", str(folder)],
    }


def _of_metrics(samples: Samples, own: Path, folder: Path) -> Iterator[Try]:
    for metric in ("rouge", "theirs_metric"):
        place = own.with_name(f"tasks {metric}")
        place.mkdir(exist_ok=True)
        _write_task(samples, place / "measured.yaml", metric=metric)
        samples.room.give(place, samples.room.user)
        words = evaluate(samples, "measured", "--include_path", str(place))
        what = f"the metric {metric} in a stranger's working directory"
        yield Try(_PLACE, what, words, REFUSED, cwd=folder, limit=400)
        for variable in ("HF_MODULES_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
            what = f"the metric {metric} with {variable} of another account"
            variables = {variable: str(folder), "HF_HUB_OFFLINE": "1"}
            yield Try(_PLACE, what, words, EITHER, variables=variables, limit=400)


def _damaged(samples: Samples, own: Path) -> Iterator[Try]:
    room = samples.room
    for name in _DAMAGED:
        change = hostile_checkpoints.CHECKPOINTS[name]
        folder = samples.changed_checkpoint(f"evaluated {name}", change, room.mark(name))
        words = evaluate(samples, "mine", "--include_path", str(own), "--model_args", f"load={folder}")
        what = f"a checkpoint of another account: {name}"
        yield Try(_PLACE, what, words, REFUSED, limit=400, starts=False)


def _signals(samples: Samples, own: Path) -> Iterator[Later]:
    room = samples.room
    _write_task(samples, own / "long.yaml", lines=20_000)
    room.give(own, room.user)
    results = room.temporary / "evaluated"
    words = evaluate(samples, "long", "--include_path", str(own), "--output_path", str(results))
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGHUP):
        for seconds in (6.0, 14.0):
            make = functools.partial(_harmed, room, words, results, number, seconds)
            yield Later(f"{number.name} after {seconds:.0f} s of computing", make)


def _harmed(room: Room, words: list[str], results: Path, number: signal.Signals, seconds: float) -> Verdict:
    pid = trials.started(room, Try(_PLACE, "signals", words))
    process, began = psutil.Process(pid), time.monotonic()
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        if sum(process.cpu_times()[:2]) > seconds or time.monotonic() - began > 300:
            break
        time.sleep(0.02)
    process.send_signal(number)
    code, is_hung = trials.ended(pid, 60)
    left = trials.left(room)
    told = (room.folder / "err.txt").read_text(errors="replace")
    room.sweep()
    verdict = trials.verdict_on(Ended(1, "", told, is_hung, bool(left)), EITHER, room.marked())
    made = [str(path) for path in results.rglob("*")] if results.exists() else []
    if number == signal.SIGKILL and verdict == "unnamed":  # which lets nobody say anything
        verdict = "refused"
    if code and made:
        verdict = "silent"
    what = f"{number.name} after {seconds:.0f} s of computing"
    return Verdict(_PLACE, what, verdict, code, 0.0, f"{told[-400:]} left {left}, written {made}")
