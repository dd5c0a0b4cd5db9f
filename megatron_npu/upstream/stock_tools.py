"""Scripts inside a Megatron-LM tree: what they need on the path, and which cannot do their work here."""

from __future__ import annotations

from pathlib import Path

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import early_import

_DEEPEST = 5  # folders between a tree and a script of it, examples/inference/gpt among them


def tree_of(script: Path) -> Path | None:
    """Return the Megatron-LM tree that ``script`` lies in, below its root; None for any other script."""
    for folder in script.resolve().parents[1:_DEEPEST]:
        if _is_tree(folder):
            return folder
    return None


def _is_tree(folder: Path) -> bool:
    return (folder / "pretrain_gpt.py").is_file() and (folder / "megatron").is_dir()


def is_stock(script: Path) -> bool:
    """Return whether a script lies in a Megatron-LM tree or at its root; else it is a user's own program."""
    return tree_of(script) is not None or _is_tree(script.resolve().parent)


def blames_program(error: BaseException, program: Path) -> bool:
    """Return whether a user's own program has called Megatron with what it refuses: its line is at fault."""
    return getattr(error, "blames_caller", False) and not is_stock(program)


def refuse(script: Path) -> None:
    """Refuse a stock script that would end in the middle, whatever the plug-in does.

    Raises:
        UsageError: it is the converter of checkpoints of megatron-core, without TransformerEngine.
    """
    tree = tree_of(script)
    if tree is None or not (tree / "megatron" / "core" / "package_info.py").is_file():
        return
    if script.resolve() != tree / "tools" / "checkpoint" / "convert.py":
        return
    if early_import.is_absent("transformer_engine"):
        raise UsageError(
            f"{script} without TransformerEngine",
            "the package, whose version its saver asks for whatever the flags",
            "A torch_dist checkpoint needs no conversion for another layout; `megatron-npu convert` writes "
            "the format torch, and Hugging Face's.",
        )
