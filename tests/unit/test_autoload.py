"""torch's entry point: arms the hook, unless it is told not to, and never makes ``import torch`` fail."""

from __future__ import annotations

import os
import sys

import pytest

from tests.conftest import ROOT
from tests.support import processes

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
    assert ("MEGATRON_NPU_AUTOLOAD=no" in done.stderr) == (value == "no")
