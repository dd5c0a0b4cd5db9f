"""Check the files of an lm-eval run: results must be writable, and code safe from other users.

The results are checked because lm-eval only warns if it cannot write them, and still ends with exit code 0.
Caches are checked because they are pickles, which execute code when they are read; tasks because their YAML
names functions (``!function``) and contains templates that can call anything; run files because they name
caches and tasks; and metrics because they are scripts. lm-eval looks for tasks and metrics in the working
directory.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron_npu.base import files, installed_packages
from megatron_npu.base.errors import UsageError
from megatron_npu.evaluation import whole_results

_CACHE_VARIABLE = "LM_HARNESS_CACHE_PATH"  # of --cache_requests
_SWITCHES, _OTHERS = "swx", "MaLfbEv"  # lm-eval's other short options, which may stand in one word with these
_PATHS = ("output_path", "use_cache")


def given(argv: Sequence[str]) -> argparse.Namespace:
    """Return the file options in lm-eval's command line, and those in the run file that it names."""
    parser = argparse.ArgumentParser("lm_eval", add_help=False, exit_on_error=False)
    parser.add_argument("--output_path", "-o", type=Path)
    parser.add_argument("--use_cache", "-c")
    parser.add_argument("--cache_requests", nargs="?", const="true")
    parser.add_argument("--config", "-C")
    parser.add_argument("--include_path")
    parser.add_argument("--tasks", "-t", nargs="+", action="extend", default=[])
    parser.add_argument("--wandb_args", nargs="+", action="extend", default=[])
    for letter in _SWITCHES:
        parser.add_argument(f"-{letter}", action="store_true")
    for letter in _OTHERS:
        parser.add_argument(f"-{letter}")
    try:
        found = parser.parse_known_args(argv)[0]
    except argparse.ArgumentError:  # lm-eval says what is wrong with it
        return parser.parse_args([])
    for name, value in _in_run_file(found.config).items():
        if not getattr(found, name, True):
            setattr(found, name, Path(str(value)) if name in _PATHS else value)
    return found


def _in_run_file(path: str | None) -> dict[str, Any]:
    """Return the options in a run file; lm-eval says what is wrong with it.

    The file of another user, which ``require_own_code`` rejects, is not read.
    """
    if path is None:
        return {}
    import yaml

    try:
        is_own = Path(path).is_file() and not files.others(path)
        content = yaml.safe_load(Path(path).read_bytes()) if is_own else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    found = {str(name): value for name, value in content.items()} if isinstance(content, dict) else {}
    requests = found.get("cache_requests")  # lm-eval reads it as its own parser has left it
    if isinstance(requests, dict) and requests.get("cache_requests"):
        found["cache_requests"] = "true"
    return {name: value for name, value in found.items() if isinstance(value, str | list | dict)}


def require_own_code(asked: argparse.Namespace) -> None:
    """Check the code that lm-eval would execute, on every rank.

    Raises:
        UsageError: another user can write to it or owns it.
    """
    for path in _caches(asked):
        _require_own(path, "cache", f"another --use_cache or {_CACHE_VARIABLE}")
    if asked.config is not None:
        _require_own(Path(asked.config), "run file", "a copy of it")
    for path in _tasks(asked):
        _require_own(path, "task file", "a copy of it")


def require_requests_folder(asked: argparse.Namespace) -> None:
    """Check the folder of --cache_requests, to which each rank writes before it evaluates.

    Raises:
        UsageError: nothing can be written there.
    """
    if not _caches_requests(asked):
        return
    place = _requests_folder()
    there = next(path for path in (place, *place.parents) if os.path.lexists(path))
    if reason := files.refusal(there):
        raise UsageError(
            f"--cache_requests requires a folder with write permission, but {there} cannot be written "
            f"({reason})",
            remedy=f"Set {_CACHE_VARIABLE} to a folder of your own, or leave out --cache_requests.",
        )


def _caches_requests(asked: argparse.Namespace) -> bool:
    return asked.cache_requests in ("true", "refresh")


def _requests_folder() -> Path:
    """Return the folder in which lm-eval caches the requests of tasks, by default in its package."""
    if place := os.environ.get(_CACHE_VARIABLE):
        return Path(place).absolute()
    package = installed_packages.spec_of("lm_eval")
    folders = list(package.submodule_search_locations or ()) if package else []
    return Path(*folders[:1], "caching", ".cache").resolve()


def require_place(asked: argparse.Namespace) -> None:
    """Check the output folder before an evaluation that may take hours.

    Raises:
        UsageError: results cannot be written.
    """
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


def _caches(asked: argparse.Namespace) -> Iterator[Path]:
    """Yield the caches that a run would read: one database per process, and the cached requests of tasks."""
    if asked.use_cache is not None:
        path = Path(asked.use_cache)
        yield from path.parent.glob(f"{path.name}_rank*.db")
    if os.environ.get(_CACHE_VARIABLE) or _caches_requests(asked):
        place = _requests_folder()
        yield place
        yield from place.glob("*.pickle")


def _modules() -> Iterator[Path]:
    """Yield the folder in which the package ``evaluate`` keeps metrics, which it imports, and its content."""
    user = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    # as the package does; Path.expanduser would raise an error without a home directory
    home = os.path.expanduser(os.environ.get("HF_HOME") or Path(user, "huggingface"))
    place = Path(os.path.expanduser(os.environ.get("HF_MODULES_CACHE") or Path(home, "modules")))
    if place.parent.is_dir() and not place.parent.stat().st_mode & stat.S_ISVTX:
        yield place.parent
    if place.is_dir():
        yield place
        yield from place.rglob("*.py")


def _tasks(asked: argparse.Namespace) -> Iterator[Path]:
    """Yield the files and folders of tasks that are not lm-eval's own."""
    included = asked.include_path if isinstance(asked.include_path, list) else [asked.include_path]
    for folder in (Path(str(each)) for each in included if each is not None):
        yield folder
        yield from _task_files(folder)
    tasks = [asked.tasks] if isinstance(asked.tasks, str) else asked.tasks
    for name in ",".join(map(str, tasks)).split(","):
        yield from _named(name)


def _named(task: str) -> Iterator[Path]:
    """Yield the files and folders that lm-eval may load for a task of a command line."""
    for path in map(Path, glob.glob(task) if task.endswith(".yaml") else [task]):
        if path.is_file() or (path.is_dir() and any(path.glob("*.yaml"))):
            folder = path if path.is_dir() else path.absolute().parent
            yield path
            yield folder
            yield from _task_files(folder, nested=False)


def _task_files(folder: Path, nested: bool = True) -> Iterator[Path]:
    """Yield the files in a folder that lm-eval may load."""
    for pattern in ("*.yaml", "*.yml", "*.py"):
        yield from folder.rglob(pattern) if nested else folder.glob(pattern)


def require_own_metric(name: str) -> None:
    """Check a metric that lm-eval is about to load with ``evaluate``, which prefers the working directory.

    Raises:
        UsageError: it is a script of another user, or the cache of such scripts is.
    """
    path = Path(name)
    script = path / f"{path.name}.py"
    for each in [path] if path.is_file() else [path, script] if script.is_file() else []:
        _require_own(each, "metric", "another working directory")
    for each in _modules():
        _require_own(each, "cache of metrics", "another HF_MODULES_CACHE or HF_HOME")


def _require_own(path: Path, kind: str, instead: str) -> None:
    if wrong := files.others(path):
        raise UsageError(
            f"the {kind} {path} {wrong}, but only this user may have write access to it, because lm-eval "
            f"executes the code in it. Remove the {kind}; or, if you know what it contains, run chmod go-w "
            f"on it; or use {instead}."
        )
