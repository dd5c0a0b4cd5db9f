"""scripts/get_megatron.sh fetches what it is asked for, and what is rarely needed only then."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ROOT, checkout
from tests.support import processes


@pytest.fixture
def upstream(tmp_path: Path) -> Path:
    """A repository with the tag of a tree that is fetched by name alone."""
    where = tmp_path / "upstream"
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    for command in (
        ["init", "-q"],
        [*who, "commit", "-q", "--allow-empty", "-m", "one"],
        ["tag", "core_v0.14.0"],
    ):
        where.mkdir(exist_ok=True)
        processes.run(["git", "-C", str(where), *command], check=True)
    return where


def get(upstream: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return processes.run(
        ["bash", str(ROOT / "scripts" / "get_megatron.sh"), *arguments],
        env=os.environ | {"MEGATRON_LM_URL": str(upstream)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_tree_that_is_named_comes(upstream, tmp_path):
    for _ in range(2):  # the second time it is there
        done = get(upstream, str(tmp_path / "trees"), "core_v0.14.0")
        assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "trees").iterdir()] == ["core_v0.14.0"]


def test_a_name_that_there_is_not(upstream, tmp_path):
    done = get(upstream, str(tmp_path / "trees"), "core_v0.13.9")
    assert done.returncode == 2
    assert "core_v0.13.1" in done.stderr
    assert not (tmp_path / "trees").exists()


def test_a_tree_that_cannot_be_had_keeps_none_away(upstream, tmp_path):
    done = get(upstream, str(tmp_path / "trees"), "core_v0.13.1", "core_v0.14.0")
    assert done.returncode == 1
    assert f"could not fetch core_v0.13.1 from {upstream}" in done.stderr
    assert [path.name for path in (tmp_path / "trees").iterdir()] == ["core_v0.14.0"]


def test_who_lacks_a_tree_is_told_the_command(monkeypatch, tmp_path):
    monkeypatch.delenv("MEGATRON_LM_PATH", raising=False)
    monkeypatch.setattr("tests.conftest.ROOT", tmp_path)
    with pytest.raises(
        pytest.skip.Exception, match=r"`bash scripts/get_megatron\.sh checkouts core_v0\.14\.0`"
    ):
        checkout("megatron_core", "0.14.0")
