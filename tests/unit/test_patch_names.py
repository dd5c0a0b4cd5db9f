"""The names by which ``check`` and ``ledger`` are asked for some patches."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatron_npu import adaptors
from megatron_npu.adaptors import patch_names
from megatron_npu.adaptors.patch_names import GUIDE, called, of_the_guide
from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.commands import patches as patch_commands
from megatron_npu.patching.patch import Patch
from megatron_npu.patching.registry import registry
from tests.conftest import ROOT, checkout
from tests.support.appendix_a import LISTED

CORE = "megatron.core.tensor_parallel"


@pytest.fixture(scope="module")
def patches() -> list[Patch]:
    adaptors.register("megatron_lm")
    return [patch for patch in registry.patches if patch.is_for("megatron_lm", "285068c8")]


def targets(names: list[str], patches: list[Patch]) -> set[str]:
    return {patch.target for patch in called(names, patches)}


def test_the_guides_files_are_those_of_its_appendix() -> None:
    assert {file: set(functions) for file, functions in GUIDE.items()} == {
        file: set(functions) for file, functions in LISTED.items()
    }


def test_how_many_of_the_guides_functions_are_replaced(patches: list[Patch]) -> None:
    """19 on an NPU, 11 watched; 2 of the 19 are for NPUs alone. Another upstream has not all of them."""
    assert (
        "19 of the guide's 30 functions are replaced or wrapped on npu, and 11 are watched"
        in of_the_guide(patches, "npu")
    )
    assert (
        "17 of the guide's 30 functions are replaced or wrapped on cpu, and 13 are watched"
        in of_the_guide(patches, "cpu")
    )
    assert of_the_guide(patches).startswith(
        "19 of the guide's 30 functions are replaced or wrapped, and 11 are watched"
    )
    assert of_the_guide(patches[:20]) == ""


@pytest.mark.parametrize("file", GUIDE)
@pytest.mark.parametrize("ending", ["", ".py"])
def test_a_file_of_the_guide_stands_for_its_functions(file: str, ending: str, patches: list[Patch]) -> None:
    assert targets([file + ending], patches) == set(GUIDE[file])


@pytest.mark.parametrize(
    ("name", "found"),
    [
        # as the guide writes them
        (f"{CORE}.layers.VocabParallelEmbedding.forward", f"{CORE}.layers:VocabParallelEmbedding.forward"),
        (
            "megatron.model.fused_layer_norm.MixedFusedLayerNorm._init_",
            "megatron.model.fused_layer_norm:MixedFusedLayerNorm.__init__",
        ),
        ("megatron.set_jit_fusion_options", "megatron.initialize:set_jit_fusion_options"),
        ("megatron.clip_grad_norm_fp32", "megatron.optimizer.clip_grads:clip_grad_norm_fp32"),
        ("megatron.optimizer.Adam", "megatron.optimizer:Adam"),
        # as the ledger does, and parts
        ("megatron.schedules:backward_step", "megatron.schedules:backward_step"),
        ("_kernel_make_viewless", "megatron.core.utils:_kernel_make_viewless_tensor"),
    ],
)
def test_a_function_is_found_by_its_name_and_by_parts(name: str, found: str, patches: list[Patch]) -> None:
    assert targets([name], patches) == {found}


def test_a_part_stands_for_all_that_have_it(patches: list[Patch]) -> None:
    found = targets(["_VocabParallelCrossEntropy"], patches)
    assert {target.rpartition(".")[2] for target in found} >= {"forward", "backward"}
    assert found == {patch.target for patch in patches if "_VocabParallelCrossEntropy" in patch.target}


def test_a_file_of_ours_stands_for_its_patches(patches: list[Patch]) -> None:
    assert targets(["shared/mixed_precision.py"], patches) == {
        patch.target for patch in patches if "shared/mixed_precision.py:" in patch.where
    }


def test_several_names_and_none(patches: list[Patch]) -> None:
    names = ["adaptor_model_module", "megatron.optimizer.Adam"]
    assert targets(names, patches) == {*GUIDE["adaptor_model_module"], "megatron.optimizer:Adam"}
    assert called([], patches) == patches


@pytest.mark.parametrize(
    ("name", "close"),
    [
        ("VocabParalelEmbedding.forward", f"{CORE}.layers:VocabParallelEmbedding.forward"),
        ("adaptor_model_transformers", "adaptor_model_transformer"),
        ("mixed_precison.py", "mixed_precision.py"),
        ("zzzzzzzzzzzz", "part of a target"),
    ],
)
def test_an_unknown_name_is_told_close_ones(name: str, close: str, patches: list[Patch]) -> None:
    with pytest.raises(UsageError) as refused:
        called([name], patches)
    assert str(refused.value).startswith(f"there is no patch named {name}; ")
    assert close in str(refused.value)
    assert "megatron-npu patches list --static" in str(refused.value)


def test_a_function_that_is_not_patched_is_said_to_be_upstreams_own(patches: list[Patch]) -> None:
    """Where the name is right, no other name may be asked for: Megatron-DeepSpeed's embedding is its own."""
    others = [patch for patch in patches if "VocabParallelEmbedding" not in patch.target]
    with pytest.raises(UsageError) as refused:
        called(["VocabParallelEmbedding"], others)
    assert "if this Megatron defines it, upstream's own code runs" in str(refused.value)
    assert "; use " not in str(refused.value)


def test_a_file_of_the_guide_for_another_megatron_says_so(patches: list[Patch]) -> None:
    others = [patch for patch in patches if patch.target not in GUIDE["adaptor_schedules"]]
    with pytest.raises(UsageError, match="guide to Megatron-LM 285068c8, and this Megatron"):
        called(["adaptor_schedules"], others)


def test_every_close_name_is_found_itself(patches: list[Patch]) -> None:
    told = patch_names._close("VocabParallel", patches).split(" or ")
    assert told
    assert all(called([name], patches) for name in told)


# --- the commands, with the line of ours ------------------------------------------------------------------


def line_of(place: str) -> str:
    file, _, line = place.rpartition(":")
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    return "".join(lines[int(line) - 1 :][:2])  # its target may be on the next line


def test_the_ledger_tells_our_line(capsys: pytest.CaptureFixture) -> None:
    tree = str(checkout("megatron_lm", "285068c8"))
    command = ["ledger", "--static", "--megatron", tree, "adaptor_core_layers"]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert cli.main([*command, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["patches"]
    assert row["ours"].startswith("megatron_npu/adaptors/megatron_lm/loss_and_embedding.py:")
    assert "VocabParallelEmbedding" in line_of(row["ours"])
    assert f"\n{'':18}{row['ours']}\n" in text
    assert cli.main([*command, "--markdown"]) == 0
    assert f" | `{row['ours']}` | " in capsys.readouterr().out


def test_check_tells_our_line_of_what_fits_and_of_what_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    tree = checkout("megatron_lm", "285068c8")
    assert cli.main(["check", "--json", "--megatron", str(tree), "adaptor_core_layers"]) == 0
    (target,) = json.loads(capsys.readouterr().out)["targets"]
    (ours,) = target["ours"]
    assert "VocabParallelEmbedding" in line_of(ours)
    assert cli.main(["check", "--megatron", str(tree), "adaptor_core_layers"]) == 0
    assert f"ok     {target['target']}  {ours}\n" in capsys.readouterr().out
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(tree / "megatron", tmp_path / "megatron", ignore=ignore)
    file = tmp_path / "megatron/core/tensor_parallel/layers.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("def forward(self, input_):", "def forward(self, ids):"), encoding="utf-8")
    assert patch_commands.check(["--megatron", str(tmp_path), "adaptor_core_layers"]) == 1
    assert f"FAILS  {target['target']}\n       patched in {ours}\n" in capsys.readouterr().out
