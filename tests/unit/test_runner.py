"""``megatron-npu run``: what the script finds."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli, run
from megatron_npu.upstream import stock_tools
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import multiprocessing
import os
import sys


def tell() -> None:
    package = sys.modules.get("megatron_npu")
    print(package is not None and package.installed(), os.environ.get("MEGATRON_NPU_AUTOLOAD"), flush=True)


if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("value", [None, "0"])
def test_the_script_and_its_children_are_armed_and_the_user_s_choice_stands(
    tmp_path: Path, value: str | None
) -> None:
    """What other programs the script starts is the user's business."""
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_NPU_AUTOLOAD"}
    environment |= {"PYTHONPATH": str(ROOT)} | ({} if value is None else {"MEGATRON_NPU_AUTOLOAD": value})
    done = processes.run(
        [sys.executable, "-m", "megatron_npu", "run", str(tmp_path / "script.py")],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == [f"True {value}"] * 2, done.stderr


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """What tells a Megatron-LM tree of megatron-core."""
    core = tmp_path / "Megatron-LM" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 16\nPATCH = 1\n")
    (tmp_path / "Megatron-LM" / "pretrain_gpt.py").touch()
    return tmp_path / "Megatron-LM"


def script_in(tree: Path, place: str, text: str = "") -> Path:
    path = tree / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_script_inside_a_tree_finds_what_lies_at_its_root(tree: Path) -> None:
    (tree / "model_provider.py").write_text("print('found')\n")
    script = script_in(tree, "examples/inference/gpt/static.py", "import model_provider")
    command = [sys.executable, "-m", "megatron_npu", "run", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "found\n"), done.stderr


def test_only_scripts_below_a_tree_are_of_it(tree: Path, tmp_path: Path) -> None:
    assert stock_tools.tree_of(script_in(tree, "tools/tool.py")) == tree
    assert stock_tools.tree_of(tree / "pretrain_gpt.py") is None  # its own folder is on the path already
    assert stock_tools.tree_of(script_in(tmp_path, "mine.py")) is None


def test_a_script_whose_own_megatron_is_hidden_is_refused(tree: Path, tmp_path: Path) -> None:
    """A regular package, as in the trees of 2023, wins over the namespace package beside the script."""
    old = tmp_path / "old" / "megatron"
    (old / "model").mkdir(parents=True)
    (old / "__init__.py").touch()
    (old / "model" / "transformer.py").touch()
    script = script_in(tree, "pretrain_gpt.py", "import megatron.core\nprint(megatron.core.__file__)")
    command = [sys.executable, "-m", "megatron_npu", "run", str(script)]
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_LM_PATH"}
    environment["PYTHONPATH"] = f"{old.parent}:{ROOT}"
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"pretrain_gpt.py belongs to megatron_core 0.16.1 ({tree})" in done.stderr
    assert f"Remove {old.parent} from the Python path." in done.stderr
    environment["MEGATRON_LM_PATH"] = str(tree)  # does not help against a regular package
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"MEGATRON_LM_PATH names megatron_core 0.16.1 ({tree})" in done.stderr
    assert f"Remove {old.parent} from the Python path, or unset MEGATRON_LM_PATH." in done.stderr


def test_a_script_of_another_megatron_than_the_named_one_is_refused(tree: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    core = other / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 19\nPATCH = 2\n")
    done = _run_without_megatron(script_in(tree, "pretrain_gpt.py"), MEGATRON_LM_PATH=str(other))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert f"finds megatron_core 0.16.1 ({tree}) first. Unset MEGATRON_LM_PATH" in done.stderr


def test_a_script_of_another_megatron_than_the_setting_names_is_refused(tree: Path, tmp_path: Path) -> None:
    old = script_in(tmp_path / "old", "megatron/model/transformer.py").parents[2]
    script = script_in(tree, "pretrain_gpt.py", "print('runs')")
    done = _run_without_megatron(script, MEGATRON_LM_PATH=str(old))
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"pretrain_gpt.py belongs to megatron_core 0.16.1 ({tree}), but MEGATRON_LM_PATH names "
        in done.stderr
    )
    assert f"Unset MEGATRON_LM_PATH, or set it to {tree}." in done.stderr


def test_the_converter_of_checkpoints_is_refused_with_the_way_round_it(tree: Path) -> None:
    if importlib.util.find_spec("transformer_engine"):
        pytest.skip("the case: TransformerEngine is installed: the converter is upstream's own")
    script = script_in(tree, "tools/checkpoint/convert.py")
    with pytest.raises(
        UsageError, match=r"requires TransformerEngine, .* is not installed. .*`megatron-npu convert`"
    ):
        run.main([str(script)])
    stock_tools.refuse(script_in(tree, "tools/checkpoint/other.py"))
    (tree / "megatron/core/package_info.py").unlink()  # 285068c8 has no such tool, and no such package
    stock_tools.refuse(script)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("tools/hf2megads_weight_converter.py", []),
        ("examples/multimodal/model_converter/internvit_converter.py", []),
        ("examples/multimodal/run_text_generation.py", ["--task", "MMMU"]),
    ],
)
def test_a_script_that_runs_code_of_files_is_refused_unless_they_are_trusted(
    tree: Path, name: str, arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script = script_in(tree, name)
    with pytest.raises(UsageError, match=r" executes .*MEGATRON_NPU_TRUST_FILES=1"):
        run.main([str(script), *arguments])
    monkeypatch.setenv("MEGATRON_NPU_TRUST_FILES", "1")
    stock_tools.refuse(script, arguments)
    monkeypatch.delenv("MEGATRON_NPU_TRUST_FILES")
    stock_tools.refuse(script_in(tree, "examples/multimodal/run_text_generation.py"), ["--task", "TextVQA"])


REDIRECTED = """
import multiprocessing
import helper
import torch


def tell() -> None:
    x = torch.ones(2).cuda()
    print(torch.cuda.device_count(), x.device, x.is_cuda, helper.is_cuda(x), flush=True)


if __name__ == "__main__":
    tell()
    child = multiprocessing.get_context("spawn").Process(target=tell)
    child.start()
    child.join()
"""


def test_a_program_without_megatron_is_redirected_with_its_children(tmp_path: Path) -> None:
    """Its own modules see tensors on the device as CUDA's, the packages that it uses do not."""
    (tmp_path / "script.py").write_text(REDIRECTED)
    (tmp_path / "helper.py").write_text("def is_cuda(tensor):\n    return tensor.is_cuda\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEGATRON_NPU_DEVICE": "cpu"}
    line = ["run", "--redirect", "--cpu-devices", "3", str(tmp_path / "script.py")]
    done = processes.run(
        [sys.executable, "-m", "megatron_npu", *line],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.splitlines() == ["3 cpu True True"] * 2, done.stderr


def test_flags_behind_the_script_are_the_script_s(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("import sys; print(sys.argv[1:])")
    done = processes.run(
        [sys.executable, "-m", "megatron_npu", "run", "script.py", "--redirect", "--help", "--", "-h"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "['--redirect', '--help', '--', '-h']\n", done.stderr


def test_a_script_is_found_one_folder_below(tmp_path: Path, monkeypatch, capsys) -> None:
    """As with the command ``run pretrain_gpt.py`` beside a clone instead of in it."""
    for name in ("pretrain_bert.py", "Megatron-LM/pretrain_gpt.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert cli.main(["run", "pretrain_gpt.py"]) == 2
    assert "does not exist, or is not a file. Did you mean Megatron-LM/pretrain_gpt.py?" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("given", "told"), [("pretrain_gtp.py", "Did you mean {}?"), ("nothing_like_it.py", "Check the path.")]
)
def test_a_misspelt_script_gets_the_nearest_one(tree: Path, given: str, told: str, capsys) -> None:
    (tree / "pretrain_gpt.py").touch()
    assert cli.main(["run", str(tree / given)]) == 2
    expected = told.format(tree / "pretrain_gpt.py")
    assert f"the script {tree / given} does not exist, or is not a file. {expected}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("imported", "told"),
    [
        ("gpt_builders", "Clone https://github.com/NVIDIA/Megatron-LM at the script's version, and set"),
        ("megatron.training", "is in a Megatron-LM checkout, not in the package megatron-core"),
        ("mindspeed.megatron_adaptor", "Remove this import from the script; no replacement is needed"),
    ],
)
def test_a_script_that_misses_what_only_a_checkout_has_is_told_in_one_line(
    tmp_path: Path, imported: str, told: str
) -> None:
    done = _run_without_megatron(script_in(tmp_path, "alone.py", f"import {imported}"))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert told in done.stderr


def test_a_python_without_torch_is_told_in_one_line(tmp_path: Path) -> None:
    script = script_in(tmp_path, "alone.py", "import torch")
    hidden = "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')"
    script_in(tmp_path, "hidden/torch/__init__.py", hidden)
    done = _run_without_megatron(script, PYTHONPATH=f"{tmp_path / 'hidden'}:{ROOT}")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "alone.py imports torch, which is not installed. Install the build for your device "
        "(docs/reference/versions.md#which-torch).\n"
    )


def test_an_absent_module_of_the_script_s_own_keeps_its_traceback(tmp_path: Path) -> None:
    done = _run_without_megatron(script_in(tmp_path, "alone.py", "import no_such_module"))
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert done.stderr.endswith("ModuleNotFoundError: No module named 'no_such_module'\n")


def test_a_megatron_path_without_megatron_is_not_passed_over(tree: Path, tmp_path: Path) -> None:
    script = script_in(tree, "pretrain_gpt.py", "print('runs')")
    for folder, told in (
        (tmp_path / "absent", "(MEGATRON_LM_PATH) does not exist"),
        (tmp_path, "there is no Megatron in"),
    ):
        done = _run_without_megatron(script, MEGATRON_LM_PATH=str(folder))
        assert (done.returncode, done.stdout) == (2, "")
        assert told in done.stderr
    assert _run_without_megatron(script, MEGATRON_LM_PATH=str(tree)).stdout == "runs\n"


def _run_without_megatron(script: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script where no checkout is on the path, but for those in ``variables``."""
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_LM_PATH"}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [sys.executable, "-m", "megatron_npu", "run", str(script)]
    return processes.run(command, env=environment, capture_output=True, text=True)
