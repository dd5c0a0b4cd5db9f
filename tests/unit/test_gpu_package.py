"""What travels to a machine with a GPU and no network: trees without their tests, and one pydantic's core."""

from __future__ import annotations

import zipfile

import pytest

from tests.conftest import ROOT


@pytest.fixture
def package(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import gpu_package

    return gpu_package


def test_a_tree_travels_without_what_its_scripts_do_not_need(package, tmp_path) -> None:
    for name in ("pretrain_gpt.py", "tests/test.py", "megatron/tests/kept.py", "megatron/__pycache__/x.pyc"):
        (tmp_path / "tree" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / name).write_text("")
    assert package.copy_tree(tmp_path / "tree", tmp_path / "copy")
    found = {
        str(path.relative_to(tmp_path / "copy")) for path in (tmp_path / "copy").rglob("*") if path.is_file()
    }
    assert found == {"pretrain_gpt.py", "megatron/tests/kept.py"}
    assert not package.copy_tree(tmp_path / "absent", tmp_path / "none")


def test_the_core_is_the_one_that_pydantic_asks_for(package, tmp_path) -> None:
    def wheel(*lines: str) -> None:
        with zipfile.ZipFile(tmp_path / "pydantic-2.1-py3-none-any.whl", "w") as archive:
            wanted = "".join(f"Requires-Dist: {line}\n" for line in lines)
            archive.writestr("pydantic-2.1.dist-info/METADATA", f"Name: pydantic\n{wanted}\n")

    wheel("annotated-types>=0.6", "pydantic-core==2.50.5")
    assert package.pinned(tmp_path, "pydantic-core") == "pydantic-core==2.50.5"
    wheel("annotated-types>=0.6")
    with pytest.raises(ValueError, match="does not require a version of pydantic-core"):
        package.pinned(tmp_path, "pydantic-core")


def test_a_download_is_of_the_machines_python(package, tmp_path) -> None:
    command = package.download("six", tmp_path, "3.12")
    assert command[command.index("--python-version") + 1] == "3.12"
    assert command[-1] == "six"
    assert "--no-deps" in command
