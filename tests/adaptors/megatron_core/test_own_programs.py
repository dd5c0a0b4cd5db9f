"""Programs that are not Megatron's scripts: NVIDIA's example of a loop, and one that calls by keywords."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import LONGEST, ROOT, checkout
from tests.support import on_version, tiny, warm
from tests.support.simulated import run_simulated, unavailable
from tests.support.stock_core import git_status

EXAMPLE = "examples/run_simple_mcore_train_loop.py"
TAGS = {
    "0.12.1": "0.12.1",
    "0.16.1": "0.16.1",
    "0.19.0": "0.19.1",
}  # of a tree, and what its core calls itself


@pytest.mark.parametrize(
    ("tag", "device"), [*((tag, "cpu") for tag in TAGS), ("0.16.1", "npu")], ids=lambda value: value
)
def test_nvidias_example_runs_unedited(tag: str, device: str, tmp_path: Path) -> None:
    """It trains in tensor-parallel ranks, saves and loads by keywords, and moves Megatron's DDP."""
    tree = checkout("megatron_core", TAGS[tag])
    before = git_status(tree)
    command = tiny.command("run", str(tree / EXAMPLE), processes=2)
    # with 0.16.1 the program itself imports Megatron, as it does in the next test
    modules = warm.NPU if device == "npu" else () if tag == "0.16.1" else warm.STOCK
    done = run(command, device, tmp_path, {"MEGATRON_LM_PATH": str(tree)}, modules)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr or ''}"[-6000:]
    assert done.stdout.count("Successfully loaded the model") == 2
    assert done.stdout.count("lm loss") == 10
    assert (tmp_path / "ckpt" / "metadata.json").is_file()
    assert git_status(tree) == before


@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md"])
def test_the_first_page_names_it_as_a_way_in(page: str) -> None:
    line = f"torchrun --nproc-per-node 2 -m megatron_npu run Megatron-LM/{EXAMPLE}"
    assert re.search(rf"^{re.escape(line)}( +#.*)?$", (ROOT / page).read_text(encoding="utf-8"), re.M)


def run(
    command: list[str], device: str, folder: Path, variables: dict[str, str], modules: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    if device == "npu":
        if unavailable():
            pytest.skip(unavailable())
        return run_simulated(*command, cwd=folder, timeout=LONGEST, modules=modules, **variables)
    return warm.run(
        command,
        env=tiny.environment() | variables,
        modules=modules,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def losses_of_own_program(version: str, folder: Path) -> str:
    """Return the losses after which the program, which ``run`` starts with a version, goes on bit for bit."""
    program = Path(__file__).with_name("own_program.py")
    command = tiny.command("run", str(program), str(folder / "checkpoint"), processes=2)
    modules = () if version == "0.16.1" else warm.DRIVER
    return went_on(run(command, "cpu", folder, on_version.environment(version), modules))


def went_on(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-4000:]
    (losses,) = re.findall(r"goes on bit for bit after (.*)", done.stdout)
    return losses


@pytest.fixture(scope="module")
def with_0_16(tmp_path_factory: pytest.TempPathFactory) -> str:
    return losses_of_own_program("0.16.1", tmp_path_factory.mktemp("0.16"))


def test_a_program_with_every_call_by_keywords_runs_unedited(with_0_16: str) -> None:
    """Distributed optimizer, schedule, checkpoint; what goes on from it has the same losses, bit for bit."""
    assert with_0_16.count(",") == 2


@pytest.mark.parametrize("version", ["0.19.2", on_version.MAIN])
def test_so_it_does_on_newer_ones(version: str, tmp_path: Path) -> None:
    assert losses_of_own_program(version, tmp_path).count(",") == 2


def test_names_that_were_bound_before_the_plugin_came_are_patched_too(with_0_16: str, tmp_path: Path) -> None:
    """As verl's and ms-swift's modules bind them. Newer ones than 0.16.1 need triton to be imported so."""
    program = Path(__file__).with_name("own_program_late.py")
    command = [sys.executable, *tiny.torchrun(2), str(program), str(tmp_path / "checkpoint")]
    variables = {"MEGATRON_NPU_AUTOLOAD": "0"}
    assert went_on(run(command, "cpu", tmp_path, on_version.environment("0.16.1") | variables)) == with_0_16


ON_REQUEST = pytest.mark.skipif(
    os.environ.get("TEST_EVERY_VERSION") != "1", reason="TEST_EVERY_VERSION=1 runs it"
)


@pytest.mark.parametrize(
    ("version", "device"),
    [
        ("0.19.2", "cpu"),
        *(
            pytest.param(version, device, marks=ON_REQUEST)
            for version, device in (("0.19.2", "npu"), (on_version.MAIN, "cpu"), (on_version.MAIN, "npu"))
        ),
    ],
)
@pytest.mark.parametrize("program", ["own_policy.py", "own_objects.py"])
def test_core_as_verl_and_ms_swift_use_it(version: str, device: str, program: str, tmp_path: Path) -> None:
    """Names by value, packed answers, configuration by objects; a resume has the same bits."""
    path = str(Path(__file__).with_name(program))
    command = [sys.executable, *tiny.torchrun(2), path, str(tmp_path / "checkpoint")]
    modules = warm.DRIVER if (version, device) == ("0.19.2", "cpu") else ()
    done = run(command, device, tmp_path, on_version.environment(version), modules)
    assert done.returncode == 0, f"{done.stdout[-4000:]}{done.stderr or ''}"[-6000:]
    assert done.stdout.count("goes on bit for bit") == 1


@ON_REQUEST
@pytest.mark.parametrize("version", ["0.19.2", on_version.MAIN])
@pytest.mark.parametrize("program", ["own_policy.py", "own_objects.py"])
def test_the_plugin_may_come_behind_what_they_have_bound(version: str, program: str, tmp_path: Path) -> None:
    """Without triton these versions cannot be imported before the plug-in at all."""
    pytest.importorskip("triton")
    path = str(Path(__file__).with_name(program))
    command = [sys.executable, *tiny.torchrun(2), path, str(tmp_path / "checkpoint")]
    variables = {"MEGATRON_NPU_AUTOLOAD": "0", "LATE": "1"}
    done = run(command, "cpu", tmp_path, on_version.environment(version) | variables)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("goes on bit for bit") == 1
