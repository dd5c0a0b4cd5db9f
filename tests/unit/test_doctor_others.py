"""Which packages beside this one change Megatron, and who wins."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_npu.doctor import others


@pytest.fixture
def nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages, whatever this machine has."""
    monkeypatch.setattr(others.early_import, "is_absent", lambda name: True)


def test_what_is_absent_is_not_named(nothing: None) -> None:
    assert others.others() == {}
    assert others.advice({}) == []


def test_our_layers_are_not_taken_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    if not others.early_import.is_absent("transformer_engine"):
        pytest.skip("the case: TransformerEngine is there")
    monkeypatch.setenv("MEGATRON_NPU_TE", "local")
    assert "transformer_engine" not in others.others()


def test_each_is_named_with_its_owner_and_who_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("mindspeed", "megatron_adaptor", "transformer_engine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    info = tmp_path / "tenpu-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tenpu\nVersion: 1.2\n")
    (info / "top_level.txt").write_text("transformer_engine\n")
    found = others.others()
    assert list(found) == ["transformer_engine", "mindspeed", "megatron_adaptor"]
    assert found["transformer_engine"].startswith("tenpu 1.2: megatron-core uses its layers")
    assert found["mindspeed"].startswith(f"not installed with pip, {tmp_path / 'mindspeed'}")
    told = others.advice(found)
    assert [line.split()[0] for line in told] == ["mindspeed", "megatron_adaptor"]
    assert "MEGATRON_NPU_AUTOLOAD=0" in told[0]
