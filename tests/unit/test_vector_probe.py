"""torch's inductor probes the processor with a Python program, which must not run a stranger's modules."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support import processes, tiny

_PROBES = """
import megatron_npu, torch
from torch._inductor import cpu_vec_isa
kinds = cpu_vec_isa.supported_vec_isa_list
simplest = [each for each in kinds if str(each) == "avx2"]  # each is probed in the same way, for seconds
kinds[:] = simplest or kinds
print(len(cpu_vec_isa.valid_vec_isa_list()))
"""


def test_no_module_of_the_working_directory_is_run(tmp_path: Path) -> None:
    """Without the settings of the test suite, which select plain C++ so that nothing is probed."""
    folder, mark = tmp_path / "stranger", tmp_path / "mark"
    folder.mkdir()
    for name in ("torch", "ctypes", "colorsys", "yaml", "random"):
        (folder / f"{name}.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    own = ("TORCHINDUCTOR_", "TORCH_COMPILE", "ATEN_CPU_CAPABILITY")
    env = {name: value for name, value in tiny.environment().items() if not name.startswith(own)}
    env["TORCHINDUCTOR_CACHE_DIR"] = str(tmp_path / "graphs")  # else the answer is taken from there
    argv = [sys.executable, "-P", "-c", _PROBES]
    done = processes.run(argv, cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0
    assert not mark.exists()
