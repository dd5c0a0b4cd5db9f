"""Check that results of an lm-eval run can be written, and that no other user can change its caches.

The results are checked because lm-eval only warns if it cannot write them, and still ends with exit code 0.
The caches are checked because they are pickles, which execute code when they are read.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import whole_results

_CACHE_VARIABLE = "LM_HARNESS_CACHE_PATH"  # of --cache_requests


def given(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options for files in the command line of lm-eval."""
    parser = argparse.ArgumentParser("lm_eval", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--output_path", "-o", type=Path)
    parser.add_argument("--use_cache", "-c")
    try:
        return parser.parse_known_args(argv)[0]
    except argparse.ArgumentError:  # lm-eval says what is wrong with it
        return argparse.Namespace(output_path=None, use_cache=None)


def require(asked: argparse.Namespace) -> None:
    """Check the output and cache folders before an evaluation that may take hours.

    Raises:
        UsageError: results cannot be written, or another user can write to a cache or owns it.
    """
    for path in _caches(asked.use_cache):
        _require_own(path)
    if asked.output_path is None:
        return
    place = _folder(asked.output_path).absolute()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    reason = files.refusal(there) if there.is_dir() else "it is not a folder"
    if reason:
        raise UsageError(
            f"--output_path {asked.output_path} must be a writable folder, or a .json file in one, but "
            f"{there} cannot be written ({reason}). Use another path; otherwise lm-eval would run the "
            "evaluation and lose the results."
        )
    whole_results.remove_abandoned(place)


def why_lost(output_path: Path, since: float) -> str:
    """Return the reason why a run that ended normally has no results.

    The text is empty if there are results.

    Args:
        output_path: the value of lm-eval's option.
        since: the start of the run, in seconds on the file system's clock.
    """
    pattern = f"{output_path.stem}_*.json" if output_path.suffix == ".json" else "*/results_*.json"
    written = [path for path in _folder(output_path).glob(pattern) if path.stat().st_mtime >= since]
    if not written:
        return f"no results were written to {output_path}; see lm-eval's log above"
    newest = max(written, key=lambda path: path.stat().st_mtime)
    try:
        json.loads(newest.read_bytes())
    except ValueError:
        return f"{newest} is incomplete; is the disk full?"
    return ""


def _folder(output_path: Path) -> Path:
    return output_path.parent if output_path.suffix == ".json" else output_path


def _caches(prefix: str | None) -> Iterator[Path]:
    """Yield the caches that a run would read: one database per process, and the cached requests of tasks."""
    if prefix is not None:
        path = Path(prefix)
        yield from path.parent.glob(f"{path.name}_rank*.db")
    if place := os.environ.get(_CACHE_VARIABLE):
        yield Path(place)
        yield from Path(place).glob("*.pickle")


def _require_own(path: Path) -> None:
    if wrong := files.others(path):
        raise UsageError(
            f"the cache {path} {wrong}, but only this user may have write access to it, because "
            "lm-eval executes the code in it. Remove the cache; or, if you know what it "
            f"contains, run chmod go-w on it; or use another --use_cache or {_CACHE_VARIABLE}."
        )
