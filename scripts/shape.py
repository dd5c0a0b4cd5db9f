"""Measure the shape of the source code: shape.py [FOLDER] [--list complexity|parameters|given|long]

Nothing is imported. ``tests/unit/test_shape.py`` sets limits for these counts.

The complexity of a function is one plus one for each branch: ``if``, ``for``, ``while``, ``except``, ``a if b
else c``, each operand of ``and`` or ``or`` after the first, each loop of a comprehension; branches of nested
functions are included. Parameters count without ``*args`` and ``**kwargs``, but with ``self``. A long
signature is *given* if a caller outside this project determines it.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "megatron_npu"
COMPLEX, MANY = 10, 7  # what is above
_FORKS = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler)

# Whose signatures are another's: a kernel stands for an operator of torch_npu, a stand-in for a function of a
# package that is absent; a kernel of Triton's takes pointers, strides and constants one by one.
_GIVEN_FOLDERS = ("sim/kernels/", "standins/", "ops/triton/kernels/")
# The decorators that put a function in the place of one of upstream's.
_GIVEN_DECORATORS = ("around", "constant", "replace", "wrap")
# And these, whose caller the source does not name.
GIVEN = {
    "adaptors/deepspeed/megatron_deepspeed_core/text_generation.py:__call__": "upstream's ForwardStep",
    "adaptors/megatron_core/experts/grouped_linear.py:__init__": "TEGroupedLinear's",
    "adaptors/megatron_core/te/te_layers.py:forward": "the forward of the layer that it wraps",
    "evaluation/lm_eval_model.py:__init__": "keywords of lm-eval's --model_args",
    "finetune/data/mmap_datasets.py:build_train_valid_test_datasets_for_huggingface": "a document's own",
    "finetune/rapidformer/former_names.py:__init__": "Transformers' own AdamW of before version 5",
    "ops/attention/context_parallel/ring.py:forward": "a call of torch.autograd.Function",
    "ops/optimizers/adam.py:__init__": "apex's and torch's Adam",
    "ops/optimizers/sgd.py:__init__": "torch's SGD",
    "ops/residual_norm.py:forward": "a call of torch.autograd.Function",
    "ops/triton/residual.py:forward": "a call of torch.autograd.Function",
    "planning/rank/cuda.py:attention": "torch's operator of cuDNN's attention",
    "ops/swapping/attention.py:attend": "an entry of Transformers' registry of attentions",
    "ops/swapping/losses.py:_torch_loss": "torch.nn.functional.cross_entropy",
    "ops/swapping/own_attention.py:_multihead": "torch.nn.MultiheadAttention.forward",
    "ops/swapping/own_attention.py:sdpa": "torch.nn.functional.scaled_dot_product_attention",
}


@dataclass(frozen=True)
class Function:
    """A function of the package, with its position, length, complexity and number of parameters."""

    file: str
    line: int
    name: str
    lines: int
    complexity: int
    parameters: int
    is_given: bool

    @property
    def key(self) -> str:
        """The file and the name of the function, in the form used in ``GIVEN``."""
        return f"{self.file}:{self.name}"


def functions(package: Path = PACKAGE) -> list[Function]:
    """Return all functions of a package, including nested ones and methods."""
    found = []
    for file in sorted(package.rglob("*.py")):
        name = file.relative_to(package).as_posix()
        tree = ast.parse(file.read_text(encoding="utf-8"))
        replacing = {*_GIVEN_DECORATORS, *_made_of_decorators(tree)}
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_described(node, name, replacing))
    return found


def _made_of_decorators(tree: ast.Module) -> Iterator[str]:
    """Yield the names under which a file stores partially applied decorators of this kind."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and not set(_words(node.value)).isdisjoint(_GIVEN_DECORATORS):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))


def _described(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str, replacing: set[str]) -> Function:
    taken = node.args
    return Function(
        file=file,
        line=node.lineno,
        name=node.name,
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        complexity=complexity(node),
        parameters=len(taken.posonlyargs) + len(taken.args) + len(taken.kwonlyargs),
        is_given=given(node, file, replacing),
    )


def complexity(function: ast.AST) -> int:
    """Return the complexity of a function, counted as described above."""
    return 1 + sum(_forks(node) for node in ast.walk(function))


def _forks(node: ast.AST) -> int:
    if isinstance(node, ast.BoolOp):
        return len(node.values) - 1
    return int(isinstance(node, (*_FORKS, ast.comprehension)))


def given(node: ast.FunctionDef | ast.AsyncFunctionDef, file: str, replacing: set[str]) -> bool:
    """Return True if a function's signature is determined by a caller outside this project.

    Such functions are public kernels of the simulator, public parts of stubs, replacements of upstream
    functions (by one of the registry's decorators), or named in ``GIVEN``.
    """
    if f"{file}:{node.name}" in GIVEN:
        return True
    if file.startswith(_GIVEN_FOLDERS) and (node.name == "__init__" or not node.name.startswith("_")):
        return True
    words = {word for decorator in node.decorator_list for word in _words(decorator)}
    return not words.isdisjoint(replacing)


def _words(decorator: ast.expr) -> Iterator[str]:
    for node in ast.walk(decorator):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id


def too_complex(found: list[Function]) -> list[Function]:
    """Return the functions whose complexity exceeds the limit, the most complex ones first."""
    return sorted((each for each in found if each.complexity > COMPLEX), key=lambda each: -each.complexity)


def take_many(found: list[Function], *, is_given: bool) -> list[Function]:
    """Return the functions with more parameters than the limit: ours, or those with a given signature."""
    many = [each for each in found if each.parameters > MANY and each.is_given == is_given]
    return sorted(many, key=lambda each: -each.parameters)


def longest(found: list[Function]) -> list[Function]:
    """Return the functions, the longest ones first."""
    return sorted(found, key=lambda each: -each.lines)


def rebound_names(package: Path = PACKAGE) -> int:
    """Return the number of module-level names that functions rebind with ``global``."""
    count = 0
    for file in package.rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        count += len({name for node in ast.walk(tree) if isinstance(node, ast.Global) for name in node.names})
    return count


def holding_all_flags(package: Path = PACKAGE) -> int:
    """Return the number of parameters and annotated names whose type is a ``Namespace`` of all flags."""
    count = 0
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation is not None:
                count += re.search(r"\bNamespace\b", ast.unparse(node.annotation)) is not None
    return count


def table(package: Path = PACKAGE) -> dict[str, str]:
    """Return all measurements of the code, keyed by what they count."""
    files = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in package.rglob("*.py")}
    found = functions(package)
    lengths = sorted(each.lines for each in found)
    median, p90 = lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10]
    folders = [sum(file.parent == folder for file in files) for folder in {file.parent for file in files}]
    top = [path for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()]
    file, lines = max(files.items(), key=lambda item: item[1])
    function = longest(found)[0]
    return {
        "files": f"{len(files)}",
        "lines": f"{sum(files.values())}",
        "entries at the top": f"{len(top)}",
        "files of a folder, at most (`__init__` counted)": f"{max(folders)}",
        "longest file": f"{lines} ({file.relative_to(package).as_posix()})",
        "functions": f"{len(found)}",
        "lines of a function: median, p90": f"{median}, {p90}",
        "longest function": f"{function.lines} ({function.key})",
        f"complexity > {COMPLEX}": f"{len(too_complex(found))}",
        f"parameters > {MANY}, ours": f"{len(take_many(found, is_given=False))}",
        f"parameters > {MANY}, given": f"{len(take_many(found, is_given=True))}",
        "names rebound with `global`": f"{rebound_names(package)}",
        "parameters and names with all flags (`Namespace`)": f"{holding_all_flags(package)}",
    }


def main() -> None:
    """Print the table, or one of the lists behind it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument(
        "folder", nargs="?", type=Path, default=PACKAGE, help="package to count (default: %(default)s)"
    )
    parser.add_argument("--list", choices=("complexity", "parameters", "given", "long"))
    options = parser.parse_args()
    if options.list is None:
        for what, number in table(options.folder).items():
            print(f"{what:48} {number}")
        return
    found = functions(options.folder)
    lists = {
        "complexity": too_complex(found),
        "parameters": take_many(found, is_given=False),
        "given": take_many(found, is_given=True),
        "long": longest(found)[:20],
    }
    for each in lists[options.list]:
        print(f"{each.complexity:3} {each.parameters:3} {each.lines:4}  {each.file}:{each.line} {each.name}")


if __name__ == "__main__":
    main()
