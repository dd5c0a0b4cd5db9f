"""Finding the Megatron on the path without importing it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.upstream import megatrons
from tests.support.fake_checkouts import make_core, make_legacy


@pytest.fixture
def path(monkeypatch):
    """Return a function that makes the given folders the whole of ``sys.path`` for Megatron."""

    def use(*roots: Path) -> None:
        monkeypatch.setattr(sys, "path", [str(root) for root in roots])

    return use


@pytest.mark.parametrize("namespace", [True, False])
def test_finds_the_version_unimported(tmp_path, path, namespace):
    root = make_core(tmp_path, "0.15.3", namespace)
    path(root)
    found = megatrons.find()
    assert (found.name, found.version, found.root) == ("megatron_core", "0.15.3", root)
    found.require_supported()


def test_finds_the_legacy_tree(tmp_path):
    found = megatrons.find(make_legacy(tmp_path))
    assert (found.name, found.version) == ("megatron_lm", "unknown"), "its files are not those of the commit"


def test_both_megatron_deepspeeds_are_known(tmp_path):
    root = make_legacy(tmp_path)
    (root / "megatron" / "model" / "gpt_model.py").write_text("from deepspeed.pipe import PipelineModule\n")
    found = megatrons.find(root)
    assert (found.name, found.version) == ("megatron_deepspeed", "unknown")
    found.require_supported()  # the pins tell what differs
    (root / "megatron" / "core").mkdir()
    found = megatrons.find(root)
    assert (found.name, found.version) == ("megatron_deepspeed_core", "unknown")
    found.require_supported()


def test_the_legacy_tree_wins_wherever_it_is_on_the_path(tmp_path, path):
    """As for Python: a regular package before every portion of a namespace; so nothing can mix."""
    core, legacy = make_core(tmp_path / "core", "0.16.1"), make_legacy(tmp_path / "legacy")
    path(core, legacy)
    found = megatrons.find()
    assert (found.name, found.root) == ("megatron_lm", legacy)
    found.require_supported()


def test_none_at_all(tmp_path, path, monkeypatch):
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    path(tmp_path)
    with pytest.raises(UsageError, match=r"no Megatron on the Python path;.*pip install megatron-core"):
        megatrons.find()


def test_the_variable_is_named_where_it_leads_nowhere(tmp_path, path, monkeypatch):
    path(tmp_path)
    monkeypatch.setenv("MEGATRON_LM_PATH", "/no/such")
    with pytest.raises(UsageError, match=r"on the Python path, nor in /no/such \(MEGATRON_LM_PATH\)"):
        megatrons.find()


@pytest.mark.parametrize(("given_by", "told"), [("", "the path"), ("--megatron", "--megatron")])
def test_a_named_folder_without_a_megatron(tmp_path, given_by, told):
    """Installing another is no help to who has named one."""
    with pytest.raises(UsageError, match=f"no Megatron in .*Correct {told}") as caught:
        megatrons.find(tmp_path, given_by)
    assert "pip install" not in str(caught.value)
    with pytest.raises(UsageError, match=f"the folder .*absent.* does not exist.*Correct {told}"):
        megatrons.find(tmp_path / "absent", given_by)


@pytest.mark.parametrize(("version", "age"), [("0.11.0", "old"), ("0.21.0", "new"), ("1.0.0", "new")])
def test_unsupported_versions(tmp_path, version, age):
    found = megatrons.find(make_core(tmp_path, version))
    with pytest.raises(UsageError, match=f"{version} in .* is too {age}; only versions from 0.12"):
        found.require_supported()


def test_a_newer_version_by_request(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("MEGATRON_NPU_DRIFT", "warn")
    megatrons.find(make_core(tmp_path / "new", "0.21.0")).require_supported()
    assert "0.21.0" in caplog.text
    assert "newer than the tested versions" in caplog.text
    with pytest.raises(UsageError, match="too old"):
        megatrons.find(make_core(tmp_path / "old", "0.11.0")).require_supported()


@pytest.mark.parametrize("namespace", [True, False])
def test_two_megatrons(tmp_path, path, monkeypatch, namespace):
    first = make_core(tmp_path / "a", "0.16.1", namespace)
    second = make_core(tmp_path / "b", "0.12.1")
    path(first, second)
    found = megatrons.find()
    assert found.shadowed == ((second, "0.12.1"),)
    with pytest.raises(UsageError, match=r"two Megatrons.*0\.16\.1 in .*a \(first\) and 0\.12\.1 in .*b"):
        found.require_supported()
    monkeypatch.setenv(
        "MEGATRON_LM_PATH", str(second)
    )  # a tool that appends its tree to the path, typed directly
    with pytest.raises(UsageError, match=rf"put it first with PYTHONPATH={second}"):
        found.require_supported()
    monkeypatch.setenv("MEGATRON_LM_PATH", str(first))
    found.require_supported()


@pytest.mark.parametrize(("before", "rest"), [("", ","), ("/x", ":$PYTHONPATH,")])
def test_a_program_of_the_second_megatron_is_told_how_to_put_it_first(
    tmp_path, path, monkeypatch, before, rest
):
    """tools/preprocess_data.py of a checkout appends its tree to the path, after an installed wheel."""
    wheel, tree = make_core(tmp_path / "wheel", "0.16.1"), make_core(tmp_path / "tree", "0.20.0")
    tool = tree / "tools" / "preprocess_data.py"
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setenv("PYTHONPATH", before)
    path(wheel, tree)
    with pytest.raises(UsageError) as caught:
        megatrons.find().require_supported(tool)
    assert f"preprocess_data.py belongs to {tree}, which does not come first" in str(caught.value)
    assert f"set both MEGATRON_LM_PATH={tree} and PYTHONPATH={tree}{rest}" in str(caught.value)
    monkeypatch.setenv("MEGATRON_LM_PATH", str(tree))
    path(tree, wheel, tree)
    megatrons.find().require_supported(tool)


def test_a_checkout_beside_a_wheel_of_the_same_version(tmp_path, path):
    first, second = make_core(tmp_path / "checkout", "0.16.1"), make_core(tmp_path / "wheel", "0.16.1")
    path(first, second)
    found = megatrons.find()
    assert (found.version, found.shadowed) == ("0.16.1", ((second, "0.16.1"),))
    found.require_supported()


def test_the_installed_megatron_core():
    pytest.importorskip("psutil")
    from importlib.metadata import PackageNotFoundError, version

    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        pytest.skip("megatron-core is not installed")
    assert megatrons.find().version == installed
    assert "megatron.core" not in sys.modules or hasattr(sys.modules["megatron.core"], "__version__")
