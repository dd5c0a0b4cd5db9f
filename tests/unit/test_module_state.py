"""Which names of modules functions rebind or change: few, and each has a reason.

What a run, a layer or a call knows belongs to an object, or to a ``ContextVar`` for as long as a block lasts.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

PACKAGE = ROOT / "megatron_npu"
MOST = 19  # of both kinds: three are rebound with ``global``, the others changed in place
REBOUND = 3
KEPT = {
    "adaptors/shared/gradients.py:_waiting": "autograd tells nobody which backward pass it runs",
    "process/collector.py:_resting": "the garbage collector is the process's",
    "devices/loader_workers.py:_noted": "written by a handler of SIGCHLD, which is the process's",
    "devices/loader_workers.py:_taking": "read by that handler",
    "devices/gloo_or_shared_memory.py:_waited_for": "torch's own state of coalescing is the process's, too",
    "checkpoint_files/disks.py:_run": "Megatron's own functions save and load, and are given no run",
    "checkpoint_files/folder_lock.py:_held": "descriptors of the process, which a forked child closes",
    "finetune/rapidformer/state.py:_process": "the run that a script asks for, from any of its threads",
    "ops/dispatch.py:fallbacks": "the report of the process: what has been computed by a reference, and why",
    "ops/swapping/attention.py:_theirs": "a graph reads it: a cached function would break the graph",
    "ops/swapping/found.py:_blocks": "counts blocks of all threads that have replaced one function of torch",
    "ops/verify.py:_bad_output": "the report of the process, a step's",
    "ops/verify.py:findings": "the report of the process",
    "ops/verify.py:random_calls": "the report of the process",
    "patching/banner.py:_say": "adaptors know the moment and the wiring the words, and neither the other",
    "data/preprocessing/encoder.py:_encoder": "a pool's worker knows functions of modules alone",
    "safe_files/torch_readers.py:_refusals": "torch makes a text of the error on its way out",
    "watchdog/phases.py:_entered": "the phases of the main thread, which the watchdog's thread reads",
    "watchdog/process_watch.py:_process": "a process is watched once, whoever begins",
}
# Filled while modules are imported, by decorators and constructors.
REGISTRIES = {
    "ops/dispatch.py:OPERATIONS",
    "base/settings.py:VARIABLES",
    "sim/kernels/registry.py:KERNELS",
}
# Of classes and modules of ours, set by functions elsewhere.
OF_CLASSES = {
    "FusedAdam.swap_moments": "Megatron builds its Adam itself, with no argument that could say it",
}
_CHANGES = """add append appendleft clear discard extend insert move_to_end pop popitem popleft remove
    setdefault subtract update""".split()
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def of_module(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Return the names that a module's body assigns, and what to."""
    found: dict[str, ast.expr | None] = {}
    for node in _outside_functions(tree):
        if isinstance(node, ast.Assign):
            found |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found[node.target.id] = node.value
    return found


def _outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function | ast.ClassDef):
            yield child
            yield from _outside_functions(child)


def changed(tree: ast.Module) -> set[str]:
    """Return the names of a module that its functions rebind, or whose values they change."""
    names, found = of_module(tree), set()
    for function in ast.walk(tree):
        if isinstance(function, _Function):
            own = _own_names(function)
            found |= {name for name in _changed_in(function) if name in names and name not in own}
    # what hangs on an object by weak reference is the object's
    return {name for name in found if "Weak" not in ast.unparse(names[name] or ast.Constant(None))}


def rebound(file: Path) -> int:
    """Return how many names of a module its functions rebind."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return len({name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names})


def _own_names(function: _Function) -> set[str]:
    """Return a function's parameters and local names."""
    shared = {name for node in ast.walk(function) if isinstance(node, ast.Global) for name in node.names}
    stored = {
        node.id
        for node in ast.walk(function)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return ({node.arg for node in ast.walk(function) if isinstance(node, ast.arg)} | stored) - shared


def _changed_in(function: _Function) -> Iterator[str]:
    """Yield names that are rebound, or whose items, attributes or contents are set."""
    for node in ast.walk(function):
        if isinstance(node, ast.Global):
            yield from node.names
        elif isinstance(node, ast.Subscript | ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            yield from _name(node.value)
        elif (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES
        ):
            yield from _name(node.func.value)


def _name(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Name):
        yield node.id


def set_elsewhere(tree: ast.Module) -> set[str]:
    """Return the attributes of imported names of ours, and of the module's classes, that functions set."""
    ours = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron_npu"):
            ours |= {each.asname or each.name for each in node.names}
    return {
        ast.unparse(node)
        for function in ast.walk(tree)
        if isinstance(function, _Function)
        for node in ast.walk(function)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
        if set(_name(node.value)) & ours - _own_names(function)
    }


def test_what_is_looked_for_is_found() -> None:
    source = """
a, b = [], 0
a1 = []
count: int = 0
table = {}
held = object()
kept = weakref.WeakKeyDictionary()
fixed = {"x": 1}
def f(x, fixed):
    global count
    count += 1
    table[x] = 1
    held.attribute = 2
    kept[x] = 1
    fixed["y"] = 2
    a1.append(x)
class C:
    def m(self):
        table = {}
        table["z"] = 1
"""
    assert changed(ast.parse(source)) == {"count", "table", "held", "a1"}


def test_few_names_of_modules_change() -> None:
    found = {
        f"{path.relative_to(PACKAGE).as_posix()}:{name}"
        for path in sorted(Path(PACKAGE).rglob("*.py"))
        for name in changed(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found - REGISTRIES == set(KEPT)
    assert len(KEPT) <= MOST
    assert sum(map(rebound, sorted(PACKAGE.rglob("*.py")))) <= REBOUND
    assert all(KEPT.values())


def test_attributes_of_classes_and_other_modules_are_set_by_few() -> None:
    source = """
from megatron_npu.ops.optimizers.adam import FusedAdam
from elsewhere import Other
class Own: pass
def f(own):
    FusedAdam.x = 1
    Other.y = 1
    Own.z = 1
    own.attribute = 1
"""
    assert set_elsewhere(ast.parse(source)) == {"FusedAdam.x", "Own.z"}
    found = {
        name
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in set_elsewhere(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found == set(OF_CLASSES)
