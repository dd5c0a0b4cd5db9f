"""``megatron-npu checkpoint``: list, verify and prune a folder of checkpoints."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.arg_parser import Parser, positive, whole
from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, disks, gather, removal
from megatron_npu.pretrain.checkpoint import (
    checkpoint_description,
    checkpoint_files,
    whole_checkpoints,
)

_SHOWN = (  # of the arguments
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "world_size"),
    *("expert_model_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers", "hidden_size", "num_attention_heads", "seq_length", "padded_vocab_size"),
    *("num_experts", "moe_router_topk"),
    *("global_batch_size", "train_iters", "bf16", "fp16", "use_distributed_optimizer", "tokenizer_type"),
    *("task", "user_script", "pretrained_model_name_or_path", "data_path", "data_name"),  # of `train`
    *("mixed_precision", "sharding", "cpu_offload", "lora_rank"),
)


def main(argv: Sequence[str]) -> int:
    """Run the command; return its exit code (1 if a checkpoint is damaged).

    Raises:
        UsageError: bad input.
    """
    args = _parser().parse_args(argv)
    if args.action == "gather":
        return _gather(args)
    if not Path(args.directory).is_dir():
        raise UsageError(
            f"{args.directory}: no such directory",
            "the folder that was passed to --save",
            "Correct the path.",
        )
    return {"list": _list, "inspect": _inspect, "verify": _verify, "prune": _prune, "sum": _sum}[args.action](
        args
    )


def _parser() -> Parser:
    parser = Parser(
        "megatron-npu checkpoint",
        __doc__,
        epilog="exit code: 0; 1: a file is damaged or missing; 2: bad usage",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("list", "list the checkpoints: iteration, bytes, state"),
        ("inspect", "show one checkpoint: position, layout, model, files"),
        ("verify", "compare files with their checksums"),
        ("sum", "write checksums for checkpoints without them, such as a stock script's"),
        ("prune", "remove old checkpoints"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("directory", metavar="DIR", help="folder given to --save")
        if name in ("inspect", "verify", "sum"):
            action.add_argument("--ckpt-step", type=whole, metavar="N", help="check only this iteration")
        if name == "inspect":
            action.add_argument(
                "--json", action="store_true", help="print one JSON object with all arguments"
            )
        if name == "prune":
            action.add_argument(
                "--keep", type=positive, required=True, metavar="N", help="keep the newest N checkpoints"
            )
            action.add_argument(
                "--keep-every",
                type=positive,
                metavar="M",
                help="also keep each checkpoint whose iteration is a multiple of M",
            )
            action.add_argument(
                "--dry-run", action="store_true", help="print what would be removed, and remove nothing"
            )
    _add_gather(actions)
    return parser


def _add_gather(actions: Any) -> None:
    text = "join the parts that --save-per-machine left on each machine into one checkpoint"
    action = actions.add_parser("gather", help=text, description=text)
    action.add_argument(
        "directories",
        nargs="+",
        metavar="DIR",
        help="folder given to --save, once per machine (mounted or copied)",
    )
    action.add_argument(
        "--into", required=True, metavar="DIR", help="folder to create for the joined checkpoint"
    )
    action.add_argument(
        "--ckpt-step", type=whole, metavar="N", help="iteration to join (default: the newest)"
    )


def _list(args: Namespace) -> int:
    latest = checkpoint_files.newest(args.directory)
    faults = 0
    for path in _places(args.directory):
        found = _faults(path)
        faults += bool(found)
        state = "damaged" if found else _state(path, "no checksums")
        mark = "  <- latest" if path == latest else ""
        print(f"{path.name}  {_size(path):>15,} bytes  {state}{mark}")
    for path in checkpoint_files.unfinished(args.directory):
        print(f"{path.name}  {_size(path):>15,} bytes  unfinished")
    return 1 if faults else 0


def _inspect(args: Namespace) -> int:
    from megatron_npu.pretrain.checkpoint import stock_checkpoints

    path = checkpoint_files.newest(args.directory, args.ckpt_step)
    if path is not None and (path / checkpoint_files.DESCRIPTION_OF_TRAIN).is_file():
        found = _of_train(path)
    else:
        found = stock_checkpoints.existing(args.directory, args.ckpt_step)
    values = {name: value for name, value in vars(found).items() if name not in ("arguments", "path")}
    given = found.arguments
    shown = given if args.json else {name: given[name] for name in _SHOWN if given.get(name) is not None}
    sizes = {path.name: path.stat().st_size for path in sorted(found.path.iterdir()) if path.is_file()}
    report: dict[str, Any] = {"path": str(found.path), **values, "faults": _faults(found.path)}
    if args.json:
        print(json.dumps({**report, "arguments": shown, "files": sizes}, indent=1, default=str))
    else:
        _print_inspected({**report, **shown}, sizes)
    return 1 if report["faults"] else 0


def _print_inspected(report: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, value in report.items():
        print(f"{name:<32} {', '.join(value) or 'none' if isinstance(value, list) else value}")
    print("\n".join(f"{size:>15,} bytes  {name}" for name, size in sizes.items()))


def _of_train(path: Path) -> checkpoint_description.CheckpointInfo:
    """Return the description that ``megatron-npu train`` has written with a checkpoint.

    Raises:
        UsageError: the description cannot be read.
    """
    description = path / checkpoint_files.DESCRIPTION_OF_TRAIN
    try:
        found = json.loads(description.read_text(encoding="utf-8"))
        checkpoint_description.require_known_format(description, found)
        iteration, arguments = int(found["iteration"]), dict(found["arguments"])
        samples = iteration * int(arguments.get("global_batch_size") or 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{description}: {error}",
            "the description that `megatron-npu train` writes",
            "Use another checkpoint.",
        ) from error
    return checkpoint_description.CheckpointInfo(
        path=path,
        iteration=iteration,
        consumed_train_samples=samples,
        consumed_valid_samples=0,
        has_optimizer=True,
        has_rng=True,
        optimizer_sharding=None,  # any goes on with any
        arguments=arguments,
    )


def _sum(args: Namespace) -> int:
    for path in _asked_for(args):
        if (path / checksums.NAME).is_file():
            continue
        checksums.write(path)
        print(f"{path.name}: checksums written")
    return 0


def _asked_for(args: Namespace) -> list[Path]:
    if args.ckpt_step is None:
        return list(_places(args.directory))
    place = checkpoint_files.newest(args.directory, args.ckpt_step)
    return [place] if place else []


def _verify(args: Namespace) -> int:
    damaged = 0
    for path in _asked_for(args):
        faults = _faults(path)
        damaged += bool(faults)
        for fault in faults or [_state(path, "no checksums to compare with")]:
            print(f"{path.name}: {fault}")
    return 1 if damaged else 0


def _gather(args: Namespace) -> int:
    parts = []
    for directory in args.directories:
        place = checkpoint_files.newest(directory, args.ckpt_step) if Path(directory).is_dir() else None
        if place is None:
            raise UsageError(
                f"{directory}: no checkpoint there",
                "the folder that was passed to --save",
                "Correct the path.",
            )
        parts.append(place)
    place, count = gather.join(parts, Path(args.into))
    name = place.name.removeprefix("iter_")
    files.write(Path(args.into) / checkpoint_files.TRACKER, f"{int(name) if name.isdecimal() else name}\n")
    print(f"{place}: complete, {count} files of {len(parts)} parts, {_size(place):,} bytes")
    return 0


def _state(path: Path, without: str) -> str:
    """Return the state to print for an undamaged checkpoint; ``without`` is the state without checksums."""
    state = "whole" if (path / checksums.NAME).is_file() else without
    part = disks.told(path)
    return f"{part} (its own files: {state})" if part else state


def _prune(args: Namespace) -> int:
    """Remove the checkpoints that are older than the newest undamaged ones; damaged ones do not count."""
    damaged: list[Path] = []

    def is_whole(path: Path) -> bool:
        faults = _faults(path)
        if faults:
            damaged.append(path)
            print(f"{path.name} is damaged and is not counted: {'; '.join(faults)}")
        return not faults

    for path in whole_checkpoints.surplus(args.directory, args.keep, args.keep_every, is_whole):
        link = f"  a link; {path.resolve()} stays" if path.is_symlink() else ""
        size = 0 if link else _size(path)
        print(f"{'would remove' if args.dry_run else 'removed'} {path.name}  {size:,} bytes{link}")
        if not args.dry_run:
            removal.remove(path)
    return 1 if damaged else 0


def _places(root: str) -> Iterator[Path]:
    for iteration in checkpoint_files.iterations(root):
        yield checkpoint_files.directory(root, iteration)
    release = Path(root) / checkpoint_files.RELEASE
    if release.is_dir():
        yield release


def _faults(path: Path) -> list[str]:
    """Return the problems of a checkpoint: damaged files, and files missing because it was not completed."""
    is_own = (path / checkpoint_files.DESCRIPTION).is_file()
    missing = checkpoint_files.missing(path) if is_own else _missing_of_others(path)
    return sorted({*(f"{name} is missing" for name in missing), *checksums.damaged(path)})


def _missing_of_others(path: Path) -> list[str]:
    """Return the missing files of a checkpoint by `train` or a stock script; both write the index last."""
    if not any(path.iterdir()):
        return ["everything"]
    shards = (path / checkpoint_files.DESCRIPTION_OF_TRAIN).is_file() or any(path.glob("*.distcp"))
    return [checkpoint_files.INDEX] if shards and not (path / checkpoint_files.INDEX).is_file() else []


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
