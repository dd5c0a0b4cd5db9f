"""Who calls a patched function as upstream declares it is understood: by position, and by name.

Upstream's parameters are read from the pins of every version, where these have none (classes, names that are
imported from elsewhere) from the sources in checkouts/. Neither Megatron nor its scripts are imported.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator
from inspect import Parameter, Signature
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from megatron_npu import adaptors
from megatron_npu.patching.own_parameters import use_of
from megatron_npu.patching.pins import PinFile
from megatron_npu.patching.registry import Patch, registry
from megatron_npu.patching.sources import Source
from megatron_npu.upstream import megatrons

ROOT = Path(__file__).parents[2]
PINS = sorted((ROOT / "patches").glob("*.json"), key=lambda path: path.name)
_BUILDER = "megatron.core.datasets.blended_megatron_dataset_builder"
# What is done with the rest of the arguments, and why it is right however they are given.
UNDERSTOOD = {
    f"{_BUILDER}:BlendedMegatronDatasetBuilder.build_generic_dataset": "upstream's has a bare *args there",
    "megatron.core.tensor_parallel.layers:linear_with_grad_accumulation_and_async_allreduce": (
        "upstream's own is called where so many are given by position that it may be asked for"
    ),
    "megatron.core.transformer.moe.moe_utils:topk_routing_with_score_function": (
        "what follows `fused` has upstream's order in a table"
    ),
    "megatron.core.pipeline_parallel.schedules:backward_step": "the last of *args, or the name",
    "megatron.training:setup_model_and_optimizer": "all are handed on; a function in it has its own `args`",
    "megatron.model.layernorm:SPLayerNorm.__init__": "names that upstream's own does not have",
    **dict.fromkeys(
        (
            f"megatron.core.models.{model}.__init__"
            for model in (
                "gpt.gpt_model:GPTModel",
                "bert.bert_model:BertModel",
                "T5.t5_model:T5Model",
                "mamba.mamba_model:MambaModel",
                "hybrid.hybrid_model:HybridModel",
            )
        ),
        "what is given is bound to upstream's own signature",
    ),
    "megatron.model.language_model:TransformerLanguageModel.forward": "a position too many is what is cured",
}
_KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
KINDS = ("around", "replace", "wrap")  # what is called in upstream's place
Call = tuple[list[str], dict[str, str]]


def parameters(node: ast.arguments) -> Signature:
    """Return what a function takes; a default is a text."""
    positional = [*node.posonlyargs, *node.args]
    defaults = [None] * (len(positional) - len(node.defaults)) + [*node.defaults]
    found = [
        _parameter(each.arg, _KINDS[0], default) for each, default in zip(positional, defaults, strict=True)
    ]
    if node.vararg:
        found.append(Parameter(node.vararg.arg, Parameter.VAR_POSITIONAL))
    found += [
        _parameter(each.arg, _KINDS[1], default)
        for each, default in zip(node.kwonlyargs, node.kw_defaults, strict=True)
    ]
    if node.kwarg:
        found.append(Parameter(node.kwarg.arg, Parameter.VAR_KEYWORD))
    return Signature(found)


def _parameter(name: str, kind: Any, default: ast.expr | None) -> Parameter:
    return Parameter(name, kind, default=Parameter.empty if default is None else ast.unparse(default))


@functools.cache
def declared(text: str) -> list[tuple[str, Signature]]:
    """Return the functions of a pinned signature: marks such as ``@staticmethod``, and what they take."""
    found = []
    for each in text.split(" | "):
        marks, colon, rest = each.partition("def ")
        try:
            node = ast.parse(f"def {rest}: ...").body[0] if colon else None
        except SyntaxError:
            continue
        if isinstance(node, ast.FunctionDef) and not marks.startswith("class "):
            found.append((marks, parameters(node.args)))
    named = [(marks, each) for marks, each in found if set(each.parameters) != {"args", "kwargs"}]
    return named or found  # one that stands for an absent package takes whatever it is given


def calls(upstream: Signature, bound: int) -> Iterator[Call]:
    """Yield calls that ``upstream`` takes: all or the required parameters, by position or by name.

    Args:
        bound: how many of the first parameters are given by position always: ``self``.
    """
    assert upstream.parameters or not bound
    positional = [each for each in upstream.parameters.values() if each.kind is _KINDS[0]]
    by_name = [each for each in upstream.parameters.values() if each.kind is _KINDS[1]]
    for required_alone in (False, True):
        given, named = (
            [each.name for each in group if each.default is Parameter.empty or not required_alone]
            for group in (positional, by_name)
        )
        yield given, dict.fromkeys(named, "")
        yield given[:bound], dict.fromkeys([*given[bound:], *named], "")
        if len(given) > bound + 1:
            yield given[: bound + 1], dict.fromkeys([*given[bound + 1 :], *named], "")


def refused(ours: Signature, upstream: Signature, *, around: bool, bound: int) -> Iterator[str]:
    """Yield what is wrong with the calls that ``ours`` does not take."""
    for given, named in calls(upstream, bound):
        try:
            ours.bind(*(["original"] if around else []), *given, **named)
        except TypeError as error:
            yield str(error)


taken = functools.cache(use_of)


def lost(patch: Patch, upstream: Signature) -> Iterator[str]:
    """Yield the parameters that an ``around`` finds by position or by name alone."""
    if patch.target in UNDERSTOOD:
        return
    function = inspect.unwrap(patch.make)
    use = taken(function)
    if use is None:
        yield "what it does with the rest of the arguments cannot be told (UNDERSTOOD)"
        return
    names = [each.name for each in upstream.parameters.values() if each.kind is _KINDS[0]]
    own = len(use.own)
    for position, name in enumerate(names):
        if position in use.read and name not in use.names:
            yield f"{name} is read by position alone"
        if position >= own and name in use.names and position not in use.read:
            yield f"{name} is read by name alone"
    yield from _lost_in_helpers(function, names[own:])


@functools.cache
def parsed(ours: Any) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(ours)))


def _lost_in_helpers(function: FunctionType, rest: list[str]) -> Iterator[str]:
    """Yield what functions of the same module refuse that are given the rest of the arguments as they are."""
    for call in (node for node in ast.walk(parsed(function)) if isinstance(node, ast.Call)):
        helper = function.__globals__.get(call.func.id) if isinstance(call.func, ast.Name) else None
        star_star = any(keyword.arg is None for keyword in call.keywords)
        if not isinstance(helper, FunctionType) or not star_star:
            continue
        leading = [each for each in call.args if not isinstance(each, ast.Starred)]
        named = {keyword.arg: "" for keyword in call.keywords if keyword.arg is not None}
        try:
            inspect.signature(helper).bind(*leading, **named, **dict.fromkeys(rest, ""))
        except TypeError as error:
            yield f"{helper.__name__}: {error}"


@functools.cache
def records(upstream: str) -> list[Patch]:
    adaptors.register(upstream)
    return [patch for patch in registry.patches if patch.upstream == upstream]


def bound_of(patch: Patch, marks: str) -> int:
    return int("." in patch.qualname and "@staticmethod" not in marks)


def is_torchs(upstream: Signature) -> bool:
    """Return whether it is a pass of an autograd function, which torch calls by position alone."""
    return next(iter(upstream.parameters), "") == "ctx"


def faults(patch: Patch, functions: list[tuple[str, Signature]]) -> Iterator[str]:
    for marks, upstream in functions:
        if is_torchs(upstream) or "@property" in marks:
            continue
        around = patch.kind == "around"
        ours = inspect.signature(patch.make)
        wrong = [*refused(ours, upstream, around=around, bound=bound_of(patch, marks))]
        wrong += lost(patch, upstream) if around else []
        yield from (f"{patch.ours} {patch.target}{upstream}: {each}" for each in wrong)


@pytest.mark.parametrize("path", PINS, ids=lambda path: path.stem)
def test_patched_functions_take_what_upstream_takes(path: Path) -> None:
    pins = PinFile.read(path)
    judged, found = 0, []
    for patch in records(pins.upstream):
        pin = pins.targets.get(patch.target)
        if pin is None or not patch.is_for(pins.upstream, pins.version):
            continue
        if patch.kind in ("around", "replace") and isinstance(patch.make, FunctionType):
            functions = declared(pin.signature)
            judged += bool(functions)
            found += faults(patch, functions)
    assert judged > 25
    assert not found, "\n".join(found)


def trees() -> list[Path]:
    return sorted(path for path in (ROOT / "checkouts").glob("*") if (path / "megatron").is_dir())


def method_nodes(body: list[ast.stmt]) -> dict[str, Signature]:
    """Return the methods of a class; the constructor, whichever of the two it is, as ``__init__``."""
    found = {node.name: parameters(node.args) for node in body if isinstance(node, ast.FunctionDef)}
    if "__new__" in found:
        found.setdefault("__init__", found.pop("__new__"))
    return found


def our_methods(patch: Patch) -> dict[str, Signature]:
    """Return the methods of the class in place of upstream's, or of that name that a ``wrap`` makes."""
    names = (patch.make.__name__, patch.qualname) if patch.kind == "replace" else (patch.qualname,)
    nodes = [node for node in ast.walk(parsed(patch.make)) if isinstance(node, ast.ClassDef)]
    return next((method_nodes(node.body) for node in nodes if node.name in names), {})


source = functools.lru_cache(maxsize=64)(Source)
binding: dict[tuple[str, str], list[ast.stmt]] = {}  # (a file's hash, a name): what binds the name


def statements(module: str, file: Path, qualname: str) -> list[ast.stmt]:
    """Return what binds a name in a file. Equal files, of a wheel and its tag's tree, are parsed once."""
    found = source(module, file)
    key = found.digest, qualname
    if key not in binding:
        binding[key] = found.locate(qualname)
    return binding[key]


def located(tree: Path, module: str, qualname: str, hops: int = 3) -> ast.stmt | None:
    """Return the class or function that a name of ``tree`` stands for, found through its imports."""
    base = tree / module.replace(".", "/")
    file = next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)
    nodes = statements(module, file, qualname) if file else []
    if not nodes or not isinstance(nodes[0], ast.ImportFrom):
        return nodes[0] if nodes else None
    node = nodes[0]
    package = module.split(".") if file is not None and file.name == "__init__.py" else module.split(".")[:-1]
    start = package[: len(package) - node.level + 1] if node.level else []
    origin = ".".join([*start, *([node.module] if node.module else [])])
    return located(tree, origin, node.names[0].name, hops - 1) if hops else None


@pytest.mark.parametrize("tree", trees(), ids=lambda path: path.name)
def test_classes_and_imported_names_take_what_upstreams_take(tree: Path) -> None:
    """Those, too, that a pin says no parameters of."""
    upstream = megatrons.find(tree)
    judged, found = 0, []
    for patch in sorted(records(upstream.name), key=lambda patch: patch.module):
        if not patch.is_for(upstream.name, upstream.version) or patch.kind not in KINDS:
            continue
        node = located(tree, patch.module, patch.qualname)
        if isinstance(node, ast.FunctionDef) and patch.kind != "wrap":
            judged += 1
            marks = " ".join(f"@{ast.unparse(each)}" for each in node.decorator_list)
            found += faults(patch, [(marks, parameters(node.args))])
        elif isinstance(node, ast.ClassDef):
            judged += 1
            found += class_faults(patch, our_methods(patch), method_nodes(node.body))
    assert judged > 25
    assert not found, "\n".join(found)


def class_faults(patch: Patch, ours: dict[str, Signature], upstream: dict[str, Signature]) -> Iterator[str]:
    for name in ours.keys() & upstream.keys():
        for wrong in refused(ours[name], upstream[name], around=False, bound=1):
            yield f"{patch.ours} {patch.target}.{name}{upstream[name]}: {wrong}"


def fault_of(function: Callable[..., Any], declaration: str) -> str:
    patch = Patch("m:f", "around", function, ("cpu",), "why", "here", where=f"{__file__}:1")
    return "\n".join(faults(patch, declared(declaration)))


def renames(original, content, *args, **kwargs):
    return original(content, *args, **kwargs)


def takes_no_names(original, state, *rest):
    return original(state, *rest)


def takes_no_positions(original, state, **rest):
    return original(state, **rest)


def reads_a_name_alone(original, state, *args, **kwargs):
    return original(state, *args, **kwargs) if kwargs.get("strict") else None


def reads_a_position_alone(original, *args, **kwargs):
    return original(*args, **kwargs) if args[1] else None


def asks_another(original, state, *args, **kwargs):
    return original(state, *args, **kwargs) if _strict(*args, **kwargs) else None


def _strict(strictly: bool = False) -> bool:
    return strictly


def takes_both(original, state, *args, **kwargs):
    strict = args[0] if len(args) > 0 else kwargs.get("strict")
    return original(state, *args, **kwargs) if strict else None


@pytest.mark.parametrize(
    ("function", "fault"),
    [
        (renames, "missing a required argument: 'content'"),
        (takes_no_names, "got an unexpected keyword argument 'strict'"),
        (takes_no_positions, "too many positional arguments"),
        (reads_a_name_alone, "strict is read by name alone"),
        (reads_a_position_alone, "strict is read by position alone"),
        (asks_another, "_strict: got an unexpected keyword argument 'strict'"),
    ],
)
def test_each_kind_of_fault_is_found(function: Callable[..., Any], fault: str) -> None:
    assert fault in fault_of(function, "def f(state, strict=False)")
    assert not fault_of(takes_both, "def f(state, strict=False)")
