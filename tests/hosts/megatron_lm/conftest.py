"""A checkout of Megatron-LM 285068c8, which must come out of the tests as it went in."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_npu import host, settings
from megatron_npu.errors import UsageError
from tests.end_to_end.tiny import ROOT
from tests.hosts.megatron_lm import runs


def find_checkout() -> Path | str:
    """Return the checkout named by MEGATRON_LM_PATH, else one beside this project; or why there is none."""
    named = settings.MEGATRON_PATH.get()
    for path in [Path(named)] if named else [ROOT.parent / "Megatron-LM", ROOT / "Megatron-LM"]:
        try:
            found = host.find(path)
        except UsageError:
            continue
        if (found.name, found.version) == ("megatron_lm", host.LEGACY_VERSION):
            return found.root
    return f"no Megatron-LM {host.LEGACY_VERSION} in {named or 'Megatron-LM beside this project'}: set \
{settings.MEGATRON_PATH.name} to a checkout"


def status(checkout: Path) -> str:
    """Return what git says has changed in the checkout; nothing where it is a plain copy."""
    command = ["git", "-C", str(checkout), "status", "--short", "--ignored"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="session")
def checkout() -> Iterator[Path]:
    found = find_checkout()
    if isinstance(found, str):
        pytest.skip(found)
    before = status(found)
    yield found
    assert status(found) == before, "the checkout was written to"


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """A folder with a vocabulary and a GPT dataset."""
    folder = tmp_path_factory.mktemp("data")
    runs.write_vocabulary(folder)
    runs.write_dataset(folder / "text")
    return folder
