"""``megatron-npu sim``: what a command sees, what it must not see, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.process import deepspeed_device
from megatron_npu.sim import activate, launcher, site
from tests.support import processes

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = [sys.executable, "-m", "megatron_npu", "sim"]


def launch(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run the launcher itself; no simulator is needed for what it refuses."""
    return processes.run(
        [*LAUNCHER, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def assert_refused(result: subprocess.CompletedProcess, *parts: str) -> None:
    """One line on standard error that has every part, exit code 2."""
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    for part in parts:
        assert part in result.stderr


class TestRefusals:
    def test_no_command(self):
        assert_refused(launch("--devices", "2", "--"), "no command", "-- COMMAND")

    @pytest.mark.parametrize(
        ("flag", "value", "expected"),
        [
            ("--devices", "0", "from 1 to 64"),
            ("--devices", "two", "from 1 to 64"),
            ("--soc", "H200", "Ascend"),
        ],
    )
    def test_a_bad_flag_is_named_and_no_variable(self, flag, value, expected):
        result = launch(flag, value, "--", "true")
        assert_refused(result, f"error: {flag} must be ", expected, "sim --help")
        assert "MEGATRON_NPU" not in result.stderr

    def test_an_unknown_command(self):
        assert_refused(launch("--", "no-such-program"), "no-such-program", "PATH")

    def test_a_command_of_ours_without_its_program(self):
        told = "Run megatron-npu sim -- megatron-npu doctor."
        assert_refused(launch("--devices", "2", "doctor"), "the command doctor was not found", told)

    def test_a_script_without_its_interpreter(self, tmp_path):
        script = tmp_path / "pretrain_gpt.py"
        script.write_text("")
        ways = (f"sim -- python {script},", f"sim -- megatron-npu run {script} for a script of Megatron.")
        assert_refused(launch("--", str(script)), f"the file {script} cannot be executed", *ways)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("DEVICES", "0"),
            ("DEVICES", "65"),
            ("DEVICES", "two"),
            ("MEMORY", "0"),
            ("MEMORY", "4T"),
            ("MEMCHECK", "yes"),
        ],
    )
    def test_a_bad_setting(self, name, value):
        variable = f"MEGATRON_NPU_SIM_{name}"
        assert_refused(
            launch("--", "python", "-c", "pass", **{variable: value}),
            f"{variable} must be ",
            f"but got {value}",
        )

    def test_no_compiler(self, tmp_path, simulated):
        result = launch(
            "--",
            "python",
            "-c",
            "pass",
            PATH=str(tmp_path),
            MEGATRON_NPU_SIM_CACHE=str(_cache_with_site(tmp_path)),
        )
        assert_refused(result, "no C++ compiler", "apt install g++")

    def test_a_cache_that_cannot_be_written(self, tmp_path, simulated):
        (tmp_path / "file").write_text("")
        result = launch(
            *("--", "python", "-c", "pass"),
            MEGATRON_NPU_SIM_SITE=str(site.prepare()),
            MEGATRON_NPU_SIM_CACHE=str(tmp_path / "file"),
        )
        assert_refused(result, f"cache {tmp_path / 'file'}", "MEGATRON_NPU_SIM_CACHE")

    def test_an_interrupted_preparation(self, tmp_path, simulated):
        """A compiler that presses Ctrl-C, once: several are at work at a time."""
        compiler = tmp_path / "bin" / "g++"
        compiler.parent.mkdir()
        compiler.write_text(f"#!/bin/sh\nmkdir {tmp_path}/pressed && kill -INT $PPID\nexec sleep 1\n")
        compiler.chmod(0o755)
        result = launch(
            *("--", "python", "-c", "pass"),
            PATH=os.pathsep.join([str(compiler.parent), os.environ["PATH"]]),
            MEGATRON_NPU_SIM_SITE=str(site.prepare()),
            MEGATRON_NPU_SIM_CACHE=str(tmp_path / "cache"),
        )
        assert result.returncode == 130, result.stderr
        assert "interrupted; the next use starts" in result.stderr.splitlines()[-1]
        assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]

    def test_no_wheel_for_this_torch(self, tmp_path):
        result = launch(
            *("--", "python", "-c", "pass"),
            MEGATRON_NPU_SIM_SITE="",
            MEGATRON_NPU_SIM_CACHE=str(tmp_path),
            PIP_NO_INDEX="1",
        )
        assert result.returncode == 2
        assert "no torch-npu==" in result.stderr.splitlines()[-1]
        assert not [path for path in tmp_path.iterdir() if path.suffix != ".lock"]

    def test_a_site_without_torch_npu(self, tmp_path):
        result = launch("--", "python", "-c", "pass", MEGATRON_NPU_SIM_SITE=str(tmp_path))
        assert_refused(
            result,
            f"MEGATRON_NPU_SIM_SITE must be a directory that contains torch_npu, but got {tmp_path}",
        )

    def test_a_site_for_another_torch(self, tmp_path):
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "version.py").write_text("__version__ = '1.11.0'\n")
        result = launch("--", "python", "-c", "pass", MEGATRON_NPU_SIM_SITE=str(tmp_path))
        assert_refused(
            result, "torch_npu 1.11.0", "torch_npu and torch must have the same version, but torch_npu"
        )

    @pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
    def test_a_real_cann(self, tmp_path):
        (tmp_path / "cann.c").write_text("int aclInit(const char* path) { return 0; }\n")
        library = tmp_path / "libascendcl.so"
        processes.run(["gcc", "-shared", "-fPIC", "-o", library, tmp_path / "cann.c"], check=True)
        result = launch("--", "python", "-c", "pass", LD_LIBRARY_PATH=str(tmp_path))
        assert_refused(result, "a real CANN", "set_env.sh")


def _cache_with_site(directory: Path) -> Path:
    """Return an empty cache; the wheel of this session's cache is found in it."""
    found = site.prepare()
    cache = directory / "cache"
    cache.mkdir()
    if not os.environ.get("MEGATRON_NPU_SIM_SITE"):
        (cache / found.name).symlink_to(found)
    return cache


class TestOutside:
    def test_torch_does_not_see_torch_npu(self, simulated):
        simulated("true")  # everything is prepared now
        code = (
            "import importlib.util, sys, torch\n"
            "assert 'torch_npu' not in sys.modules\n"
            "assert importlib.util.find_spec('torch_npu') is None\n"
            "assert not any('sim' in name for name in sys.modules if name.startswith('megatron_npu'))\n"
            "try: torch.ones(1, device='npu')\n"
            "except RuntimeError: print('no npu')"
        )
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        result = processes.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        assert result.stdout.strip() == "no npu", result.stderr

    def test_the_sources_are_in_the_package(self, tmp_path):
        processes.run(
            [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(tmp_path)], cwd=ROOT, check=True
        )
        for folder in ("csrc", "boot"):
            shipped = {path.name for path in (tmp_path / "megatron_npu" / "sim" / folder).iterdir()}
            assert shipped == {path.name for path in (ROOT / "megatron_npu" / "sim" / folder).glob("*.*")}


INSIDE = """
import os, subprocess, sys
assert sys.argv[1:] == ["a b", "--flag"], sys.argv
assert "torch" not in sys.modules
assert os.environ["HIDDEN_SITECUSTOMIZE"] == "ran"
assert "LD_LIBRARY_PATH" not in os.environ
assert os.environ["HCCL_EXEC_TIMEOUT"] == "77", "torch_npu would warn of a watchdog that ends before HCCL"
import torch
assert torch.npu.device_count() == 3 and torch.npu.get_device_name() == "Ascend910_9392"
assert "megatron_npu" not in sys.modules, "the simulator armed the plug-in"
from megatron_npu.sim import counting
import megatron_npu.sim.counters as counters
import megatron_npu
assert megatron_npu.installed() and megatron_npu.sim.counters is counters
child = "import torch; print(torch.ones(2, device='npu').sum().item(), torch.npu.device_count())"
print(subprocess.run([sys.executable, "-c", child], capture_output=True, text=True).stdout)
sys.exit(7)
"""


class TestInside:
    def test_python_is_that_of_this_environment_whatever_is_on_the_path(self, simulated):
        result = launch("--", "python", "-c", "import sys; print(sys.prefix)", PATH=os.defpath)
        assert result.stdout.split() == [sys.prefix], result.stderr

    def test_the_command_and_its_children(self, simulated, tmp_path):
        (tmp_path / "sitecustomize.py").write_text("import os\nos.environ['HIDDEN_SITECUSTOMIZE'] = 'ran'\n")
        (tmp_path / "script.py").write_text(INSIDE)
        result = launch(
            *("--devices", "3", "--soc", "Ascend910_9392", "--"),
            *("python", str(tmp_path / "script.py"), "a b", "--flag"),
            PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]),
            MEGATRON_NPU_AUTOLOAD="0",  # where the package is installed, torch would arm it
            MEGATRON_NPU_SIM_HCCL_TIMEOUT="77",
        )
        assert result.returncode == 7, result.stderr + result.stdout
        assert "2.0 3" in result.stdout

    def test_memory_limit_and_report(self, simulated, tmp_path):
        code = (
            "import torch\n"
            "x = torch.ones(8 << 20, dtype=torch.uint8, device='npu') + 1\n"
            "try: torch.empty(60 << 20, dtype=torch.uint8, device='npu')\n"
            "except torch.OutOfMemoryError: print('out of memory')\n"
            "print(torch.npu.mem_get_info()[1] >> 20, torch.npu.memory_stats()['num_ooms'])\n"
            "del x; torch.npu.empty_cache()\n"
            "torch.empty(60 << 20, dtype=torch.uint8, device='npu'); print('fits')"
        )
        report = tmp_path / "report.json"
        result = simulated(
            *("python", "-c", code),
            MEGATRON_NPU_SIM_MEMORY="64M",
            MEGATRON_NPU_SIM_REPORT=str(report),
            RANK="3",
        )
        for line in ("out of memory", "64 1", "fits"):
            assert line in result.stdout.splitlines(), result.stdout
        assert [path.name for path in tmp_path.iterdir()] == ["report.rank3.json"]
        content = json.loads((tmp_path / "report.rank3.json").read_text())
        assert content["launches"]["aten::add.Tensor"] == {"calls": 1, "bytes": 8 << 20}
        assert content["total_launches"] == sum(work["calls"] for work in content["launches"].values())
        assert content["peak"] >= 60 << 20

    def test_memcheck_fills_every_fresh_tensor(self, simulated):
        code = (
            "import torch\n"
            "for dtype in (torch.float32, torch.bfloat16, torch.float16):\n"
            "    x = torch.ones(1000, device='npu', dtype=dtype); del x\n"
            "    assert torch.empty(1000, device='npu', dtype=dtype).isnan().all()\n"
            "    assert torch.zeros(1000, device='npu', dtype=dtype).sum() == 0\n"
            "print('checked')"
        )
        result = simulated("python", "-c", code, MEGATRON_NPU_SIM_MEMCHECK="1")
        assert "checked" in result.stdout.splitlines(), result.stdout


def test_a_parents_stand_in_for_cann_is_forgotten(monkeypatch):
    """torch_npu of a child process would look for its folders."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # restored behind the test
    monkeypatch.setenv("ASCEND_HOME_PATH", "/usr/local/Ascend")
    activate.forget_stand_in()
    assert os.environ["ASCEND_HOME_PATH"] == "/usr/local/Ascend"
    monkeypatch.delenv("ASCEND_HOME_PATH")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # DeepSpeed is an extra
    deepspeed_device.choose("npu")
    assert "ASCEND_HOME_PATH" in os.environ
    activate.forget_stand_in()
    assert "ASCEND_HOME_PATH" not in os.environ


def test_ranks_of_torchrun_load_the_plugin_in_the_forks_of_the_tests_too(simulated):
    """A first fork loads torch_npu, which sets TORCH_DEVICE_BACKEND_AUTOLOAD=1 for what it starts."""
    loaded = "import sys, torch; print('loaded', {'torch_npu', 'megatron_npu'} <= set(sys.modules))"
    start = (
        "import os, subprocess, sys; subprocess.run([os.environ.get('PYTHON_EXEC', sys.executable), '-c', "
    )
    # with a number of NPUs a parent has imported torch alone
    done = simulated("python", "-c", f"{start}{loaded!r}])", MEGATRON_NPU_SIM_DEVICES="2")
    assert "loaded True" in done.stdout, done.stdout


FREES = """
import psutil, torch
process = psutil.Process()
before = process.memory_info().rss
torch.ones(64 * 2**20)
print((process.memory_info().rss - before) >> 20)
"""


def test_memory_that_kernels_free_is_used_again(simulated):
    done = simulated(sys.executable, "-c", FREES)
    assert done.returncode == 0, done.stdout
    assert int(done.stdout.splitlines()[-1]) > 150


@pytest.mark.usefixtures("simulated")  # or skip
def test_preparing_leaves_the_search_path_as_it_is() -> None:
    """``plan`` prepares in its own process, where importing torch_npu fails."""
    before = [*sys.path]
    launcher.prepare()
    assert sys.path == before
