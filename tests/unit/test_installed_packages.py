"""Whether a package is installed: modules that a program has made itself are not, and end nothing."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megatron_npu.adaptors.shared.decorators import installed
from megatron_npu.base.installed_packages import is_installed, spec_of
from megatron_npu.upstream import early_import
from tests.conftest import checkout
from tests.support import processes

CODE = """
import sys
from types import ModuleType

for name in ("flash_attn", "apex", "deepspeed", "matplotlib"):
    sys.modules[name] = ModuleType(name)
import megatron_npu
import megatron.core.transformer.attention
assert vars(sys.modules["flash_attn"]).keys() == vars(ModuleType("flash_attn")).keys()
print({row.state for row in megatron_npu.ledger().rows})
"""


def test_what_is_there_and_what_is_not():
    assert is_installed("json.decoder")
    assert spec_of("json").origin.endswith("__init__.py")
    assert not is_installed("no_such_package_anywhere")


@pytest.mark.parametrize("stub", [ModuleType("stubbed"), type("Stub", (), {})()], ids=["module", "object"])
def test_a_stub_is_not_installed(monkeypatch, stub):
    monkeypatch.setitem(sys.modules, "stubbed", stub)
    assert not is_installed("stubbed")
    assert spec_of("stubbed") is None
    assert installed("stubbed") is None
    assert early_import.is_absent("stubbed")
    assert early_import.is_absent("stubbed.part")


def test_stubs_do_not_end_the_import_of_megatron():
    """A program that stubs the packages that it does without, as tutorials for machines without CUDA do."""
    environment = {
        **os.environ,
        "MEGATRON_NPU_DEVICE": "cpu",
        "PYTHONPATH": str(checkout("megatron_core", "0.16.1")),
    }
    done = processes.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "'failed'" not in done.stdout


def test_everybody_asks_here():
    """No other module of the package calls ``importlib.util.find_spec``, which a stub ends."""
    package = Path(early_import.__file__).parents[1]
    asking = [
        path.relative_to(package).as_posix()
        for path in package.rglob("*.py")
        if "util.find_spec(" in path.read_text(encoding="utf-8")
    ]
    # the launcher check asks another Python, in which nothing is a stub
    assert sorted(asking) == ["base/installed_packages.py", "doctor/launcher.py"]
