"""``megatron-npu doctor`` on this machine, and its advice about machines that are not well."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.commands import cli
from megatron_npu.doctor import collectives, command, launcher, operations, software
from megatron_npu.doctor.advice import advice
from megatron_npu.ops import dispatch
from megatron_npu.upstream import megatrons
from tests.conftest import LONGEST
from tests.support import processes, tiny, warm

pytest.importorskip("megatron.core")


@pytest.fixture
def healthy() -> dict:
    """A report with nothing to advise."""
    return {
        "versions": {"torch": "2.13.0+cpu"},
        "megatron": {"upstream": "megatron_core", "version": "0.16.1", "root": "/x", "failing": []},
        "devices": {"npu": "absent", "cuda": "absent", "cpu": "1 with gloo", "selected": "cpu", "each": []},
        "ledger": {"failed": [], "not_imported": []},
        "operations": {"failures": {}, "beyond_limit": []},
        "communication": {"all_reduce": "right"},
    }


@pytest.fixture
def megatron(tmp_path) -> Path:
    """An unpacked megatron-core of another version: nothing but its number."""
    core = tmp_path / "old" / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
    (core / "package_info.py").write_text("MAJOR = 0\nMINOR = 11\nPATCH = 0\nPRE_RELEASE = ''\n")
    return tmp_path / "old"


def doctor(*flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return processes.run(
        [sys.executable, "-m", "megatron_npu", "doctor", *flags],
        env=tiny.environment() | variables,
        capture_output=True,
        text=True,
        timeout=LONGEST,
        check=False,
    )


def operation_names() -> set[str]:
    """Return the name of every operation, in whichever module, that a CPU does not do by its formula."""
    return {
        operation.name
        for operation in dispatch.all_operations()
        if operation.implementations["cpu"].function is not operation.reference
    }


def _put_torchrun_first(folder: Path, monkeypatch: pytest.MonkeyPatch, first_line: str) -> Path:
    """Put a ``torchrun`` with this first line first on PATH; a virtual environment need not have one."""
    folder.mkdir(exist_ok=True)
    script = folder / "torchrun"
    script.write_text(f"{first_line}\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return script


@pytest.fixture
def inspected(monkeypatch, capsys, tmp_path):
    """Return a function: flags -> the report of a quick examination in this process."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))  # this user's may hold a lock
    _put_torchrun_first(tmp_path / "bin", monkeypatch, f"#!{sys.executable}")

    def run(*flags: str) -> dict:
        code = cli.main(["doctor", "--quick", "--json", *flags])
        report = json.loads(capsys.readouterr().out)
        assert code == int(bool(report["advice"]))
        return report

    return run


def test_this_machine_is_well(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))  # this user's may hold a stale lock
    # what it starts is forked; tests/unit/test_python_child.py lets all of it start from nothing
    [program], env = warm.ready([sys.executable], tiny.environment(), warm.DRIVER)
    code = f"import sys; sys.executable = {program!r}; from megatron_npu.commands import cli"
    command = [program, "-c", f"{code}; sys.exit(cli.main(['doctor', '--json']))"]
    done = processes.run(command, env=env, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["advice"] == []
    assert done.returncode == 0
    assert report["versions"]["gloo"]
    assert report["devices"]["selected"] == "cpu"
    (cpu,) = report["devices"]["each"]
    assert 0 < cpu["free_mib"] < cpu["total_mib"]
    assert report["megatron"]["failing"] == []
    assert report["megatron"]["pins"]["same"] > 30
    assert " applied, 0 drifted" in report["ledger"]["summary"]
    assert report["operations"]["failures"] == {}
    errors = report["operations"]["largest_error"]
    assert operation_names() | operations.DRAWING.keys() <= errors.keys()
    assert max(errors.values()) > 0  # bf16 rounds: a test that compares nothing finds nothing
    assert {check.__name__ for check in collectives.CHECKS} <= report["communication"].keys()
    assert report["communication"]["processes"] == 2
    there = importlib.util.find_spec("deepspeed") is not None
    assert report["deepspeed"] == ({"accelerator": "cpu", "communication": "gloo"} if there else {})


def test_an_absent_device_is_told(inspected, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "npu")
    assert any("MEGATRON_NPU_DEVICE=npu" in line for line in inspected()["advice"])


def test_a_misspelt_variable_is_told(inspected, monkeypatch):
    monkeypatch.setenv("MEGATRON_NPU_STRIKT", "1")
    (line,) = inspected()["advice"]
    assert "Use MEGATRON_NPU_STRICT, or unset" in line


def test_a_megatron_that_is_too_old_is_told(inspected, megatron):
    (line,) = inspected("--megatron", str(megatron))["advice"]
    assert "megatron-core 0.11.0" in line
    assert "is too old" in line


def test_a_torchrun_of_another_python_is_told_first(inspected, megatron, monkeypatch, tmp_path):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    other = tmp_path / "other" / "python3"
    other.parent.mkdir()
    other.write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')  # -S: without packages
    other.chmod(0o755)
    script = _put_torchrun_first(tmp_path / "first", monkeypatch, f"#!{other}")
    report = inspected("--megatron", str(megatron))
    assert report["launcher"] == {"torchrun": str(script), "python": str(other), "lacks": "megatron_npu"}
    assert report["advice"][0] == (
        f"torchrun ({script}) starts {other}, which does not have this package. Instead of `torchrun`, use "
        f"`{sys.executable} -m torch.distributed.run`."
    )
    assert len(report["advice"]) == 2


@pytest.mark.parametrize("first_line", ["#!/bin/sh", "", "#!/usr/bin/env python3-that-is-absent"])
def test_a_launcher_whose_python_is_not_known_is_no_fault(first_line, monkeypatch, tmp_path):
    script = _put_torchrun_first(tmp_path / "bin", monkeypatch, first_line)
    assert launcher.launcher() == {"torchrun": str(script)}
    assert launcher._beginning(str(tmp_path)) == ""  # what cannot be read, as a file that is executable only
    assert launcher.advice(launcher.launcher()) == []


def test_a_torchrun_of_another_copy_is_told(monkeypatch, tmp_path):
    (tmp_path / "megatron_npu").mkdir()
    (tmp_path / "megatron_npu" / "__init__.py").touch()
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} -S "$@"\n')
    other.chmod(0o755)
    _put_torchrun_first(tmp_path / "bin", monkeypatch, f"#!/usr/bin/env {other.name}")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (line,) = launcher.advice(launcher.launcher())
    assert f"starts {other}, which imports another copy of this package ({tmp_path / 'megatron_npu'})" in line


def test_the_named_megatron_is_the_one_that_is_looked_at(inspected, megatron, monkeypatch):
    monkeypatch.setenv("MEGATRON_LM_PATH", str(megatron))
    assert inspected()["megatron"]["root"] == str(megatron)


def test_a_folder_without_megatron_is_bad_usage(tmp_path, capsys):
    assert cli.main(["doctor", "--megatron", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"no Megatron in {tmp_path}" in error


def test_a_device_package_that_breaks_torch_is_told(tmp_path):
    """torch loads every installed device package when it is imported, and fails with the package's error."""
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[torch.backends]\nbroken = broken_device:load\n")
    (tmp_path / "broken_device.py").write_text("def load():\n    raise OSError('libdriver.so: not found')\n")
    path = f"{tmp_path}:{tiny.environment()['PYTHONPATH']}"
    done = doctor("--quick", PYTHONPATH=path, TORCH_DEVICE_BACKEND_AUTOLOAD="1")
    assert done.returncode == 1
    advised = done.stdout.partition("\nadvice\n")[2]
    assert "OSError: libdriver.so: not found" in advised
    assert "the fault is in a device package" in advised
    assert "Traceback" not in done.stdout + done.stderr


def test_another_megatron_in_the_working_directory_is_told(inspected, megatron, monkeypatch):
    monkeypatch.chdir(megatron)
    found = inspected()
    assert found["megatron"]["working_directory"] == f"0.11.0 in {megatron}"
    assert any("--megatron ." in line for line in found["advice"])


def test_in_the_guide_the_megatron_around_the_clone_is_looked_at(inspected, megatron, monkeypatch):
    """Ascend's guide clones this project into Megatron-LM; its scripts take it, whatever is installed."""
    clone = megatron / "megatron_npu"
    (clone / "tests_gpt").mkdir(parents=True)
    (clone / "megatron_npu").symlink_to(tiny.ROOT / "megatron_npu")
    monkeypatch.chdir(clone / "tests_gpt")
    found = inspected()["megatron"]
    assert found["root"] == str(megatron)
    assert "the checkout that contains the clone of megatron_npu" in found["found_by"]


def test_a_checkout_is_looked_at_from_inside_where_nothing_is_installed(inspected, megatron, monkeypatch):
    monkeypatch.setattr(megatrons, "_roots_on_path", lambda: [megatron] if str(megatron) in sys.path else [])
    monkeypatch.chdir(megatron)
    found = inspected()["megatron"]
    assert found["root"] == str(megatron)
    assert "the working directory" in found["found_by"]


def test_a_driver_is_read_from_its_own_file(tmp_path, monkeypatch):
    line = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023\n"
    (tmp_path / "nvidia").write_text(line)
    (tmp_path / "ascend").write_text("Package_name=driver\nVersion=24.1.0\n")
    monkeypatch.setattr(software, "_NVIDIA_DRIVER", tmp_path / "nvidia")
    monkeypatch.setattr(software, "_ASCEND_DRIVER", tmp_path / "ascend")
    found = software.versions()
    assert found["nvidia driver"] == "535.104.05"
    assert found["ascend driver"] == "Version=24.1.0"


def test_the_toolkit_is_read_from_where_cann_says(tmp_path, monkeypatch):
    (tmp_path / "aarch64-linux").mkdir()
    (tmp_path / "aarch64-linux" / "ascend_toolkit_install.info").write_text("package=x\nversion=8.0.RC3\n")
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", str(tmp_path))
    assert software.versions()["cann"] == "version=8.0.RC3"


def test_nothing_is_wrong(healthy):
    assert advice(healthy) == []
    assert "a run with megatron_core 0.16.1 is expected to work" in command.text(healthy | {"advice": []})


_NPU = {"npu": "8 with hccl", "cuda": "absent", "selected": "npu"}


@pytest.mark.parametrize(
    ("part", "content", "told"),
    [
        ("torch", {"error": "import torch fails"}, "import torch fails"),
        ("megatron", {"error": "no Megatron on the Python path"}, "no Megatron on the Python path"),
        ("megatron", {"root": "/x", "failing": ["a:b"]}, "megatron-npu check --megatron /x"),
        ("versions", {"torch": "2.13.0", "torch-npu": "2.13.0"}, "set_env.sh"),
        ("versions", {"torch": "2.13.0", "cuda of torch": "12.8", "nvidia driver": "535.104"}, "nvidia-smi"),
        ("versions", {"torch": "2.13.0", "apex": "0.9.10.dev0"}, "pip uninstall apex"),
        ("versions", {"torch": "2.13.0", "transformer-engine": "2.1.0"}, "it requires CUDA"),
        (
            "devices",
            {**_NPU, "each": [{"device": "npu:0", "free_mib": 3, "total_mib": 64}]},
            "another process",
        ),
        ("devices", {**_NPU, "shared_memory_mib": 64}, "--shm-size"),
        ("ledger", {"failed": ["a:b: gone"]}, "patch failed: a:b: gone"),
        ("ledger", {"not_imported": ["not imported: No module named 'pydantic'"]}, "'pydantic'"),
        ("ledger", {"error": "exit code 1"}, "exit code 1"),
        ("operations", {"failures": {"norm": "RuntimeError: x"}}, "norm fails: RuntimeError: x"),
        (
            "operations",
            {"beyond_limit": ["rotary"], "largest_error": {"rotary": 0.5}},
            "rotary deviates too much",
        ),
        ("operations", {"error": "exit code -11"}, "exit code -11"),
        ("deepspeed", {"error": "ImportError: x"}, "DeepSpeed does not start: ImportError: x"),
        ("communication", {"error": "rank 0: no result after 180 seconds"}, "GLOO_SOCKET_IFNAME"),
    ],
)
def test_advice(healthy, part, content, told):
    (line,) = advice(healthy | {part: content})
    assert told in line


def test_a_torch_for_cuda_is_well_where_no_nvidia_driver_is(healthy):
    """PyPI's torch is one, and the pages for the CPU say that it will do."""
    versions = {"torch": "2.13.0+cu130", "cuda of torch": "13.0", "nvidia driver": None}
    assert advice(healthy | {"versions": versions}) == []


def test_a_torch_npu_of_another_torch_is_told(healthy):
    versions = {"torch": "2.12.0", "torch-npu": "2.13.0.post1"}
    (line,) = advice(healthy | {"versions": versions, "devices": {**_NPU, "each": []}})
    assert "Install torch-npu 2.12.*" in line


@pytest.mark.skipif(shutil.which("true") is None, reason="needs the command true")
def test_a_test_that_ends_without_an_answer_is_an_error(monkeypatch):
    from megatron_npu.doctor import subprocess_checks

    monkeypatch.setattr(sys, "executable", shutil.which("true"))
    assert subprocess_checks.ledger("/x") == {"error": "no answer"}
