"""torch's entry point: arms the hook, unless it is told not to, and never makes ``import torch`` fail."""

from __future__ import annotations

import os
import re
import sys

import pytest

from megatron_npu import plugin
from megatron_npu.base.errors import UsageError
from megatron_npu.process import spawn_without_gpus
from tests.conftest import ROOT
from tests.support import processes
from tests.support.simulated import simulated  # noqa: F401  a fixture

CODE = """
import sys
import torch
print("armed" if "megatron_npu" in sys.modules and sys.modules["megatron_npu"].installed() else "unarmed")
print("megatron" in sys.modules)
import megatron_npu
print(megatron_npu.installed())
"""


@pytest.fixture
def installed(tmp_path):
    """A path on which this project is installed, as far as entry points are concerned."""
    info = tmp_path / "megatron_npu-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_npu\nVersion: 0\n")
    target = "megatron_npu_autoload:arm"
    assert f'"torch.backends"]\nmegatron_npu = "{target}"\n' in (ROOT / "pyproject.toml").read_text()
    (info / "entry_points.txt").write_text(f"[torch.backends]\nmegatron_npu = {target}\n")
    return os.pathsep.join([str(tmp_path), str(ROOT)])


@pytest.mark.parametrize(
    ("value", "state"), [(None, "armed"), ("1", "armed"), ("0", "unarmed"), ("no", "armed")]
)
def test_import_torch(installed, tmp_path, value, state):
    environment = {name: text for name, text in os.environ.items() if name != "MEGATRON_NPU_AUTOLOAD"}
    environment |= {"PYTHONPATH": installed} | ({} if value is None else {"MEGATRON_NPU_AUTOLOAD": value})
    done = processes.run(
        [sys.executable, "-c", CODE],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    # importing the package arms the hook whatever the variable says
    assert done.stdout.split() == [state, "False", "True"]
    assert ("MEGATRON_NPU_AUTOLOAD must be 0 or 1, but got no" in done.stderr) == (value == "no")


PLAIN = """
import torch
import torch.multiprocessing as mp

if __name__ == "__main__":
    print(torch.cuda.device_count(), torch.ones(1).to("cuda").is_cuda if torch.cuda.device_count() else None)
    mp.spawn(print, nprocs=0)
"""


def plain(folder, installed, **variables):
    (folder / "plain.py").write_text(PLAIN)
    kept = {name: text for name, text in os.environ.items() if not name.startswith("MEGATRON_NPU_")}
    return processes.run(
        [sys.executable, "plain.py"],
        env={**kept, "PYTHONPATH": installed, "CUDA_VISIBLE_DEVICES": "", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_plain_program_is_redirected_where_the_environment_says_so(installed, tmp_path):
    done = plain(
        tmp_path,
        installed,
        MEGATRON_NPU_REDIRECT="1",
        MEGATRON_NPU_DEVICE="cpu",
        MEGATRON_NPU_CPU_DEVICES="3",
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["3", "True"], "")


def test_a_plain_program_that_starts_no_process_is_told_why(installed, tmp_path):
    done = plain(tmp_path, installed)
    if done.stdout.split()[0] != "0":
        pytest.skip("the case: a machine without a GPU")
    assert done.returncode == 0
    assert "starts no process. If nprocs is torch.cuda.device_count(), the reason is that" in done.stderr
    told = "no CUDA device. To map torch.cuda to this machine's CPU, set MEGATRON_NPU_REDIRECT=1"
    assert told in done.stderr


ASKS_CUDA_FIRST = """
import torch
import torch.multiprocessing as mp

if __name__ == "__main__":
    kind = "cuda" if torch.cuda.is_available() else "npu" if torch.npu.is_available() else "cpu"
    print(kind, torch.cuda.device_count(), torch.ones(1, device=kind).device)
    mp.spawn(print, nprocs=torch.cuda.device_count())
"""


def test_a_plain_program_is_not_redirected_by_itself_and_is_told_of_the_npus(
    installed,
    tmp_path,
    simulated,  # noqa: F811
):
    """CUDA is asked for first by programs that know NPUs, too; they must find none."""
    (tmp_path / "plain.py").write_text(ASKS_CUDA_FIRST)
    variables = {"PYTHONPATH": installed, "MEGATRON_NPU_SIM_DEVICES": "2"}
    # env: no parent that has imported torch
    done = simulated("env", sys.executable, "plain.py", cwd=tmp_path, **variables)
    assert done.returncode == 0, done.stdout
    assert "npu 0 npu:0" in done.stdout
    told = "no CUDA device, but 2 NPUs. To map torch.cuda to the NPUs, set MEGATRON_NPU_REDIRECT=1"
    assert told in done.stdout


def test_a_machine_with_gpus_is_not_said_to_have_none():
    said = spawn_without_gpus.explanation(2, lambda: pytest.fail("NPUs are counted for nothing"))
    assert said.endswith("starts no process. This machine has 2 CUDA devices.")


@pytest.mark.parametrize(("name", "value"), [("REDIRECT", "yes"), ("DEVICE", "npu")])
def test_a_redirection_that_cannot_be_had_ends_the_program_with_a_line(installed, tmp_path, name, value):
    done = plain(tmp_path, installed, **{"MEGATRON_NPU_REDIRECT": "1", f"MEGATRON_NPU_{name}": value})
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert re.search(rf"MEGATRON_NPU_{name}(=| must be .* but got ){value}", done.stderr)


def test_a_choice_of_npus_that_comes_too_late_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", sys)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,3")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    with pytest.raises(UsageError, match=r"CUDA_VISIBLE_DEVICES=1,3 .* ASCEND_RT_VISIBLE_DEVICES"):
        plugin.redirect_program()
