"""Which functions write a flag after it was parsed, or take all parsed flags: those that resolve the flags.

A few others have somebody else's arguments.

Every other function is given the frozen object that holds the flags of its subject, and reads them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from tests.conftest import ROOT

PACKAGE = ROOT / "megatron_npu"
# Functions that turn a command line into resolved flags. ``derive`` ends with ``Flags.freeze``.
RESOLVE = {
    "pretrain/flags/derive.py",
    "finetune/run/arguments.py:_derive",
    "options/older_flags.py:apply",
    "options/older_flags.py:_fill",
    "options/switches.py:__call__",
    "pretrain/flags/expert_flags.py:__call__",
}
_DEEPSPEED = "adaptors/deepspeed/megatron_deepspeed_core/arguments.py"
# Writes into the arguments of somebody else, each with its reason.
OTHERS = {
    "adaptors/deepspeed/deepspeed_engine.py:initialize": "DeepSpeed rejects a path given twice; undone",
    f"{_DEEPSPEED}:with_layers_of_the_decoder": "upstream's default is None, which it cannot add",
    f"{_DEEPSPEED}:without_configuration": "upstream reads it, but sets it with --deepspeed",
    "adaptors/megatron_core/checkpoints/checkpointing.py:_skip_other_random_states": "its loader reads it",
    "adaptors/megatron_core/layers/activation_offloading.py:unseen_by_upstream": "its check refuses; undone",
    "adaptors/megatron_core/options/argument_checks.py:check_precision_aware_optimizer": "an Ascend flag",
    "adaptors/megatron_core/options/argument_checks.py:evaluate_at_the_end_alone": "it divides by the value",
    "adaptors/megatron_core/options/argument_checks.py:name_the_length_for_servers": "it reads a wrong name",
    "adaptors/megatron_core/options/argument_checks.py:name_the_rerun_mode": "it parses a value it rejects",
    "adaptors/megatron_core/options/argument_checks.py:take_older_flags": "it ends on flags it has dropped",
    "adaptors/megatron_core/options/unsupported_options.py:switch_off": "its default needs TransformerEngine",
    "adaptors/megatron_core/options/unsupported_options.py:take_local_implementation": "the same",
    "adaptors/megatron_lm/arguments.py:complete_decoder_layers": "its default is None",
    "adaptors/shared/simulated.py:mark_board": "a copy, which is passed to upstream's function",
    "devices/hccl.py:group_options": "no flags: torch's options of a process group",
    "devices/hccl.py:set_buffer": "the same",
    "finetune/rapidformer/state.py:__setattr__": "a script for PAI-Rapidformer sets values of its run",
}
# Where a parameter or an attribute is a ``Namespace``: in what parses, checks and resolves flags, makes
# frozen objects of them (``Part.of`` and others), or has somebody else's. A folder stands for its files.
WHOLE = {
    "adaptors/": "the arguments of upstream's scripts",
    "base/arg_parser.py": "the parser",
    "commands/patches.py": "a command, which reads the flags that it has parsed",
    "data/preprocessing/command.py": "the same",
    "data/preprocessing/corpus.py": "makes a Corpus of parsed flags",
    "data/preprocessing/data_command.py": "a command, which reads the flags that it has parsed",
    "data/preprocessing/tokenizer_files.py": "makes TokenizerFiles of parsed flags",
    "data/preprocessing/windows.py": "makes Windows of parsed flags",
    "evaluation/lambada.py": "a command, which reads the flags that it has parsed",
    "evaluation/lm_eval_files.py": "lm-eval's arguments",
    "finetune/data/data_flags.py": "a check while the flags are parsed",
    "finetune/rapidformer/engine.py": "a document's interface: a script gives its flags to the engine",
    "finetune/rapidformer/megatron_models.py": "turns the flags of train into those of pretrain",
    "finetune/rapidformer/state.py": "a document's interface: a script reads and sets flags",
    "finetune/run/arguments.py": "parses, checks and resolves",
    "finetune/run/command.py": "resolves the switches, and makes the frozen objects",
    "finetune/run/flag_parts.py": "makes frozen objects",
    "finetune/run/run_plan.py": "makes the frozen flags of a training, whose length is known",
    "finetune/tasks/": "a task's check while the flags are parsed",
    "generation/generate.py": "makes Options of parsed flags",
    "measuring/command.py": "a command, which reads the flags that it has parsed",
    "measuring/plan.py": "makes a Plan of parsed flags",
    "options/": "checks of flags that several commands parse, and frozen objects made of them",
    "planning/command.py": "a command, which reads the flags that it has parsed",
    "pretrain/flags/": "parses, checks and resolves, and makes frozen objects",
    "pretrain/run/pretrain.py": "resolves the flags, and makes the plan of the run",
}
_NAMES = {"args", "flags", "asked", "namespace", "options", "validated", "parsed"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def writes(tree: ast.AST, function: _Function | None = None) -> Iterator[tuple[str, str]]:
    """Yield the function and the target of each write to an attribute of parsed flags.

    An object counts as flags if it is annotated as a ``Namespace`` or has one of the usual names.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield from writes(node, node)
            continue
        for target in _targets(node):
            if _is_flags(target, function):
                yield function.name if function else "", ast.unparse(target)
        yield from writes(node, function)


def _targets(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the objects whose attributes a statement or call sets."""
    if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            yield from (part.value for part in parts if isinstance(part, ast.Attribute))
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
        yield node.args[0]


def _is_flags(target: ast.expr, function: _Function | None) -> bool:
    last = ast.unparse(target).rpartition(".")[2]
    if last in _NAMES:
        return True
    arguments = function.args.args if function else []
    kinds = {each.arg: ast.unparse(each.annotation) for each in arguments if each.annotation}
    return kinds.get(last, "").rpartition(".")[2] in ("Namespace", "Flags")


def found() -> dict[str, list[str]]:
    """Return the targets of all writes in the package, by file and function."""
    result: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        for function, target in writes(ast.parse(path.read_text(encoding="utf-8"))):
            result.setdefault(f"{file}:{function}", []).append(target)
    return result


def takes_all_flags(tree: ast.AST) -> bool:
    """Return True if a parameter or an annotated name or attribute is a ``Namespace``."""
    kinds = [node.annotation for node in ast.walk(tree) if isinstance(node, ast.arg | ast.AnnAssign)]
    parts = [part for kind in kinds if kind for part in ast.walk(kind)]
    texts = [part.value for part in parts if isinstance(part, ast.Constant)]
    return "Namespace" in {_last(part) for part in parts} | {str(text).rpartition(".")[2] for text in texts}


def _last(node: ast.AST) -> str:
    return ast.unparse(node).rpartition(".")[2] if isinstance(node, ast.Name | ast.Attribute) else ""


def test_all_parsed_flags_are_taken_only_where_flags_are_resolved_or_are_somebody_elses() -> None:
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    taking = [
        file for file, path in files.items() if takes_all_flags(ast.parse(path.read_text(encoding="utf-8")))
    ]
    places = {next((place for place in WHOLE if file.startswith(place)), file) for file in taking}
    assert sorted(places) == sorted(WHOLE)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(args: Namespace): ...", True),
        ("def f(*, args: argparse.Namespace | None = None): ...", True),
        ("def f(args: 'argparse.Namespace'): ...", True),
        ("class C:\n    flags: Namespace", True),
        ("def f(args: Flags) -> Namespace: ...", False),
    ],
)
def test_what_takes_all_flags_is_found(code: str, expected: bool) -> None:
    assert takes_all_flags(ast.parse(code)) is expected


def test_flags_are_written_only_where_they_are_resolved_or_somebody_elses() -> None:
    places = {place for place in found() if place not in RESOLVE and place.partition(":")[0] not in RESOLVE}
    assert sorted(places) == sorted(OTHERS)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("def f(args):\n    args.x = 1", [("f", "args")]),
        ("def f(self):\n    self.args.x, y = 1, 2", [("f", "self.args")]),
        ("def f(given: argparse.Namespace):\n    if given.y:\n        given.x = 1", [("f", "given")]),
        ("def f(flags):\n    if flags.y:\n        setattr(flags, 'x', 1)", [("f", "flags")]),
        ("def f(self, args):\n    self.x = args.x", []),
    ],
)
def test_writes_are_found(code: str, expected: list[tuple[str, str]]) -> None:
    assert list(writes(ast.parse(code))) == expected
