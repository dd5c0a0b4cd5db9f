"""Implement ``megatron-npu run SCRIPT ARGS…``, which patches Megatron and runs a script without changing it.

The script runs on this machine's device.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path

from megatron_npu import plugin
from megatron_npu.base import files, settings
from megatron_npu.base.arg_parser import Parser, positive
from megatron_npu.base.errors import UsageError
from megatron_npu.process import extension_locks, python_child, visible_devices
from megatron_npu.upstream import megatrons, stock_tools

_USAGE = """%(prog)s [--redirect] [--cpu-devices N] SCRIPT [ARGUMENTS...]
       torchrun --nproc-per-node N -m megatron_npu run [--redirect] SCRIPT [ARGUMENTS...]"""
_DESCRIPTION = (
    "Run SCRIPT as __main__, as `python SCRIPT ARGUMENTS...` would, with Megatron patched "
    "at\nimport. Megatron is found through MEGATRON_LM_PATH, else in the checkout that "
    "contains SCRIPT, else on the\nPython path."
)

# what stock scripts import that no package on an index contains, only a checkout
_OF_A_CHECKOUT = frozenset(
    (
        "gpt_builders",
        "hybrid_builders",
        "mamba_builders",
        "megatron",
        "megatron.arguments",
        "megatron.global_vars",
        "megatron.initialize",
        "megatron.inference",
        "megatron.legacy",
        "megatron.model",
        "megatron.post_training",
        "megatron.tokenizer",
        "megatron.training",
        "model_provider",
        "pretrain_gpt",
    )
)


def parser() -> argparse.ArgumentParser:
    """Return the command's parser.

    The command's flags precede the script, and the script's flags follow it.
    """
    result = Parser("megatron-npu run", description=_DESCRIPTION, usage=_USAGE)
    result.add_argument(
        "--redirect",
        action="store_true",
        help="run a program that does not use Megatron: map torch.cuda, cuda and nccl to this machine's "
        "device from the start, including in spawned processes",
    )
    help_text = (
        f"number of devices that torch.cuda.device_count() reports on a CPU; like "
        f"{settings.CPU_DEVICES.name}=N, but only for this program"
    )
    result.add_argument("--cpu-devices", type=positive, help=help_text)
    result.add_argument("command", nargs=argparse.REMAINDER, metavar="SCRIPT [ARGUMENTS ...]")
    return result


def main(argv: list[str]) -> int:
    """Run the script, and return 0. If it raises SystemExit, this process ends with the same code.

    Raises:
        UsageError: the script is missing or not given, is a stock script that cannot work here, or the
            requested device is not available.
    """
    options = parser().parse_args(argv)
    script = _script(options.command)
    stock_tools.refuse(script, options.command[1:])
    named = megatrons.find(*megatrons.named(None)) if settings.MEGATRON_PATH.get() else None
    if options.cpu_devices:
        os.environ[settings.CPU_DEVICES.name] = str(options.cpu_devices)
    visible_devices.name_for_ascend()
    extension_locks.remove_stale("megatron-npu run")  # stock scripts would wait forever for them
    plugin.install()  # for spawned children too; other processes follow MEGATRON_NPU_AUTOLOAD
    if options.redirect or settings.REDIRECT.enabled():
        plugin.redirect(str(script.parent))
    search_for(script)
    tree = stock_tools.tree_of(script) or script.parent
    if named:
        _require_named_tree(script, tree, named)
    else:
        _require_own_tree(script, tree)
    sys.argv = options.command
    try:
        runpy.run_path(os.path.abspath(options.command[0]), run_name="__main__")  # as python from 3.9 on
    except ModuleNotFoundError as error:
        absent = _absent(error, script)
        if absent is None:
            raise
        raise absent from error
    return 0


def _absent(error: ModuleNotFoundError, script: Path) -> UsageError | None:
    """Return the error for a script that imports a missing package: torch, MindSpeed or a part of
    Megatron-LM.
    """
    name = error.name or ""
    if name.partition(".")[0] == "mindspeed":
        return UsageError(
            f"{script} imports {name}, which is not installed and is not used with megatron_npu",
            remedy="Remove this import from the script; no replacement is needed (see "
            "docs/how-to/switch-from-mindspeed.md).",
        )
    if name == "torch":
        return UsageError(
            f"{script} imports torch, which is not installed",
            remedy="Install the build for your device (docs/reference/versions.md#which-torch).",
        )
    if name not in _OF_A_CHECKOUT:
        return None
    where = settings.MEGATRON_PATH.get()
    return UsageError(
        f"{script} imports {name}, which is in a Megatron-LM checkout, not in the package megatron-core; "
        f"{where or script.parent} does not contain it",
        remedy=f"Clone https://github.com/NVIDIA/Megatron-LM at the script's version, and set "
        f"{settings.MEGATRON_PATH.name} to that folder.",
    )


def search_for(script: Path) -> None:
    """Put the folders of a script and of its Megatron at the front of the module search path."""
    python_child.search_first(str(script.parent))
    for checkout in (stock_tools.tree_of(script), settings.MEGATRON_PATH.get()):
        if checkout:
            sys.path.insert(1, str(checkout))


def _require_own_tree(script: Path, tree: Path) -> None:
    """Reject a script if Python would import a Megatron other than the one that the script belongs to.

    Old Megatrons are regular packages, which Python prefers to megatron-core's namespace package (0.16 and
    later), regardless of their order on the path.
    """
    own = megatrons.inside(tree)
    imported = megatrons.find() if own else None
    if own and imported and imported.root != own.root:
        raise UsageError(
            f"{script.name} belongs to {own.name} {own.version} ({tree}), but `import megatron` finds "
            f"{imported.name} {imported.version} ({imported.root}) first; a script must run with its own "
            "Megatron",
            remedy=f"Remove {imported.root} from the Python path.",
        )


def _require_named_tree(script: Path, tree: Path, named: megatrons.Upstream) -> None:
    """Reject a script if the Megatron in ``MEGATRON_LM_PATH`` is of another kind, or is not imported.

    The modules of another kind have other names. Another version of megatron-core is accepted, because a
    script may run with several versions. The script's own folder precedes ``MEGATRON_LM_PATH`` on the path,
    and old Megatrons take precedence anywhere.
    """
    variable, own = settings.MEGATRON_PATH.name, megatrons.inside(tree)
    meant = f"{variable} names {named.name} {named.version} ({named.root})"
    if own and own.name != named.name:
        raise UsageError(
            f"{script.name} belongs to {own.name} {own.version} ({tree}), but {meant}; a script must run "
            "with its own Megatron",
            remedy=f"Unset {variable}, or set it to {tree}.",
        )
    imported = megatrons.find()
    if (named.name, named.version) == (imported.name, imported.version):
        return
    remedy = f"Remove {imported.root} from the Python path, or unset {variable}."
    if script.is_relative_to(imported.root):
        remedy = f"Unset {variable}, because a script must run with its own Megatron, or run a script of the "
        remedy += "other."
    raise UsageError(
        f"{meant}, but `import megatron` finds {imported.name} {imported.version} ({imported.root}) first",
        remedy=remedy,
    )


def _script(command: list[str]) -> Path:
    """Return the script at the beginning of a command line, after resolving symbolic links."""
    if not command:
        raise UsageError(
            "no script was given",
            remedy="Pass a script and its arguments, for example: megatron-npu run pretrain_gpt.py.",
        )
    script = Path(command[0])
    if not script.is_file():
        raise UsageError(
            f"the script {script} does not exist, or is not a file", remedy=files.nearest(script)
        )
    return script.resolve()
