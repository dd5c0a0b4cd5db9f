"""Every stack of switches that is allowed, 20 steps each, against plain torch; its table is in the docs.

``every_stack.py --device cpu --ranks 2 --json FILE``; on simulated NPUs behind ``megatron-npu sim --devices
2 --``. It takes long: the suite runs a sample (``stacks.py``). The file is written anew after every stack, in
an order that is drawn: one that is ended early has seen some of everything, and ``--go-on`` does the rest.
Each stack has its day and the last commit that changed the package; ``--go-on`` runs those of other commits
once more, those that are missing first, then the oldest.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

KIND = "user"


def allowed(device: str, ranks: int) -> list[dict[str, Any]]:
    """Return the stacks for a user's model that nothing refuses on this device.

    One rank has nothing to share out: of the sharding words it takes two.
    """
    from megatron_npu.base.errors import UsageError
    from megatron_npu.options.switch_rules import Place, refuse
    from megatron_npu.options.switches import SHARDINGS, Switches

    words = {
        "sharding": SHARDINGS if ranks > 1 else ("none", "zero-3"),
        "mixed_precision": (None, "bf16", "fp16"),
        "cpu_offload": (False, True),
        "checkpoint_activations": (False, True),
        "graph_optimization": (False, True),
        "fused_ops": (False, True),
        "lora_rank": (0, 4),
    }
    found = []
    for row in itertools.product(*words.values()):
        given = {name: value for name, value in zip(words, row, strict=True) if value}
        try:
            refuse(Switches(**given), Place("user", device))
        except UsageError:
            continue
        found.append(given)
    random.Random(0).shuffle(found)
    return found


def main() -> int:
    """Fork the ranks; return the worst of their results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "npu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--go-on", action="store_true", help="leave out what the file has of this code")
    parser.add_argument("--only", nargs="+", help="stacks with one of these words: graph_optimization ...")
    args = parser.parse_args()
    args.commit = code()
    import peft  # noqa: F401

    import megatron_npu.finetune.model.prepare  # noqa: F401

    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(args.ranks):
            process = os.fork()
            if process == 0:
                end = 1
                try:
                    be_a_rank(args, rank, Path(folder))
                    end = 0
                except BaseException:
                    traceback.print_exc()
                os._exit(end)
            processes.append(process)
        return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes)


def be_a_rank(args: argparse.Namespace, rank: int, folder: Path) -> None:
    """Try every stack; rank 0 writes what comes of it."""
    import torch
    import torch.distributed as dist

    from tests.support import stacks

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)}
    here = torch.device(args.device)
    if args.device != "cpu":
        getattr(torch, args.device).set_device(rank)
        here = torch.device(args.device, rank)
    backend = {"cpu": "gloo", "npu": "cpu:gloo,npu:hccl", "cuda": "cpu:gloo,cuda:nccl"}[args.device]
    store = dist.FileStore(str(folder / "store"), args.ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=args.ranks)
    every = {stacks.title("", words).strip() or "none": words for words in allowed(args.device, args.ranks)}
    known = json.loads(args.json.read_text())["stacks"] if args.go_on and args.json.is_file() else {}
    known = {title: known[title] for title in every if title in known}
    dist.barrier()
    left = in_turn(every, known, args.commit, args.only)
    for number, title in enumerate(left, 1):
        known[title] = attempt(every[title], here) | {"date": today(), "commit": args.commit}
        if rank == 0:
            print(f"{number}/{len(left)} {title}: {known[title]}", flush=True)
            write(args, known, len(every))
    dist.destroy_process_group()


def in_turn(every: Iterable[str], known: dict[str, Any], commit: str, only: list[str] | None) -> list[str]:
    """Return the titles of those to run: those that are missing first, then of other commits the oldest.

    Of one day those in fp32 come first, of which more digits are asked.
    """
    left = [title for title in every if not only or set(only) & set(title.replace("=", " ").split())]
    left = [title for title in left if title not in known or known[title]["commit"] != commit]
    dates = {title: known[title]["date"] if title in known else "" for title in left}

    def turn(title: str) -> tuple[object, ...]:
        date = dates[title]
        return bool(date), date[:1].isdigit(), date, "mixed_precision" in title

    return sorted(left, key=turn)


def code() -> str:
    """Return the last commit that changed the package, in short; with a + where files differ from it."""
    git = ["git", "-C", str(ROOT)]
    commit, changed = (
        subprocess.run(
            [*git, *words, "--", "megatron_npu"], timeout=60, capture_output=True, text=True, check=True
        )
        for words in (("log", "-1", "--format=%h"), ("status", "--porcelain"))
    )
    return commit.stdout.strip() + ("+" if changed.stdout else "")


def today() -> str:
    """Return the day."""
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def attempt(words: dict[str, Any], here: Any) -> dict[str, Any]:
    """Return {"error": the largest relative difference from plain torch's losses}, or {"failed": why}."""
    import torch

    from megatron_npu.options.switches import Switches
    from tests.support import stacks, train_script

    torch.compiler.reset()
    expected = plain(words.get("lora_rank", 0))
    try:
        losses = train_script.run(KIND, Switches(**words), stacks.STEPS, here)
    except Exception:
        return {"failed": traceback.format_exc(limit=-4)}
    pairs = zip(losses, expected, strict=True)
    return {"error": max(abs(loss - right) / abs(right) for loss, right in pairs)}


_expected: dict[int, list[float]] = {}


def plain(lora_rank: int) -> list[float]:
    """Return the losses of plain torch in this process, made once."""
    from tests.support import stacks, train_script

    if lora_rank not in _expected:
        _expected[lora_rank] = train_script.plain(KIND, stacks.STEPS, lora_rank)
    return _expected[lora_rank]


def write(args: argparse.Namespace, known: dict[str, Any], every: int) -> None:
    """Write what is known so far."""
    import torch

    from megatron_npu.base import files
    from tests.support import stacks

    found = {
        "device": args.device,
        "simulated": args.device == "npu",
        "ranks": args.ranks,
        "steps": stacks.STEPS,
        "torch": torch.__version__,
        "every": every,
        "stacks": known,
    }
    files.write(args.json, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
