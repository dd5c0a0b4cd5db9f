"""Check whether the scripts of a Megatron-LM checkout can run on this machine, and which paths they need."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_npu.base import settings
from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import early_import

_DEEPEST = 5  # folders between a tree and a script of it, examples/inference/gpt among them
_REMOTE_CODE = "code from the folder of the model that it reads (trust_remote_code=True)"
# scripts that run what a stranger's file holds, and what they run
_RUN_CODE = {
    "tools/hf2megads_weight_converter.py": _REMOTE_CODE,
    "examples/multimodal/model_converter/internvit_converter.py": _REMOTE_CODE,
    "examples/multimodal/model_converter/vision_model_tester.py": _REMOTE_CODE,
    "examples/gptoss/01_convert_from_hf.py": _REMOTE_CODE,
    "examples/gptoss/03_convert_to_hf.py": _REMOTE_CODE,
}
_MULTIMODAL = "examples/multimodal/run_text_generation.py"  # with --task MMMU, its options alone


def tree_of(script: Path) -> Path | None:
    """Return the Megatron-LM checkout that contains ``script``, or None if the script is elsewhere."""
    for folder in script.resolve().parents[1:_DEEPEST]:
        if _is_tree(folder):
            return folder
    return None


def _is_tree(folder: Path) -> bool:
    return (folder / "pretrain_gpt.py").is_file() and (folder / "megatron").is_dir()


def is_stock(script: Path) -> bool:
    """Return True if a script belongs to a Megatron-LM checkout and not to the user."""
    return tree_of(script) is not None or _is_tree(script.resolve().parent)


def blames_program(error: BaseException, program: Path) -> bool:
    """Return True if a wrong call in the user's own program caused the error."""
    return getattr(error, "blames_caller", False) and not is_stock(program)


def refuse(script: Path, arguments: Sequence[str] = ()) -> None:
    """Reject a stock script that would fail halfway even with the plug-in or that executes code from files.

    Args:
        script: the script to run.
        arguments: its command line.

    Raises:
        UsageError: the script is megatron-core's checkpoint converter and TransformerEngine is not installed,
            or the script executes code from the files it reads and ``MEGATRON_NPU_TRUST_FILES`` does not
            allow that.
    """
    tree = tree_of(script)
    if tree is None:
        return
    name = script.resolve().relative_to(tree).as_posix()
    _refuse_code(name, script, arguments)
    if name != "tools/checkpoint/convert.py":
        return
    is_core = (tree / "megatron" / "core" / "package_info.py").is_file()
    if is_core and early_import.is_absent("transformer_engine"):
        raise UsageError(
            f"{script} requires TransformerEngine, which its saver always imports, but transformer-engine "
            "is not installed",
            remedy="A torch_dist checkpoint loads in any layout without conversion; `megatron-npu "
            "convert` writes the torch format and Hugging Face's.",
        )


def _refuse_code(name: str, script: Path, arguments: Sequence[str]) -> None:
    what = _RUN_CODE.get(name)
    if name == _MULTIMODAL and any(argument.endswith("MMMU") for argument in arguments):
        what = "the answer options of MMMU's questions as Python code"
    if what is not None and not settings.TRUST_FILES.enabled():
        raise UsageError(
            f"{script} executes {what}, which is allowed only with {settings.TRUST_FILES.name}=1",
            remedy=f"Set {settings.TRUST_FILES.name}=1 if you trust the files that it reads as much as "
            "your own programs; `megatron-npu convert` reads Transformers models without "
            "executing their code.",
        )
