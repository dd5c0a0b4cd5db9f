"""Implement ``megatron-npu patches list|check|pin``, also called ``ledger``, ``check`` and ``pin``.

``check`` and ``pin`` read Megatron's source files without importing them; ``list`` imports the patched
modules.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_npu import adaptors, plugin
from megatron_npu.adaptors.patch_names import called, of_the_guide
from megatron_npu.base import files, settings
from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError, either
from megatron_npu.patching.ledger import Ledger
from megatron_npu.patching.module_patch import DriftError
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.pins import PinError, PinFile, Pins
from megatron_npu.patching.registry import registry
from megatron_npu.patching.sources import SourceTree
from megatron_npu.patching.verdicts import Verdict, by_target, compare
from megatron_npu.upstream import megatrons
from megatron_npu.upstream.megatrons import Upstream

_NAME = (
    "patches to show or check: part of a target's name or of a file path in this package, or a file "
    "from the guide to Megatron-LM 285068c8 (such as adaptor_model_transformer); default: all"
)


def patches(argv: list[str]) -> int:
    """Run one of the subcommands ``list``, ``check`` and ``pin``.

    Returns:
        The action's exit code; 2 if no action is given.

    Raises:
        UsageError: the action is unknown, or the action itself raises it.
    """
    parser = Parser(
        "megatron-npu patches", description="List, check or pin the patches that are applied to Megatron."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (_, text) in _ACTIONS.items():
        actions.add_parser(name, help=text, add_help=False)
    action = argv[0] if argv and argv[0] in _ACTIONS else parser.parse_args(argv).action
    return _ACTIONS[action][0](argv[1:], f"megatron-npu patches {action}")


def check(argv: list[str], prog: str = "megatron-npu check") -> int:
    """Compare a copy of Megatron with the pinned signatures, without importing it.

    Returns:
        0 if every patch can be applied, 1 if upstream has drifted too far for some patch, 2 for bad usage.

    Raises:
        UsageError: no Megatron is found, or no patch is recorded for it.
    """
    parser = _parser(prog, check, "0: every patch can be applied; 1: one cannot; 2: bad usage")
    parser.add_argument("names", nargs="*", metavar="NAME", help=_NAME)
    strict = "also fail on upstream changes that around and wrap patches tolerate"
    parser.add_argument("--strict", action="store_true", help=strict)
    parser.add_argument("--json", action="store_true", help="print a JSON object")
    options = parser.parse_args(argv)
    found = _find(options)
    reached = verdicts(found, options.names)
    print(_verdicts_as_json(found, reached) if options.json else _verdicts_as_text(found, reached))
    return int(any(verdict.fails or (options.strict and verdict.drifted) for verdict in reached))


def verdicts(found: Upstream, names: Sequence[str] = ()) -> list[Verdict]:
    """Return the state of each patch for a copy of Megatron without importing it.

    Args:
        names: the patches to check (see ``patch_names``). If none are given, all patches are checked.

    Raises:
        UsageError: no patch is recorded for it or under a given name, or a pin file cannot be read.
    """
    pins, sources = _load_pins(found), SourceTree(found.root)
    patches = called(names, _shipped(_records(found), found))
    return [compare(patch, sources.find(patch.module), pins) for patch in patches]


def pin(argv: list[str], prog: str = "megatron-npu pin") -> int:
    """Write the pin file of a copy of Megatron, with the fingerprints of all patched functions and classes.

    The pins of modules that this copy does not contain (the megatron-core wheel has no training scripts) are
    kept from the previous pin file.

    Returns:
        0, or 1 if targets are missing; missing targets are reported and left out.

    Raises:
        UsageError: no Megatron is found, no patch is recorded for it, or the folder is not writable.
    """
    parser = _parser(prog, pin, "0: all targets are pinned; 1: a target is missing; 2: bad usage")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="folder for the pin file (default: this package's folder of pins)",
    )
    options = parser.parse_args(argv)
    found = _find(options)
    directory = options.output or plugin.pins_directory()
    records = _records(found)
    shipped = _shipped(records, found)
    pinned, missing = SourceTree(found.root).pin(shipped, found.name, found.version)
    _keep_absent(pinned, {patch.module for patch in records if patch not in shipped}, directory)
    path = directory / pinned.name
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write(path, pinned.json())
    except OSError as error:
        raise UsageError(
            f"the folder {directory} is not writable ({error})", remedy="Pass another folder with --output."
        ) from error
    print(f"{path}: {len(pinned.targets)} targets pinned")
    for target in missing:
        print(f"{target}: not found, so it was not pinned", file=sys.stderr)
    return int(bool(missing))


def ledger(argv: list[str], prog: str = "megatron-npu ledger") -> int:
    """Show the state of every patch after importing the modules that the patches change.

    Returns:
        0, or 1 if a patch failed.

    Raises:
        UsageError: no Megatron is found, no patch is recorded for it, or a named module does not exist.
    """
    parser = _parser(prog, ledger, "0: no patch failed; 1: a patch failed; 2: bad usage")
    parser.add_argument("names", nargs="*", metavar="NAME", help=_NAME)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON object")
    form.add_argument("--markdown", action="store_true", help="print the patches as a Markdown table")
    parser.add_argument(
        "--static", action="store_true", help="list the patch records without importing Megatron"
    )
    parser.add_argument(
        "--import",
        dest="modules",
        nargs="+",
        metavar="MODULE",
        help="modules to import instead of the default ones",
    )
    options = parser.parse_args(argv)
    found = _find(options)
    if options.megatron:  # the user has said which one is meant, should there be another on the path
        os.environ[settings.MEGATRON_PATH.name] = str(found.root)
    patches = called(options.names, _records(found))
    named = [*dict.fromkeys(patch.module for patch in patches)] if options.names else None
    book = Ledger() if options.static else _live_ledger(found, options.modules, named)
    book.keep(patches)
    text = book.markdown() if options.markdown else book.text(pending=options.static)
    print(book.json() if options.json else text)
    guide = of_the_guide(patches, str(book.about.get("device", "")))
    if guide and not (options.json or options.markdown):
        print(guide)
    return int(book.count("failed") > 0)


def _parser(prog: str, function: object, codes: str) -> argparse.ArgumentParser:
    summary = (function.__doc__ or "").partition("\n")[0]
    epilog = f"exit code: {codes}"
    parser = Parser(prog, description=summary, epilog=epilog)
    parser.add_argument(
        "--megatron",
        metavar="PATH",
        help="a checkout, a site-packages folder or an unpacked wheel (default: "
        f"{settings.MEGATRON_PATH.name}, else the first on the Python path)",
    )
    parser.add_argument(
        "--upstream",
        metavar="NAME",
        help=f"{', '.join(megatrons.NAMES)} (default: detected from its files)",
    )
    return parser


_ACTIONS = {
    "list": (ledger, "list every patch and its state (also: megatron-npu ledger)"),
    "check": (check, "compare a Megatron with the supported versions (also: megatron-npu check)"),
    "pin": (pin, "record a Megatron version, for developers (also: megatron-npu pin)"),
}


def _find(options: argparse.Namespace) -> Upstream:
    found = megatrons.find(*megatrons.named(options.megatron))
    return replace(found, name=options.upstream) if options.upstream else found


def _records(found: Upstream) -> list[Patch]:
    """Import the adaptors, which record their patches, and return the patches for this upstream version."""
    if found.name not in megatrons.NAMES:
        raise UsageError(
            f"unknown upstream {found.name}; --upstream must be {either(megatrons.NAMES)}",
            remedy="Check --upstream.",
        )
    adaptors.register(found.name)
    patches = [patch for patch in registry.patches if patch.is_for(found.name, found.version)]
    if not patches:
        raise UsageError(
            f"no patches exist for {found.name} {found.version}, which is not a supported version",
            remedy="Check --upstream.",
        )
    return patches


def _shipped(patches: list[Patch], found: Upstream) -> list[Patch]:
    """Return the patches of packages (such as ``megatron/training``) that this copy of Megatron contains."""

    def ships(module: str) -> bool:
        parts = module.split(".")[:2]
        paths = [folder.joinpath(*parts) for folder in (found.root, found.root / "tasks")]
        return any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)

    return [patch for patch in patches if ships(patch.module)]


def _load_pins(found: Upstream) -> Pins:
    try:
        return Pins.load(plugin.pins_directory(), found.name, found.version)
    except PinError as error:
        raise UsageError(str(error), remedy="Write it again with megatron-npu pin.") from error


def _keep_absent(pinned: PinFile, modules: set[str], directory: Path) -> None:
    try:
        former = PinFile.read(directory / pinned.name)
    except PinError:  # there is none, or nothing in it can be kept
        return
    for target, old in former.targets.items():
        module = target.partition(":")[0]
        if module in modules:
            pinned.targets[target] = old
            pinned.modules[module] = former.modules[module]


def _live_ledger(found: Upstream, modules: list[str] | None, named: list[str] | None) -> Ledger:
    """Import ``modules`` while the import hook is installed, and return the ledger.

    The default is ``named``, or else every module with patches.
    """
    if str(found.root) not in map(os.path.realpath, sys.path):
        sys.path.insert(0, str(found.root))
    sys.path.append(str(found.root / "tasks"))  # as tasks/main.py finds what it imports
    plugin.install()
    patches = _records(found)
    for name in modules or named or dict.fromkeys(patch.module for patch in patches):
        reason = _why_not_imported(name, found, asked=bool(modules))
        if reason is not None:
            _remark(patches, name, f"not imported: {reason}")
    return plugin.engine().ledger


def _why_not_imported(name: str, found: Upstream, *, asked: bool) -> str | None:
    """Try to import an upstream module, and return the reason if this fails, or None.

    Raises:
        UsageError: the module does not exist, and the user has asked for it.
    """
    try:
        importlib.import_module(name)
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if asked and error.name == name:
            raise UsageError(
                f"there is no module {name} in {found.root}", remedy="Check --import."
            ) from error
        return str(error)
    except DriftError as error:
        return f"{', '.join(error.targets)} drifted; see the failed patches"
    except Exception as error:  # whatever an upstream module may raise belongs in the ledger
        return f"{type(error).__name__}: {error}"
    return None


def _remark(patches: list[Patch], module: str, text: str) -> None:
    for patch in patches:
        row = plugin.engine().ledger.row(patch)
        if patch.module == module and row.state == "pending":
            row.reason = text.partition("\n")[0]


def _verdicts_as_json(found: Upstream, verdicts: list[Verdict]) -> str:
    groups = by_target(verdicts)
    report = {
        "upstream": found.name,
        "version": found.version,
        "root": str(found.root),
        "pinned": sorted(_pinned_versions(found)),
        "counts": _counts(groups),
        "fails": sum(worst.fails for worst, *_ in groups),
        "targets": [
            {
                **asdict(worst),
                "kind": _kinds([worst, *others]),
                "fails": worst.fails,
                "ours": _ours([worst, *others]),
            }
            for worst, *others in groups
        ],
    }
    return json.dumps(report, indent=2)


def _pinned_versions(found: Upstream) -> list[str]:
    return [file.version for file in _load_pins(found).files]


def _counts(groups: list[list[Verdict]]) -> dict[str, int]:
    return dict(Counter(worst.status for worst, *_ in groups))


def _kinds(group: list[Verdict]) -> str:
    return ", ".join(dict.fromkeys(verdict.kind for verdict in group))


def _ours(group: list[Verdict]) -> list[str]:
    return list(dict.fromkeys(verdict.ours for verdict in group))


def _verdicts_as_text(found: Upstream, verdicts: list[Verdict]) -> str:
    """Return a report with one entry for each target.

    Failures come first, followed by compatible changes and all other targets.
    """
    groups = sorted(by_target(verdicts), key=lambda group: (not group[0].fails, not group[0].drifted))
    lines = [f"{found.name} {found.version} in {found.root}", _pins_in_words(found)]
    for group in groups:
        lines += _lines_of(group, found.version)
    told = ", ".join(f"{count} {status}" for status, count in _counts(groups).items())
    lines.append(f"{len(groups)} targets: {told}; {sum(worst.fails for worst, *_ in groups)} fail")
    return "\n".join(lines)


def _lines_of(group: list[Verdict], version: str) -> Iterator[str]:
    """Yield the lines of the report about one target, with a description of changes since it was pinned."""
    worst, ours = group[0], ", ".join(_ours(group))
    if worst.fails or worst.drifted:
        yield f"{'FAILS' if worst.fails else 'warns':<5}  {worst.target}"
        yield from _indented(f"patched in {ours}")
    else:
        elsewhere = "" if worst.pin in ("", version) else f" (as in {worst.pin})"
        yield f"{'ok':<5}  {worst.target}  {ours}{elsewhere}"
    if worst.status != "same":
        against = f" against {worst.pin}" if worst.pin else ""
        yield f"{'':7}{worst.place}"
        yield from _indented(f"{_kinds(group)}, {worst.status}{against}: {worst.detail}")


def _pins_in_words(found: Upstream) -> str:
    """Describe which pins are used: those of this version and, if needed, of other versions."""
    versions = _pinned_versions(found)
    others = ", ".join(version for version in versions if version != found.version)
    if not versions:
        return "no pins exist for this version"
    if found.version not in versions:
        return f"{found.version} has no pins; compared with those of {others}"
    return f"compared with the pins of {found.version}" + (
        f"; where they differ, of {others}" if others else ""
    )


def _indented(text: str) -> list[str]:
    options: dict[str, Any] = {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.wrap(text, 100, initial_indent=" " * 7, subsequent_indent=" " * 9, **options)
