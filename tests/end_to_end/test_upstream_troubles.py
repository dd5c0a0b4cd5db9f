"""A Megatron that cannot be used: ``megatron-npu`` says so on standard error and ends with 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons
from tests.conftest import ROOT
from tests.support import processes, tiny, warm
from tests.support.fake_checkouts import make_core


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A stock script in miniature, in a folder without a Megatron."""
    path = tmp_path / "script" / "pretrain.py"
    path.parent.mkdir()
    path.write_text("import megatron.core.tensor_parallel.random\nprint('trained')\n")
    return path


def run(script: Path, *roots: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script with the given Megatrons in front of the path."""
    environment = tiny.environment()
    environment.pop("MEGATRON_LM_PATH", None)  # the tests' own; it would put another Megatron first
    environment |= variables
    environment["PYTHONPATH"] = os.pathsep.join([*map(str, roots), environment["PYTHONPATH"]])
    return warm.run(
        tiny.command("run", str(script)), env=environment, capture_output=True, text=True, check=False
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """Return what was said, checking that it is said the way that bad input is."""
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout
    return done.stderr


@pytest.mark.parametrize(("version", "age"), [("0.11.0", "old"), ("0.21.0", "new")])
def test_a_version_out_of_range(script: Path, tmp_path: Path, version: str, age: str) -> None:
    root = make_core(tmp_path / "core", version)
    # saying which of the two Megatrons is meant leaves its version to be refused
    message = refused(run(script, root, MEGATRON_LM_PATH=str(root)))
    assert f"megatron-core {version} in {root} is too {age}" in message
    assert message.count("\n") == 1


def test_two_megatrons(script: Path, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    root = make_core(tmp_path / "core", "0.12.1")
    message = refused(run(script, root))
    assert f"two Megatrons are on the path: 0.12.1 in {root} (first)" in message
    assert message.count("\n") == 1


def test_two_megatrons_in_a_program_that_imports_megatron_before_torch(tmp_path: Path) -> None:
    """As Megatron's tools/preprocess_data.py does: the hook finds Megatron there already."""
    pytest.importorskip("megatron.core")
    root = make_core(tmp_path / "core", "0.12.1")
    (root / "megatron" / "core" / "__init__.py").write_text("")
    (root / "megatron" / "core" / "tensor_parallel.py").write_text("")
    environment = tiny.environment()
    environment.pop("MEGATRON_LM_PATH", None)
    environment["PYTHONPATH"] = os.pathsep.join([str(root), environment["PYTHONPATH"]])
    command = [sys.executable, "-c", "import megatron.core, torch, megatron.core.tensor_parallel"]
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert f"two Megatrons are on the path: 0.12.1 in {root} (first)" in refused(done)


def test_a_tool_of_a_checkout_beside_another_megatron_runs_as_the_message_says(tmp_path: Path) -> None:
    """The tool appends its tree to the path, so that an installed Megatron comes first."""
    pytest.importorskip("megatron.core")
    tree = make_core(tmp_path / "tree", "0.12.1")
    (tree / "megatron" / "core" / "__init__.py").write_text("import torch\n")
    tool = tree / "tools" / "preprocess_data.py"
    tool.parent.mkdir()
    appends = f"import sys, megatron_npu\nsys.path.append({str(tree)!r})\n"
    tool.write_text(f"{appends}import megatron.core\nprint(megatron.core.__file__)\n")
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_LM_PATH"}
    options = {"cwd": tree, "capture_output": True, "text": True, "check": False}
    command = [sys.executable, "tools/preprocess_data.py"]
    message = refused(processes.run(command, env=environment | {"PYTHONPATH": str(ROOT)}, **options))
    assert f"set both MEGATRON_LM_PATH={tree} and PYTHONPATH={tree}:$PYTHONPATH" in message
    environment |= {"MEGATRON_LM_PATH": str(tree), "PYTHONPATH": f"{tree}:{ROOT}"}
    done = processes.run(command, env=environment, **options)
    assert done.stdout == f"{tree / 'megatron/core/__init__.py'}\n", done.stderr


@pytest.fixture
def drifted(tmp_path: Path) -> Path:
    """A copy of the installed megatron-core in which one patched function has another signature."""
    try:
        root = megatrons.find().root
    except UsageError:
        pytest.skip("no Megatron is installed")
    copy = tmp_path / "drifted"
    shutil.copytree(root / "megatron" / "core", copy / "megatron" / "core")
    path = copy / "megatron/core/tensor_parallel/random.py"
    text = path.read_text()
    assert "def _set_cuda_rng_state(" in text
    path.write_text(text.replace("def _set_cuda_rng_state(", "def _set_cuda_rng_state(extra, "))
    return copy


def test_drift_ends_the_run_and_names_the_place(script: Path, drifted: Path) -> None:
    message = refused(run(script, drifted))
    assert "megatron.core.tensor_parallel.random:_set_cuda_rng_state" in message
    assert str(drifted) in message
    assert "megatron-npu check" in message


def test_drift_can_be_made_a_warning(script: Path, drifted: Path) -> None:
    done = run(script, drifted, MEGATRON_NPU_DRIFT="warn")
    assert done.returncode == 0
    assert "trained" in done.stdout
    assert "megatron.core.tensor_parallel.random:_set_cuda_rng_state" in done.stderr
