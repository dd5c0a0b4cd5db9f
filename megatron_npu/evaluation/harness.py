"""Implement ``megatron-npu evaluate``, which runs lm-eval with the model ``megatron_npu``.

The rest of the command line is lm-eval's own. lm-eval releases that read the entry points ``lm_eval.models``
do not need this command; 0.4.13 does not read them.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
import time
import traceback
from collections.abc import Iterator
from typing import Any

from megatron_npu import plugin
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from megatron_npu.base.installed_packages import is_installed
from megatron_npu.evaluation import lm_eval_files, whole_results
from megatron_npu.pretrain.report import wandb_run
from megatron_npu.process import python_child

MODEL = "megatron_npu"  # as pyproject.toml names the entry point
TARGET = "megatron_npu.evaluation.lm_eval_model:MegatronNpu"
_CLOCKS = 60  # seconds that the clock of a shared disk may differ
_CHECKING = ("lm_eval.config", "lm_eval._cli", "lm_eval.tasks")  # which reject what the user has given
_REJECTING = (ValueError, TypeError, LookupError, OSError, ImportError)
_USAGE = """%(prog)s ARGUMENTS...
       torchrun --nproc-per-node N -m megatron_npu evaluate ARGUMENTS..."""
_DESCRIPTION = """Run lm-eval (pip install 'megatron_npu[eval]') on this machine's device, with
--model megatron_npu or lm-eval's own megatron_lm. ARGUMENTS are the arguments of `lm_eval`:
--model megatron_npu --model_args load=DIR --tasks NAME... See docs/how-to/evaluation.md."""


def parser() -> argparse.ArgumentParser:
    """Return a parser that is used only to print the help text.

    lm-eval itself parses all arguments.
    """
    return Parser("megatron-npu evaluate", description=_DESCRIPTION, usage=_USAGE)


def main(argv: list[str]) -> int:
    """Run lm-eval, and return its exit code.

    Raises:
        UsageError: lm-eval is not installed, or another user can write to code that it would execute, or to
            settings that send the account's key of Weights & Biases elsewhere; or lm-eval rejects its input.
    """
    if argv[:1] in (["-h"], ["--help"]):
        parser().parse_args(argv[:1])
    if not is_installed("lm_eval"):
        raise UsageError(
            "lm-eval 0.4.13 or later is required, but it is not installed. Install it: pip install lm-eval"
        )
    asked = lm_eval_files.given(argv)
    lm_eval_files.require_requests_folder(asked)
    lm_eval_files.require_own_code(asked)
    if asked.wandb_args:
        wandb_run.tell_of_server("--wandb_args")
    is_first = os.environ.get("RANK", "0") == "0"  # which alone writes
    if is_first:
        lm_eval_files.require_place(asked)
    since = time.time() - _CLOCKS
    plugin.install()  # for --model megatron_lm, which imports Megatron itself
    import lm_eval.models  # noqa: F401  # fills the registry
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry
    from lm_eval.loggers import evaluation_tracker

    if MODEL not in model_registry:
        model_registry.register(MODEL, target=TARGET)
    sys.argv = ["lm_eval", *argv]
    _guard_metrics()
    _guard_children()
    with whole_results.writing_whole(evaluation_tracker) as lost, _telling_of_input():
        code = cli_evaluate() or 0
    if not lost and not code and is_first and asked.output_path is not None:
        lost += filter(None, [lm_eval_files.why_lost(asked.output_path, since)])
    for line in lost:
        print(f"megatron-npu evaluate: error: {line}", file=sys.stderr)
    return code or (1 if lost else 0)


@contextlib.contextmanager
def _telling_of_input() -> Iterator[None]:
    """Raise a ``UsageError`` in place of the errors with which lm-eval rejects arguments and tasks.

    Errors from other parts of lm-eval, and from other packages, keep their tracebacks.
    """
    try:
        yield
    except _REJECTING as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not frame.f_globals.get("__name__", "").startswith(_CHECKING):
            raise
        words = " ".join(str(error).split())
        raise UsageError(
            f"lm-eval rejects its arguments or a task ({type(error).__name__}: {words})",
            remedy="Correct the command line, the run file or the task; see `lm_eval run --help`.",
        ) from error


def _guard_metrics() -> None:
    """Let ``evaluate.load``, which lm-eval calls for metrics not its own, check what it would run."""
    try:
        import evaluate
    except ImportError:  # lm-eval says so where it needs it
        return
    load = evaluate.load

    @functools.wraps(load)
    def checked(path: str, *arguments: Any, **options: Any) -> Any:
        try:
            lm_eval_files.require_own_metric(path)
        except UsageError as error:  # lm-eval would only log it, and fail later
            print(f"megatron-npu evaluate: error: {error}", file=sys.stderr)
            raise SystemExit(2) from None
        return load(path, *arguments, **options)

    evaluate.load = checked


def _guard_children() -> None:
    """Let the Python programs that lm-eval starts ignore modules in the working directory.

    To describe the machine, it runs ``python -m pip``, which prefers modules in the working directory.
    """
    os.environ["PYTHONSAFEPATH"] = "1"  # since Python 3.11
    os.environ["PYTHONPATH"] = python_child.search_path()
