"""Explain the differences on the page of equal numbers by comparing each run with one in fp64.

    python benchmarks/equal_truth.py [--seeds N] [--run NAME ...]

Model, data and weights are those of ``equal_numbers.py``, with megatron-core 0.16.1. Recorded in
``results/equal/truth.json``, with date and commit:

- ``runs``: of each run the first gradient's distance from fp64's at the same weights (``rounded``: after
  rounding it to bf16), and how far losses and norms of ten iterations are from those of a training in fp64;
- ``weight``: the weight that the first update moves most differently on the NPU and the CPU, its gradients;
- ``epsilon``: the difference of the NPU's and the CPU's norms with Adam's default epsilon and a larger one;
- ``seeds``: the largest deviation of a loss from fp32's, for bf16 in one process and on two ranks, by seed.

For fp64, the built-in trainer runs with its types and casts replaced; do not train with it. ``npu`` is
simulated.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import equal_numbers as equal
import torch

from megatron_npu.base import files
from tests.support import tiny

RESULTS = equal.ROOT / "benchmarks" / "results" / "equal" / "truth.json"
BF16, SMALL, LARGE = "--bf16", "--micro-batch-size 1", "--micro-batch-size 4"
EPSILON = "--adam-eps 1e-5"
SEEDS = (1234, 7, 1, 2, 3, 4, 5, 6)
SWITCHES = {  # by the number of processes
    1: {
        "fp32": "",
        "bf16": "--mixed-precision",
        "bf16, micro batch 2": "--mixed-precision --micro-batch-size 2",
        "bf16, micro batch 4": "--mixed-precision --micro-batch-size 4",
        "bf16, weight gradients rounded": "--mixed-precision --no-gradient-accumulation-fusion",
    },
    2: {
        "bf16, DP 2": "--mixed-precision",
        "bf16, zero-2": "--mixed-precision --zero-2-memory-optimization",
        "bf16, zero-3": "--mixed-precision --zero-3-memory-optimization",
        "bf16, torch's FSDP": "--mixed-precision --fsdp-memory-optimization",
    },
}

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Run:
    """A training run and the values that are recorded for it.

    Attributes:
        flags: flags besides those of the model.
        device: ``cpu`` or ``npu``.
        processes: number of processes.
        fp64: whether everything is computed in fp64.
        rounded: whether the weights begin as those of bf16.
        reduced: whether torch's FSDP reduces gradients in fp32, which upstream does not ask it for.
    """

    flags: str = ""
    device: str = "cpu"
    processes: int = 1
    fp64: bool = False
    rounded: bool = False
    reduced: bool = False


FSDP, ZERO_3 = "cpu bf16, torch's FSDP 2", "cpu bf16, Megatron's FSDP 2"
TRUTH, TRUTH_BF16 = "fp64", "fp64, from bf16's weights"
RUNS = {
    TRUTH: Run("--no-gradient-accumulation-fusion", fp64=True),
    TRUTH_BF16: Run("--no-gradient-accumulation-fusion", fp64=True, rounded=True),
    "cpu fp32": Run(),
    "cpu fp32, micro batch 1": Run(SMALL),
    "npu fp32": Run(device="npu"),
    "cpu bf16": Run(BF16),
    "cpu bf16, micro batch 1": Run(f"{BF16} {SMALL}"),
    "cpu bf16, micro batch 4": Run(f"{BF16} {LARGE}"),
    "cpu bf16, TP 2": Run(f"{BF16} {equal.TP2}", processes=2),
    "cpu bf16, DP 2": Run(BF16, processes=2),
    FSDP: Run(f"{BF16} --fsdp-memory-optimization", processes=2),
    f"{FSDP}, micro batch 1": Run(f"{BF16} --fsdp-memory-optimization {SMALL}", processes=2),
    f"{FSDP}, micro batch 4": Run(f"{BF16} --fsdp-memory-optimization {LARGE}", processes=2),
    f"{FSDP}, micro batch 4, reduced in fp32": Run(
        f"{BF16} --fsdp-memory-optimization {LARGE}", processes=2, reduced=True
    ),
    ZERO_3: Run(f"{BF16} --zero-3-memory-optimization", processes=2),
    f"{ZERO_3}, micro batch 1": Run(f"{BF16} --zero-3-memory-optimization {SMALL}", processes=2),
    "cpu fp32, epsilon": Run(EPSILON),
    "npu fp32, epsilon": Run(EPSILON, device="npu"),
}


@dataclass
class Kept:
    """Recorded values of a run: gradients and weights of two iterations, losses and norms of all."""

    gradients: list[Tensors] = field(default_factory=list)
    weights: list[Tensors] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="number of seeds, from 0 to 8")
    parser.add_argument(
        "--run", nargs="+", choices=RUNS, help="run only these, and keep what is already recorded"
    )
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        return _work(Path(options.worker))
    with tempfile.TemporaryDirectory() as folder:
        if options.run:
            noted = _with_runs(json.loads(RESULTS.read_text()), _train(Path(folder), options.run))
        else:
            kept = _train(Path(folder), list(RUNS))
            found = {"runs": _runs(kept), "weight": _weight(kept), "epsilon": _epsilon(kept)}
            found["seeds"] = _seeds(Path(folder), SEEDS[: options.seeds])
            noted = {**_origin(), **found}
    files.write(RESULTS, json.dumps(noted, indent=1) + "\n")
    print(json.dumps(noted, indent=1))
    return 0


def _origin() -> dict[str, str]:
    words = ["git", "-C", str(equal.ROOT), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    return {"commit": commit, "date": datetime.now(timezone.utc).isoformat(timespec="seconds")}


def _with_runs(noted: dict[str, Any], kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Return what is noted, with the rows of other runs in place of theirs or behind them."""
    rows = {row["run"]: row for row in noted["runs"]}
    rows |= {row["run"]: {**row, **_origin()} for row in _runs(kept)}
    return {**noted, "runs": list(rows.values())}


def _train(folder: Path, names: list[str]) -> dict[str, Kept]:
    """Train fp64's runs and the named ones from the weights that one process has drawn."""
    data, start = folder / "numbers", folder / "start"
    tiny.write_dataset(data)
    flags = [*tiny.flags_for(data), *equal.MODEL.split()]
    _start(folder, "begin", Run(), [*flags, "--train-iters", "0", "--save", str(start)])
    kept = {}
    for name in dict.fromkeys((TRUTH, TRUTH_BF16, *names)):
        run = RUNS[name]
        # Megatron's FSDP reads its own format alone; drawn on the host, its weights are the same
        begins = [] if "--zero-3" in run.flags else ["--load", str(start), "--finetune"]
        words = [*flags, *begins, *run.flags.split()]
        kept[name] = _start(folder, name, run, words)
        print(f"{name}: losses {kept[name].losses[0]:.6f} to {kept[name].losses[-1]:.6f}", flush=True)
    return kept


def _start(folder: Path, name: str, run: Run, words: list[str]) -> Kept:
    spec = folder / "spec.json"
    spec.write_text(json.dumps({**vars(run), "words": words, "out": str(folder / name)}))
    group = equal.Group("0.16.1", run.device, "fp32")
    tail = equal._run(group, [str(Path(__file__).resolve()), "--worker", str(spec)], run.processes)
    parts = [folder / f"{name}.{rank}.pt" for rank in range(run.processes)]
    if not all(part.is_file() for part in parts):
        raise SystemExit(f"{name}: {tail}")
    loaded = [torch.load(part, weights_only=True) for part in parts]
    rows = tiny.rows(folder / f"{name}.jsonl") if name != "begin" else []
    answer = Kept(losses=[row["loss"] for row in rows], norms=[row["grad_norm"] for row in rows])
    if "--tensor" not in run.flags:
        loaded = loaded[:1]  # each rank has noted whole tensors
    for iteration in zip(*loaded, strict=True):
        answer.gradients.append(_whole([part["gradients"] for part in iteration]))
        answer.weights.append(_whole([part["weights"] for part in iteration]))
    return answer


def _whole(parts: list[Tensors]) -> Tensors:
    """Join the tensors of all tensor-parallel ranks, along the dimension that their layer partitions."""
    if len(parts) == 1:
        return parts[0]
    across = ("linear_proj.weight", "linear_fc2.weight")  # cut by input
    columns = ("linear_qkv.weight", "linear_qkv.bias", "linear_fc1.weight", "linear_fc1.bias")
    along = ("word_embeddings.weight", *columns)
    joined = {}
    for name, first in parts[0].items():
        cut = 1 if name.endswith(across) else 0 if name.endswith(along) else None
        joined[name] = first if cut is None else torch.cat([part[name] for part in parts], cut)
    return joined


# -- what is told ---------------------------------------------------------------------------------


def _distance(found: Tensors, expected: Tensors) -> float:
    """Return the norm of the difference over all tensors, relative to the norm of the expected ones."""
    squares = [(found[name].double() - tensor.double()).square().sum() for name, tensor in expected.items()]
    return float(torch.stack(squares).sum().sqrt()) / _norm(expected)


def _norm(tensors: Tensors) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors.values()]).sum().sqrt())


def _runs(kept: Mapping[str, Kept]) -> list[dict[str, Any]]:
    truth, rows = kept[TRUTH], []
    for name, run in kept.items():
        if name in (TRUTH, TRUTH_BF16) or "epsilon" in name:
            continue
        first, expected = run.gradients[0], kept[TRUTH_BF16 if "bf16" in name else TRUTH].gradients[0]
        rows.append(
            {
                "run": name,
                "gradient": _distance(first, expected),
                "rounded": _distance({key: each.bfloat16() for key, each in first.items()}, expected),
                "loss": equal._deviation(run.losses, truth.losses),
                "norm": equal._deviation(run.norms, truth.norms),
            }
        )
    return rows


def _weight(kept: Mapping[str, Kept]) -> dict[str, Any]:
    """Return the weight whose first update differs most between NPU and CPU."""
    cpu, npu, truth = kept["cpu fp32"], kept["npu fp32"], kept[TRUTH]
    differences = {
        name: (npu.weights[1][name].double() - after.double()).abs() for name, after in cpu.weights[1].items()
    }
    name = max(differences, key=lambda each: float(differences[each].max()))
    at = int(differences[name].argmax())

    def told(run: Kept) -> dict[str, float]:
        before, after = (weights[name].flatten()[at].double() for weights in run.weights[:2])
        return {"gradient": float(run.gradients[0][name].flatten()[at]), "update": float(after - before)}

    sides = {"cpu": cpu, "npu": npu, TRUTH: truth}
    return {
        "name": name,
        "weights": sum(tensor.numel() for tensor in cpu.weights[0].values()),
        "moved otherwise by 1e-6": sum(int((each > 1e-6).sum()) for each in differences.values()),
        **{side: told(run) for side, run in sides.items()},
    }


def _epsilon(kept: Mapping[str, Kept]) -> dict[str, float]:
    pairs = {"1e-8": "", "1e-5": ", epsilon"}
    return {
        value: equal._deviation(kept[f"npu fp32{suffix}"].norms, kept[f"cpu fp32{suffix}"].norms)
        for value, suffix in pairs.items()
    }


def _seeds(folder: Path, seeds: tuple[int, ...]) -> list[dict[str, Any]]:
    """Train the model of tests/distributed/test_switches.py in bf16 with each seed; return the rows."""
    if not seeds:
        return []
    length = "--attention-dropout 0 --hidden-dropout 0 --train-iters 20 --log-interval 1 --eval-iters 0"
    flags = [*tiny.flags_for(folder / "numbers"), *length.split(), "--no-plot"]
    group = equal.Group("0.16.1", "cpu", "fp32")
    curves: dict[str, equal.Curve] = {}
    for processes, switches in SWITCHES.items():
        cases = {
            f"{name} {seed}": [*flags, *words.split(), "--seed", str(seed)]
            for seed in seeds
            for name, words in switches.items()
        }
        curves |= equal._started(group, cases, folder, processes)
    return [
        {
            "layout": name,
            "deviations": [
                equal._deviation(curves[f"{name} {seed}"].losses, curves[f"fp32 {seed}"].losses)
                for seed in seeds
            ],
        }
        for name in [*SWITCHES[1], *SWITCHES[2]]
        if name != "fp32"
    ]


# -- in the process that trains -------------------------------------------------------------------


def _work(spec: Path) -> int:
    import torch.distributed as dist

    from megatron_npu import devices, plugin
    from megatron_npu.pretrain.flags import arguments
    from megatron_npu.pretrain.run import initialize, loop, pretrain

    told = json.loads(spec.read_text())
    plugin.install()
    rank = int(os.environ.get("RANK", "0"))
    if "RANK" in os.environ:
        devices.current().set_current(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(devices.current().backend)
    initialize.silence_known_warnings()
    if told["fp64"]:
        _compute_in_fp64()
    if told["rounded"]:
        loop.Trainer.run = _from_rounded_weights(loop.Trainer.run)  # type: ignore[method-assign,assignment]
    if told["reduced"]:
        _reduce_in_fp32()
    kept: list[dict[str, Tensors]] = []

    def keep(iteration: int, chunks: Any) -> None:
        if iteration > 2:
            return
        named = {name.replace("module.", ""): each for name, each in chunks[0].named_parameters()}
        shards = _shards(chunks[0], named)
        if shards:
            kept.append({"gradients": shards, "weights": {}})
            return
        kept.append(
            {
                "gradients": {name: each.main_grad.detach().cpu().clone() for name, each in named.items()},
                "weights": {name: each.detach().cpu().clone() for name, each in named.items()},
            }
        )

    words = [*told["words"], "--json-log", f"{told['out']}.jsonl"]
    pretrain.train(arguments.parse(words), on_gradients=keep)
    torch.save(kept, f"{told['out']}.{rank}.pt")
    return 0


def _reduce_in_fp32() -> None:
    """Let torch's FSDP sum the ranks' gradients in fp32; what it keeps of them is bf16 all the same."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel as upstreams
    from torch.distributed.fsdp import MixedPrecisionPolicy

    shard, policy = upstreams.fully_shard, MixedPrecisionPolicy(reduce_dtype=torch.float32)
    upstreams.fully_shard = functools.partial(shard, mp_policy=policy)


def _shards(chunk: Any, named: Mapping[str, Any]) -> Tensors:
    """Return the whole gradients of a model in either FSDP, from all ranks' shards; else nothing."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    shapes = {name: each.shape for name, each in named.items()}
    buffer = getattr(getattr(chunk, "module", None), "param_and_grad_buffer", None)
    if buffer is not None:  # Megatron's, whose sharded parameters lie beside the model
        sharded = {name.replace("module.", ""): each for name, each in buffer.optimizer_named_parameters}
        shapes = {name: each.orig_param.shape for name, each in sharded.items()}
    elif all(isinstance(each, DTensor) for each in named.values()):
        sharded = dict(named)
    else:
        return {}
    own = {
        name: torch.zeros(0) if each.grad is None else each.grad.to_local().flatten().float().cpu()
        for name, each in sharded.items()
    }
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return {name: torch.cat([part[name] for part in parts]).view(shape) for name, shape in shapes.items()}


def _from_rounded_weights(run: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def rounding(trainer: Any) -> Any:
        for chunk in trainer.state.model:
            for parameter in chunk.parameters():
                parameter.data.copy_(parameter.data.bfloat16())
        return run(trainer)

    return rounding


def _compute_in_fp64() -> None:
    """Replace fp32 with fp64 wherever the trainer, megatron-core and our operations name it."""
    import megatron.core.optimizer.optimizer as upstreams

    from megatron_npu.pretrain.model import gpt

    cast, norm = torch.Tensor.to, torch.linalg.vector_norm

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        args = tuple(torch.float64 if each is torch.float32 else each for each in args)
        if kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        return cast(self, *args, **kwargs)

    def vector_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        return norm(*args, **{name: value for name, value in kwargs.items() if name != "dtype"})

    def clip(parameters: Any, max_norm: float, total_norm: Any, *rest: Any, **more: Any) -> None:
        factor = min(1.0, max_norm / (float(total_norm) + 1e-6))
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    gpt.dtype = lambda args: torch.float64
    torch.Tensor.float = lambda self, *args, **kwargs: self.double()  # type: ignore[method-assign]
    torch.Tensor.to = to  # type: ignore[method-assign,assignment]
    torch.linalg.vector_norm = vector_norm
    upstreams.clip_grad_by_total_norm_fp32 = clip


if __name__ == "__main__":
    sys.exit(main())
