"""``transformer_engine`` imported before Megatron: found where our layers are asked for, absent elsewhere."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import early_import
from megatron_npu.upstream.megatrons import Upstream
from tests.support import processes, tiny

LIBRARY = """
import importlib.util
import sys
import torch
assert importlib.util.find_spec("transformer_engine") is not None
assert not any(name.split(".")[0] == "transformer_engine" for name in sys.modules), "only asked"
import transformer_engine
import transformer_engine.pytorch as te
from transformer_engine.pytorch import Linear
assert "megatron.core" not in sys.modules
from megatron.core.extensions.transformer_engine import HAVE_TE, TELinear
assert HAVE_TE
assert issubclass(TELinear, Linear)
assert transformer_engine.pytorch is te
from importlib import metadata
assert metadata.version("transformer-engine") == transformer_engine.__version__
assert "transformer-engine" not in {each.name for each in metadata.distributions()}
"""
CORE = Upstream("megatron_core", "0.16.1", Path())


@pytest.mark.parametrize("started", ["by python", "by megatron-npu run, before torch"])
def test_a_library_may_import_it_before_megatron(tmp_path: Path, started: str) -> None:
    environment = tiny.environment() | {"MEGATRON_NPU_TE": "local"}
    script = tmp_path / "script.py"
    ran = "run" in started
    script.write_text(LIBRARY.replace("import torch\n", "") if ran else LIBRARY)
    command = tiny.command("run", str(script)) if ran else [sys.executable, str(script)]
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture
def activated(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The finder alone, in place; what its activation has done."""
    done: list[str] = []
    early_import.disarm()
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    monkeypatch.setenv("MEGATRON_NPU_TE", "local")
    monkeypatch.setattr(early_import.megatrons, "find", lambda: CORE)
    early_import.arm(lambda: done.append("activated"))
    early_import.arm(lambda: done.append("again"))
    return done


def test_asking_changes_nothing_and_an_import_activates_once(activated: list[str]) -> None:
    assert importlib.util.find_spec("transformer_engine") is not None
    assert importlib.util.find_spec("transformer_engine_torch") is None
    with pytest.raises(metadata.PackageNotFoundError):
        metadata.version("transformer-engine")
    assert activated == []
    with pytest.raises(ImportError, match="no stub of transformer_engine"):
        import transformer_engine  # noqa: F401
    assert activated == ["activated"]


@pytest.mark.parametrize("reason", ["not asked for", "another Megatron", "no Megatron", "disarmed"])
def test_elsewhere_it_is_absent(activated: list[str], monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    def none_there() -> Upstream:
        raise UsageError("no Megatron", "one", "Install one.")

    old = Upstream("megatron_lm", "285068c8", Path())
    match reason:
        case "not asked for":
            monkeypatch.delenv("MEGATRON_NPU_TE")
        case "another Megatron":
            monkeypatch.setattr(early_import.megatrons, "find", lambda: old)
        case "no Megatron":
            monkeypatch.setattr(early_import.megatrons, "find", none_there)
        case "disarmed":
            early_import.disarm()
    assert importlib.util.find_spec("transformer_engine") is None
    with pytest.raises(ModuleNotFoundError):
        import transformer_engine  # noqa: F401
    assert activated == []
