"""``megatron-npu checkpoint``: list, verify and prune a folder of checkpoints."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base import errors, files
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
    """Run the command, and return its exit code.

    The code is 1 if a checkpoint is damaged.

    Raises:
        UsageError: the arguments or the folder are invalid.
    """
    args = _parser().parse_args(argv)
    if args.action == "gather":
        return _gather(args.directories, Path(args.into), args.ckpt_step)
    if not Path(args.directory).is_dir():
        raise UsageError(
            f"the directory {args.directory} does not exist; it must be the folder that was passed to --save",
            remedy="Correct the path.",
        )
    root, step = args.directory, getattr(args, "ckpt_step", None)
    actions: dict[str, Callable[[], int]] = {
        "list": lambda: _list(root),
        "inspect": lambda: _inspect(root, step, as_json=args.json),
        "verify": lambda: _verify(root, step),
        "prune": lambda: _prune(root, args.keep, args.keep_every, dry_run=args.dry_run),
        "sum": lambda: _sum(root, step),
    }
    return actions[args.action]()


def _parser() -> Parser:
    parser = Parser(
        "megatron-npu checkpoint",
        __doc__,
        epilog="exit code: 0: success; 1: a file is damaged or missing; 2: bad usage",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("list", "list the checkpoints with iteration, size and state"),
        ("inspect", "show the position, layout, model and files of one checkpoint"),
        ("verify", "compare files with their checksums"),
        ("sum", "write checksums for checkpoints that lack them, such as those of stock scripts"),
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
        help="one folder per machine: the folder that --save names on that machine, mounted or copied here",
    )
    action.add_argument(
        "--into", required=True, metavar="DIR", help="folder to create for the joined checkpoint"
    )
    action.add_argument(
        "--ckpt-step", type=whole, metavar="N", help="iteration to join (default: the newest)"
    )


def _list(root: str) -> int:
    latest = checkpoint_files.newest(root)
    faults = 0
    for path in _places(root):
        found = _faults(path)
        faults += bool(found)
        state = "damaged" if found else _state(path, "no checksums")
        mark = "  <- latest" if path == latest else ""
        _say(f"{path.name}  {_size(path):>15,} bytes  {state}{mark}")
    for path in checkpoint_files.unfinished(root):
        print(f"{path.name}  {_size(path):>15,} bytes  unfinished")
    if latest is None:
        print(f"megatron-npu checkpoint list: {root} contains no checkpoint", file=sys.stderr)
    return 1 if faults else 0


def _inspect(root: str, step: int | None, *, as_json: bool) -> int:
    from megatron_npu.pretrain.checkpoint import stock_checkpoints

    path = checkpoint_files.newest(root, step)
    if path is not None and (path / checkpoint_files.DESCRIPTION_OF_TRAIN).is_file():
        found = _of_train(path)
    else:
        found = stock_checkpoints.existing(root, step)
    values = {name: value for name, value in vars(found).items() if name not in ("arguments", "path")}
    given = found.arguments
    shown = given if as_json else {name: given[name] for name in _SHOWN if given.get(name) is not None}
    sizes = {path.name: path.stat().st_size for path in sorted(found.path.iterdir()) if path.is_file()}
    report: dict[str, Any] = {"path": str(found.path), **values, "faults": _faults(found.path)}
    if as_json:
        print(json.dumps({**report, "arguments": shown, "files": sizes}, indent=1, default=str))
    else:
        _print_inspected({**report, **shown}, sizes)
    return 1 if report["faults"] else 0


def _print_inspected(report: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    for name, value in report.items():
        told = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
        _say(f"{name:<32} {told}")
    for name, size in sizes.items():
        _say(f"{size:>15,} bytes  {name}")


def _say(line: str) -> None:
    """Print a line that quotes a checkpoint, which another user may have written."""
    print(errors.printable(line))


def _of_train(path: Path) -> checkpoint_description.CheckpointInfo:
    """Return the description that ``megatron-npu train`` stored in a checkpoint.

    Raises:
        UsageError: the description cannot be read.
    """
    description = path / checkpoint_files.DESCRIPTION_OF_TRAIN
    try:
        found = json.loads(files.text(description))
        checkpoint_description.require_known_format(description, found)
        iteration, arguments = int(found["iteration"]), dict(found["arguments"])
        samples = iteration * int(arguments.get("global_batch_size") or 0)
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"{description} is not a description file that `megatron-npu train` wrote: {error}",
            remedy="Use another checkpoint.",
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


def _sum(root: str, step: int | None) -> int:
    for path in _asked_for(root, step):
        if (path / checksums.NAME).is_file():
            continue
        checksums.write(path)
        print(f"{path.name}: checksums written")
    return 0


def _asked_for(root: str, step: int | None) -> list[Path]:
    if step is None:
        return list(_places(root))
    place = checkpoint_files.newest(root, step)
    return [place] if place else []


def _verify(root: str, step: int | None) -> int:
    damaged = 0
    if not (places := _asked_for(root, step)):
        raise _nothing_in(root)
    for path in places:
        faults = _faults(path)
        damaged += bool(faults)
        for fault in faults or [_state(path, "no checksums to compare with")]:
            _say(f"{path.name}: {fault}")
    return 1 if damaged else 0


def _nothing_in(folder: str) -> UsageError:
    return UsageError(
        f"{folder} contains no checkpoint; it must be the folder that was passed to --save",
        remedy="Correct the path.",
    )


def _gather(directories: Sequence[str], into: Path, step: int | None) -> int:
    parts = []
    for directory in directories:
        place = checkpoint_files.newest(directory, step) if Path(directory).is_dir() else None
        if place is None:
            raise _nothing_in(directory)
        parts.append(place)
    place, count = gather.join(parts, into)
    name = place.name.removeprefix("iter_")
    files.write(into / checkpoint_files.TRACKER, f"{int(name) if name.isdecimal() else name}\n")
    print(f"{place}: complete, {count} files from {len(parts)} parts, {_size(place):,} bytes")
    return 0


def _state(path: Path, without: str) -> str:
    """Return the printed state of an undamaged checkpoint.

    Without checksums, the state is ``without``.
    """
    state = "whole" if (path / checksums.NAME).is_file() else without
    part = disks.told(path)
    return f"{part} (its own files: {state})" if part else state


def _prune(root: str, keep: int, keep_every: int | None, *, dry_run: bool) -> int:
    """Remove checkpoints that are older than the newest undamaged checkpoints.

    Damaged checkpoints are not counted among those to keep.
    """
    damaged: list[Path] = []

    def is_whole(path: Path) -> bool:
        faults = _faults(path)
        if faults:
            damaged.append(path)
            _say(f"{path.name} is damaged and is not counted toward --keep: {'; '.join(faults)}")
        return not faults

    for path in whole_checkpoints.surplus(root, keep, keep_every, is_whole):
        link = f"  only the link; {path.resolve()} is kept" if path.is_symlink() else ""
        size = 0 if link else _size(path)
        _say(f"{'would remove' if dry_run else 'removed'} {path.name}  {size:,} bytes{link}")
        if not dry_run:
            removal.remove(path)
    return 1 if damaged else 0


def _places(root: str) -> Iterator[Path]:
    for iteration in checkpoint_files.iterations(root):
        yield checkpoint_files.directory(root, iteration)
    release = Path(root) / checkpoint_files.RELEASE
    if release.is_dir():
        yield release


def _faults(path: Path) -> list[str]:
    """Return the problems of a checkpoint: damaged files, and missing files."""
    is_own = (path / checkpoint_files.DESCRIPTION).is_file()
    missing = checkpoint_files.missing(path) if is_own else _missing_of_others(path)
    return sorted({*(f"{name} is missing" for name in missing), *checksums.damaged(path)})


def _missing_of_others(path: Path) -> list[str]:
    """Return the missing files of a checkpoint that `train` or a stock script has saved.

    Both write the index last.
    """
    if not any(path.iterdir()):
        return ["everything"]
    shards = (path / checkpoint_files.DESCRIPTION_OF_TRAIN).is_file() or any(path.glob("*.distcp"))
    return [checkpoint_files.INDEX] if shards and not (path / checkpoint_files.INDEX).is_file() else []


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
