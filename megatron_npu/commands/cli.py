"""Implement the ``megatron-npu`` command, which runs a subcommand.

Invalid input results in a one-line error and exit code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import sys
import traceback
from pathlib import Path

from megatron_npu import __version__
from megatron_npu.base import errors, files, search_paths, settings
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import inert_packages, inherited, standard_streams
from megatron_npu.patching.module_patch import DriftError
from megatron_npu.patching.pins import PinError
from megatron_npu.process import (
    collector,
    graph_cache,
    interruption,
    launcher_report,
    launchers,
    stacks,
    visible_devices,
)
from megatron_npu.upstream import stock_tools

# name -> (module:function taking the remaining arguments and returning an exit code, help). No sub-parsers,
# which ``shtab`` could complete: they would have to import all commands to run one.
COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("megatron_npu.commands.run:main", "run a stock Megatron script on this machine's device"),
    "pretrain": ("megatron_npu.pretrain.run.pretrain:main", "pre-train a GPT on megatron-core alone"),
    "train": (
        "megatron_npu.finetune.run.command:main",
        "fine-tune Transformers models, or train your own",
    ),
    "dashboard": (
        "megatron_npu.pretrain.report.dashboard.command:main",
        "serve a web dashboard of a finished or running job",
    ),
    "preprocess": ("megatron_npu.data.preprocessing.command:main", "tokenize text into Megatron's .bin/.idx"),
    "data": (
        "megatron_npu.data.preprocessing.data_command:main",
        "inspect, decode, count, merge and verify .bin/.idx",
    ),
    "generate": ("megatron_npu.generation.generate:main", "generate text from a checkpoint"),
    "serve": ("megatron_npu.serving.command:main", "serve a checkpoint over HTTP (OpenAI's API)"),
    "convert": (
        "megatron_npu.conversion.command:main",
        "convert checkpoints from and to Hugging Face",
    ),
    "lambada": ("megatron_npu.evaluation.lambada:main", "measure a checkpoint's LAMBADA accuracy"),
    "evaluate": (
        "megatron_npu.evaluation.harness:main",
        "run lm-eval on a checkpoint, without converting it",
    ),
    "checkpoint": (
        "megatron_npu.pretrain.checkpoint.checkpoint_command:main",
        "list, inspect, verify and prune checkpoints",
    ),
    "bench": (
        "megatron_npu.measuring.command:main",
        "measure the throughput and memory use of each acceleration",
    ),
    "plan": (
        "megatron_npu.planning.command:main",
        "dry-run a many-device job on this machine: memory, communication and the flags that make it fit",
    ),
    "sim": ("megatron_npu.sim.launcher:main", "run a command on simulated Ascend NPUs"),
    "doctor": ("megatron_npu.doctor.command:main", "check this machine, and print how to fix problems"),
    "patches": ("megatron_npu.commands.patches:patches", "list, check and pin the patches of Megatron"),
    "ledger": ("megatron_npu.commands.patches:ledger", "same as patches list"),
    "check": ("megatron_npu.commands.patches:check", "same as patches check"),
    "pin": ("megatron_npu.commands.patches:pin", "same as patches pin"),
}

_VERSION = ("-V", "--version")
INTERRUPTED = 130  # as shells say it: 128 and the number of SIGINT
SIGNALLED = 128  # plus the number of the signal: 143 for SIGTERM, 129 for SIGHUP
_OURS = (
    "it is declared as a dependency of megatron_npu",
    f"Run: {sys.executable} -m pip install -e . in the clone. If the package is installed for another "
    "Python, this torchrun uses the wrong one: run python -m torch.distributed.run instead.",
)
_REQUIRED = {
    **dict.fromkeys((*inert_packages.DECLARED, "packaging"), _OURS),
    "torch": (
        "this command requires it",
        "Install the build for your device (docs/reference/versions.md#which-torch). `megatron-npu check` "
        "and --help work without it.",
    ),
}
# these end at SIGTERM and SIGHUP as at Ctrl-C. The others have handlers of their own, or are ranks that a
# launcher ends: Python hears no signal while it waits for another rank
_HEAR_TERMINATION = (
    "generate",
    "lambada",
    "evaluate",
    "preprocess",
    "convert",
    "checkpoint",
    "data",
    "bench",
    "plan",
    "doctor",
)
# these let the garbage collector go on themselves, once their model is built
_BUILD_A_MODEL = ("pretrain",)
# these start a rank for each device that CUDA_VISIBLE_DEVICES lists; torch, once imported, has counted them
_START_RANKS = ("train",)
# these compute with torch, which may load graphs that it once compiled; checked before it is imported
_MAY_COMPILE = (
    "run",
    "pretrain",
    "train",
    "generate",
    "serve",
    "convert",
    "lambada",
    "evaluate",
    "bench",
    "doctor",
)
# behind these comes another's command line, whose --help is not ours
_TAKES_A_COMMAND = ("run", "plan", "sim", "evaluate")

# in this order, and doctor first: it says whether the others can work
_GROUPS = {
    "diagnose": ("doctor", "sim"),
    "train": ("plan", "run", "pretrain", "train", "dashboard", "bench"),
    "data and checkpoints": ("preprocess", "data", "convert", "checkpoint"),
    "use a checkpoint": ("generate", "serve", "lambada", "evaluate"),
    "patches of Megatron": ("patches", "ledger", "check", "pin"),
}

_END = """
options:
  -h, --help          print this help; after a command: its flags, defaults and examples
  --help=KEYWORD      after a command: only the flags about KEYWORD
  -V, --version       print the version
  --completion        print a completion script for bash and zsh: eval "$(megatron-npu --completion)"

Several processes: torchrun --nproc-per-node N -m megatron_npu COMMAND [ARGUMENTS...]
Exit codes: 0 success; 1 failure; 2 bad input; 130 Ctrl-C; 143 SIGTERM (docs/reference/exit-codes.md)
docs/reference/flags.md lists the environment variables."""

# the commands, and after one of them the flags that its --help lists
_COMPLETION = """\
[ -n "${ZSH_VERSION-}" ] && autoload -U +X bashcompinit && bashcompinit
_megatron_npu() {
    local word=${COMP_WORDS[COMP_CWORD]} flags
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "@COMMANDS@" -- "$word"))
    elif [ "${word#-}" != "$word" ]; then
        flags=$(megatron-npu "${COMP_WORDS[1]}" --help 2>/dev/null | grep -oE -- '--[A-Za-z][A-Za-z0-9_-]*')
        COMPREPLY=($(compgen -W "$flags" -- "$word" | sort -u))
    fi
}
complete -o default -F _megatron_npu megatron-npu"""


def _usage() -> str:
    width = max(map(len, COMMANDS))
    parts = ["usage: megatron-npu COMMAND [ARGUMENTS...]\n\ncommands:"]
    for title, names in _GROUPS.items():
        parts += [f"  {title}", *(f"    {name:<{width}}  {COMMANDS[name][1]}" for name in names)]
    return "\n".join([*parts, _END])


def _unknown(name: str) -> UsageError:
    near = difflib.get_close_matches(name, [*COMMANDS, "help", "--version"], n=1)
    meant = f"Did you mean {near[0]}?" if near else f"The commands are {', '.join(COMMANDS)}."
    return UsageError(f"unknown command {name!r}", remedy=f"{meant} See `megatron-npu --help`.")


def _for_absent_scripts(argv: list[str]) -> list[str]:
    """Replace ``run generate_samples_gpt.py`` with ``generate`` if the checkout lacks this script."""
    script = argv[1] if argv[0] == "run" and argv[1:] else ""
    if os.path.basename(script) != "generate_samples_gpt.py" or os.path.isfile(script):
        return argv
    print(
        f"megatron-npu run: {script} does not exist here; running `megatron-npu generate`, "
        "which accepts its flags",
        file=sys.stderr,
    )
    return ["generate", *argv[2:]]


def main(argv: list[str] | None = None) -> int:
    """Run one subcommand, and return its exit code, which is 2 for invalid input."""
    argv = sys.argv[1:] if argv is None else argv
    standard_streams.open_closed()
    _write_any_character()
    if argv[:1] == ["help"]:  # help COMMAND is COMMAND --help
        argv = [*argv[1:2], "--help"]
    code = _answer_without_command(argv)
    if code is not None:
        return code
    argv = _for_absent_scripts(argv)
    files.tighten_umask()
    _write_whole_lines()
    _search_no_folder_of_others(argv[0])
    try:
        return _run_heard(argv)
    except BrokenPipeError:
        return _reader_is_gone()
    except KeyboardInterrupt as interrupt:
        return _stopped(argv[0], interrupt)
    except Exception as error:
        ended = _ended_by(error, argv[0])
        if ended is None:
            raise
        told, code = ended
        line = f"megatron-npu {argv[0]}: error: {told}"
        launcher_report.tell(line)
        print(line, file=sys.stderr)
        return code


def _stopped(command: str, interrupt: KeyboardInterrupt) -> int:
    """Report that a signal has ended the command, and return the exit code."""
    ended_by = interrupt.number if isinstance(interrupt, interruption.TerminatedError) else None
    if int(os.environ.get("RANK", "0")) == 0:
        told = "terminated" if ended_by else "interrupted"
        print(f"megatron-npu {command}: {told}{interrupt}", file=sys.stderr)
    return SIGNALLED + ended_by if ended_by else INTERRUPTED


def _answer_without_command(argv: list[str]) -> int | None:
    """Handle requests for help or the version, and unknown commands.

    Return the exit code, or None for a known command.
    """
    if not argv or argv[0] in ("-h", "--help"):
        return _say(_usage(), 0 if argv else 2)
    if argv[0] in _VERSION or (argv[0] in COMMANDS and argv[1:2] and argv[1] in _VERSION):
        return _say(f"megatron_npu {__version__}", 0)
    if argv[0] == "--completion":
        return _say(_COMPLETION.replace("@COMMANDS@", " ".join(COMMANDS)), 0)
    if argv[0] not in COMMANDS:
        print(f"megatron-npu: error: {_unknown(argv[0])}", file=sys.stderr)
        return 2
    return None


def _run_heard(argv: list[str]) -> int:
    """Check the settings, run a command, and handle Ctrl-C."""
    if argv[0] != "doctor":  # which tells everything that is wrong, not the first thing alone
        settings.check()
    if not _asks_for_help(argv):
        stacks.print_at_crash()
        inherited.settle()
        launchers.settle(argv)
    if argv[0] in _MAY_COMPILE and not _asks_for_help(argv):
        graph_cache.claim()
        graph_cache.require_own_caches()
    try:
        with interruption.heard(), _terminable(argv[0]), _packages_for(argv):
            code = _run(argv)
            sys.stdout.flush()  # Python does so at its end, where nobody hears that a reader is gone
            return code
    except SystemExit:  # of a parser that has said its help
        sys.stdout.flush()
        raise


def _ended_by(error: Exception, command: str) -> tuple[str, int] | None:
    """Return the error message and the exit code for an error, or None if its traceback should be shown."""
    if isinstance(error, ModuleNotFoundError):
        told = _absent(error)
        return None if told is None else (str(told), 2)
    if isinstance(error, UsageError | DriftError | PinError):
        traced = command == "run" and stock_tools.blames_program(error, Path(sys.argv[0]))
        return None if traced else (str(error), 2)
    if command == "run":  # a script keeps its traceback
        return None
    if warned := inherited.cause_of(error):
        return str(warned), 2
    if errors.is_of_memory(error):
        said = f"{type(error).__name__}: {str(error).partition(chr(10))[0] or 'no details'}"
        return f"this process ran out of memory ({said}). Use less memory, or raise the limit (ulimit -v)", 1
    if not isinstance(error, OSError | RuntimeError):
        return None
    if errors.is_of_processes(error):
        return str(errors.no_processes()), 2
    line = errors.told_of_disk(error)
    return (line, 1) if line else None


def _say(text: str, code: int) -> int:
    """Print a text and return ``code``, or 1 if the text cannot be printed."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        return _reader_is_gone()
    except OSError as error:
        _drop_output()
        print(f"megatron-npu: error: {error}", file=sys.stderr)
        return 1
    return code


def _reader_is_gone() -> int:
    """Return the exit code for a closed pipe, whose reader (such as ``head``) has exited."""
    _drop_output()
    return 1


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more at its end


def _write_any_character() -> None:
    """Print characters that the locale's encoding cannot represent as escapes instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and (stream.errors == "strict" or stream.encoding != "utf-8"):
            stream.reconfigure(errors="backslashreplace")


def _write_whole_lines() -> None:
    """Write only whole lines to standard output, even under ``python -u``.

    torchrun starts ranks, which share one pipe, with ``python -u``. ``print`` writes the text and the line
    feed separately, so another rank's output could come between them.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.write_through:
            stream.reconfigure(write_through=False, line_buffering=True)


def _search_no_folder_of_others(command: str) -> None:
    """Ignore entries of search paths, such as PATH, that lead to a working directory of another user."""
    for told in search_paths.clean(os.environ):
        if os.environ.get("RANK", "0") == "0":
            print(f"megatron-npu {command}: warning: {told}", file=sys.stderr)


def _absent(error: ModuleNotFoundError) -> UsageError | None:
    """Return the error about a required package that one of our modules failed to import, or None."""
    name = error.name or ""
    asking = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    asking = [module for module in asking if not module.startswith("importlib")]
    if not asking[-1].startswith(f"{__name__.partition('.')[0]}.") or name not in _REQUIRED:
        return None
    reason, remedy = _REQUIRED[name]
    return UsageError(f"the package {name} is not installed, but {reason}", remedy=remedy)


def _run(argv: list[str]) -> int:
    module, function = COMMANDS[argv[0]][0].split(":")
    if argv[0] in _START_RANKS:
        visible_devices.name_for_ascend()
    collector.rest()
    try:
        command = getattr(importlib.import_module(module), function)
        if argv[0] not in _BUILD_A_MODEL:
            collector.resume()
        return command(argv[1:]) or 0
    finally:
        collector.resume()


def rapidformer() -> int:
    """Run ``megatron-npu train`` under the name ``rapidformer`` from the PAI-Rapidformer document."""
    return main(["train", *sys.argv[1:]])


def _terminable(command: str) -> contextlib.AbstractContextManager[None]:
    """Let a command clean up when it receives SIGTERM or SIGHUP.

    Ranks started by a launcher keep the default action.
    """
    if command in _HEAR_TERMINATION and "TORCHELASTIC_RUN_ID" not in os.environ:
        return interruption.termination_heard()
    return contextlib.nullcontext()


def _packages_for(argv: list[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context for commands that do not need torch, because they only print help or read sources."""
    if _asks_for_help(argv):
        return inert_packages.for_help()
    if argv[0] in ("check", "pin") or (argv[0] == "ledger" and "--static" in _flags(argv)):
        inert_packages.for_records()
    return contextlib.nullcontext()


def _asks_for_help(argv: list[str]) -> bool:
    words = argv[1:2] if argv[0] in _TAKES_A_COMMAND else _flags(argv)
    return any(word in ("-h", "--help") or word.startswith("--help=") for word in words)


def _flags(argv: list[str]) -> list[str]:
    return argv[1 : argv.index("--")] if "--" in argv else argv[1:]
