"""Measure how far layouts are from a single process: losses and gradient norms, by version, device and dtype.

    python benchmarks/equal_numbers.py [--version V ...] [--device cpu npu] [--dtype fp32 bf16]
        [--layout NAME ...] [--minutes N] [--again]

Each run trains the tests' model for ten iterations, without dropout, from the same weights as a single
process. The largest relative differences of losses and gradient norms are recorded in
``results/equal/numbers.json``, with date and commit. Recorded results are skipped (``--again`` repeats them),
so an interrupted script can be resumed. ``scripts/equal_numbers_page.py`` writes the page.

For megatron-core's versions the built-in trainer runs all layouts of a version one after another in a single
start of two processes; for Megatron-LM 285068c8 its own pretrain_gpt.py runs once per layout. ``npu`` is a
simulated NPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megatron_npu.base import files  # noqa: E402
from tests.support import stock_lm, tiny  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "equal" / "numbers.json"
STOCK = "285068c8"
VERSIONS = (STOCK, "0.12.1", "0.13.1", "0.14.0", "0.15.3", "0.16.1", "0.17.1", "0.18.2", "0.19.2")
TREES = {"0.20.0": "core_main_d98e8a64"}  # what is in checkouts/ under another name than its version
STEPS = 10
LIMIT = 900  # seconds of one start
MODEL = (
    "--num-layers 4 --hidden-size 64 --micro-batch-size 2 --global-batch-size 8 --attention-dropout 0 "
    f"--hidden-dropout 0 --train-iters {STEPS} --eval-iters 0 --lr 2e-3 --no-plot --use-cpu-initialization"
)
EXPERTS = (
    "--num-layers 2 --num-experts 4 --moe-ffn-hidden-size 24 --moe-aux-loss-coeff 0 --swiglu "
    "--disable-bias-linear --normalization RMSNorm --init-method-std 0.1 --no-use-cpu-initialization"
)
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
PP2_VP2 = f"{PP2} --num-layers-per-virtual-pipeline-stage 1"


class Layout(NamedTuple):
    """The way in which a run is distributed.

    Attributes:
        processes: number of processes.
        flags: the trainer's flags; 285068c8's script has the same ones, as far as it has them.
        against: the layout with which it is compared, with the same version, device and dtype.
        in_stock: whether 285068c8 supports the layout.
    """

    processes: int
    flags: str
    against: str = "one"
    in_stock: bool = True


LAYOUTS = {
    "one": Layout(1, "", ""),
    "one, micro batch 1": Layout(1, "--micro-batch-size 1"),
    "one, micro batch 4": Layout(1, "--micro-batch-size 4"),
    "one, experts": Layout(1, EXPERTS, "", in_stock=False),  # what EP is compared with, no row of its own
    "DP 2": Layout(2, ""),
    "DP 2, distributed optimizer": Layout(2, "--use-distributed-optimizer"),
    "TP 2": Layout(2, TP2),
    "TP 2, sequence parallel": Layout(2, f"{TP2} --sequence-parallel"),
    "PP 2": Layout(2, PP2),
    "PP 2, VP 2": Layout(2, PP2_VP2, in_stock=False),
    "CP 2": Layout(2, "--context-parallel-size 2", in_stock=False),
    "EP 2": Layout(2, f"{EXPERTS} --expert-model-parallel-size 2", "one, experts", in_stock=False),
    "FSDP 2, Megatron's": Layout(2, "--zero-3-memory-optimization", in_stock=False),
    "FSDP 2, torch's": Layout(2, "--fsdp-memory-optimization", in_stock=False),
}
_WITH_EXPERTS = "one, experts"
_CUT = "one, from a checkpoint"
DTYPES = {"fp32": "", "bf16": "--bf16"}


@dataclass(frozen=True)
class Curve:
    """The values that a run has logged for its iterations, or a one-line reason why it cannot run."""

    losses: list[float]
    norms: list[float]
    refused: str = ""


class Group(NamedTuple):
    """The runs that are started together because they share version, device and dtype."""

    version: str
    device: str
    dtype: str


def main() -> int:
    options = _parser().parse_args()
    if options.worker:
        return _work(*options.worker)
    end = time.monotonic() + 60 * options.minutes
    groups = [
        Group(version, device, dtype)
        for version in options.version
        for device in options.device
        for dtype in options.dtype
    ]
    for group in groups:
        wanted = [name for name in options.layout if options.again or not _noted(_rows(), group, name)]
        wanted = [name for name in wanted if group.version != STOCK or LAYOUTS[name].in_stock]
        wanted = [name for name in wanted if name != _WITH_EXPERTS]
        if not wanted:
            continue
        if time.monotonic() > end:
            print(f"{' '.join(group)}: no time is left; call it again", flush=True)
            return 0
        began = time.monotonic()
        for row in _measured(group, wanted):
            rows = [old for old in _rows() if not _is(old, group, row["layout"])] + [row]
            files.write(RESULTS, json.dumps({"rows": rows}, indent=1) + "\n")
            print(_told(row), flush=True)
        print(f"{' '.join(group)}: {time.monotonic() - began:.0f} s", flush=True)
    return 0


def _rows() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text())["rows"] if RESULTS.is_file() else []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", nargs="+", choices=VERSIONS, default=list(VERSIONS))
    parser.add_argument("--device", nargs="+", choices=["cpu", "npu"], default=["cpu", "npu"])
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--layout", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="NAME")
    parser.add_argument(
        "--minutes", type=float, default=1e6, help="start no new run after this number of minutes"
    )
    parser.add_argument("--again", action="store_true", help="also measure again what is already recorded")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    return parser


def _is(row: Mapping[str, Any], group: Group, layout: str) -> bool:
    return (row["version"], row["device"], row["dtype"], row["layout"]) == (*group, layout)


def _noted(rows: list[dict[str, Any]], group: Group, layout: str) -> bool:
    return any(_is(row, group, layout) for row in rows)


def _told(row: Mapping[str, Any]) -> str:
    found = row.get("refused") or f"loss {row['loss']:.1e}, gradient norm {row['norm']:.1e}"
    return f"{row['version']} {row['device']} {row['dtype']} {row['layout']}: {found}"


def _measured(group: Group, wanted: list[str]) -> Iterator[dict[str, Any]]:
    """Run the wanted layouts and those that they are compared with; yield a row for each."""
    commit = subprocess.run(
        ["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    needed = {LAYOUTS[name].against for name in wanted} - {""}
    names = [name for name in LAYOUTS if name in needed.union(wanted)]
    with tempfile.TemporaryDirectory() as folder:
        run = _stock if group.version == STOCK else _driver
        curves = run(group, names, Path(folder))
        reference = _on_the_host(group, curves, Path(folder), run)
    for name in wanted:
        curve = curves[name]
        against = LAYOUTS[name].against
        if group.version == STOCK and "pipeline" in LAYOUTS[name].flags:
            against = _CUT
        expected = curves.get(against) or reference.get(name)
        row: dict[str, Any] = {**group._asdict(), "layout": name, "commit": commit}
        row["date"] = datetime.now(timezone.utc).isoformat(timespec="seconds")
        reason = curve.refused or ("" if expected else "nothing to compare with")
        if not reason and len(curve.losses) != STEPS:
            reason = f"failed: {len(curve.losses)} iterations were logged"
        if reason or expected is None:
            yield {**row, "refused": reason}
            continue
        yield {
            **row,
            "against": against or "the same on cpu in fp32",
            "loss": _deviation(curve.losses, expected.losses),
            "norm": _deviation(curve.norms, expected.norms),
            "losses": [curve.losses[0], curve.losses[-1]],
        }


def _on_the_host(group: Group, curves: Mapping[str, Curve], folder: Path, run: Any) -> dict[str, Curve]:
    """Return the single-process fp32 CPU curve with which another group's single process is compared.

    It starts from that group's weights, which are in ``folder``.
    """
    alone = [name for name in ("one",) if name in curves and not curves[name].refused]
    host = group._replace(device="cpu", dtype="fp32")
    if host == group:
        return {name: curves[name] for name in alone}
    return run(host, alone, folder)


def _deviation(values: list[float], expected: list[float]) -> float:
    """Return the largest relative difference between two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(values, expected, strict=True))


def _driver(group: Group, names: list[str], folder: Path) -> dict[str, Curve]:
    """Run the built-in trainer: first a single process, which saves the initial weights of all runs."""
    data = folder / "numbers"
    if not data.with_suffix(".bin").is_file():
        tiny.write_dataset(data)
    flags = [*tiny.flags_for(data), *MODEL.split(), *DTYPES[group.dtype].split()]
    found: dict[str, Curve] = {}
    for processes in (1, 2):
        cases = {}
        for name in names:
            if LAYOUTS[name].processes != processes:
                continue
            kind = "experts" if EXPERTS in LAYOUTS[name].flags else "dense"
            words = [*flags, *LAYOUTS[name].flags.split()]
            if processes == 1 and not LAYOUTS[name].against and not (folder / kind).is_dir():
                cases[f"start {kind}"] = [*words, "--train-iters", "0", "--save", str(folder / kind)]
            # Megatron's FSDP reads its own format alone; drawn on the host, its weights are the same
            begins = [] if "--zero-3" in LAYOUTS[name].flags else ["--load", str(folder / kind), "--finetune"]
            cases[name] = [*words, *begins]
        found |= _started(group, cases, folder, processes)
    return found


def _started(group: Group, cases: dict[str, list[str]], folder: Path, processes: int) -> dict[str, Curve]:
    """Run all cases in one start; after a case that ends its process, start again with the remaining ones."""
    found: dict[str, Curve] = {}
    while left := {name: words for name, words in cases.items() if name not in found}:
        listed, results = folder / "cases.json", folder / f"curves-{processes}.jsonl"
        listed.write_text(json.dumps(left))
        results.unlink(missing_ok=True)
        tail = _run(group, [str(Path(__file__).resolve()), "--worker", str(listed), str(results)], processes)
        lines = results.read_text().splitlines() if results.is_file() else []
        done = {row.pop("name"): Curve(**row) for row in map(json.loads, lines)}
        found |= done
        if missing := [name for name in left if name not in done]:
            found[missing[0]] = Curve([], [], f"failed: {tail}")
    return found


def _run(group: Group, command: list[str], processes: int) -> str:
    """Run a Python program for a device and version; return the last line of its output."""
    path = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MEGATRON_NPU_DEVICE": "cpu"}
    if group.version != "0.16.1":
        tree = ROOT / "checkouts" / TREES.get(group.version, f"megatron_core-{group.version}")
        path.insert(0, str(tree))
        environment["MEGATRON_LM_PATH"] = str(tree)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, path))
    words = [sys.executable, *(tiny.torchrun(processes) if processes > 1 else []), *command]
    if group.device == "npu":
        del environment["MEGATRON_NPU_DEVICE"]
        words = [sys.executable, "-m", "megatron_npu", "sim", "--", *words]
    try:
        done = subprocess.run(
            words,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT} s"
    errors = [line for line in done.stdout.splitlines() if "Error" in line or "error:" in line]
    errors = [line for line in errors if "ChildFailedError" not in line]  # the launcher's, of any cause
    return errors[-1].strip()[:200] if errors else f"exit code {done.returncode}"


def _work(listed: str, results: str) -> int:
    """Train each case in this process, which is one of a group, and append its logged values."""
    import torch.distributed as dist

    from megatron_npu import devices, plugin
    from megatron_npu.base.errors import UsageError
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import initialize, pretrain

    plugin.install()
    if "RANK" in os.environ:
        devices.current().set_current(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(devices.current().backend)
    initialize.silence_known_warnings()
    from megatron.core import parallel_state

    log = Path(f"{results}.log")
    for name, words in json.loads(Path(listed).read_text()).items():
        if not int(os.environ.get("RANK", "0")):
            log.unlink(missing_ok=True)
        row: dict[str, Any] = {"name": name, "losses": [], "norms": []}
        parallel_state._POSITION_EMBEDDING_GLOBAL_RANKS = None  # 0.12 keeps those of the layout before
        try:
            pretrain.train(arguments.parse([*words, "--json-log", str(log)]))
        except UsageError as error:
            row["refused"] = str(error)
        if int(os.environ.get("RANK", "0")):
            continue
        if "refused" not in row and log.is_file():
            logged = tiny.rows(log)
            row |= {"losses": [one["loss"] for one in logged], "norms": [one["grad_norm"] for one in logged]}
        with open(results, "a", encoding="utf-8") as stream:
            stream.write(json.dumps(row) + "\n")
    return 0


def _stock(group: Group, names: list[str], folder: Path) -> dict[str, Curve]:
    """Run the script of Megatron-LM 285068c8, with the same weights in all layouts except pipelines.

    Pipelines load a single process's checkpoint, converted by the stock tool, and are compared with a single
    process that resumes from it (``_CUT``).
    """
    tree = ROOT / "checkouts" / STOCK
    if not (folder / "text.bin").is_file():
        stock_lm.write_data(folder)
    common = [*stock_lm.flags(folder), *f"--train-iters {STEPS} --lr-decay-iters {STEPS}".split()]
    common += [*"--lr 3e-3 --lr-warmup-iters 1 --eval-iters 0".split(), *DTYPES[group.dtype].split()]
    found: dict[str, Curve] = {}
    for name in names:
        layout = LAYOUTS[name]
        if "pipeline" in layout.flags:
            found |= _stages(group, tree, common, name, folder)
            continue
        multiple = ["--make-vocab-size-divisible-by", "32" if "tensor" in layout.flags else "64"]
        words = [*common, *layout.flags.split(), *multiple]
        found[name] = _script(
            group, tree, words, folder / f"board {name} {group.device} {group.dtype}", layout.processes
        )
    return found


def _stages(group: Group, tree: Path, common: list[str], name: str, folder: Path) -> dict[str, Curve]:
    """Run a pipeline and a single process from the weights of one checkpoint."""
    start, parts = folder / "start", folder / "stages"
    common = [*common, *stock_lm.TOOL_MULTIPLE.split()]
    if group.device == "npu":  # its stages would all-reduce host tensors; the weights are loaded anyway
        common = [word for word in common if word != "--use-cpu-initialization"]
    saving = f"--save {start} --save-interval 1 --exit-interval 1".split()
    _script(group, tree, [*common, *saving], folder / "board start", 1)
    stock_lm.change_layout(tree, start, parts, 1, 2)
    found: dict[str, Curve] = {}
    for key, flags, weights, processes in ((_CUT, "", start, 1), (name, LAYOUTS[name].flags, parts, 2)):
        load = f"--load {weights} --finetune --no-load-optim --no-load-rng".split()
        words = [*common, *flags.split(), *load]
        found[key] = _script(group, tree, words, folder / f"board {key}", processes)
    return found


def _script(group: Group, tree: Path, words: list[str], board: Path, processes: int) -> Curve:
    """Run pretrain_gpt.py; read its curves from the TensorBoard files, which have all digits."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    command = ["-m", "megatron_npu", "run", str(tree / "pretrain_gpt.py"), *words]
    tail = _run(
        group._replace(version="0.16.1"),  # which is not asked for: the script brings its own
        [*command, "--tensorboard-dir", str(board), "--tensorboard-log-interval", "1"],
        processes,
    )
    place = next((Path(at) for at, _, found in os.walk(board) if found), None)
    if place is None:
        return Curve([], [], f"failed: {tail}")
    events = EventAccumulator(str(place))
    events.Reload()
    tags = events.Tags()["scalars"]
    losses, norms = (
        [each.value for each in events.Scalars(name)] if name in tags else []
        for name in ("lm loss", "grad-norm")
    )
    short = "" if len(losses) == STEPS else f"failed: {tail}"
    return Curve(losses, norms, short)


if __name__ == "__main__":
    sys.exit(main())
