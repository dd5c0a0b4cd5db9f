"""A tiny dataset, and the driver run inside this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_npu.commands import cli
from megatron_npu.pretrain.flags import arguments
from megatron_npu.pretrain.run import pretrain
from tests.support.tiny import flags_for
from tests.support.tiny_dataset import dataset  # noqa: F401  a fixture


@pytest.fixture
def flags(dataset, monkeypatch) -> Callable[..., list[str]]:  # noqa: F811
    """Return a function: changes to the flags -> argv."""
    monkeypatch.setenv("MEGATRON_NPU_DEVICE", "cpu")
    return lambda *changes: [*flags_for(dataset), *map(str, changes)]


@pytest.fixture
def train(flags) -> Callable[..., pretrain.Summary]:
    """Return a function: changes to the flags -> summary of a run in this process."""
    return lambda *changes, **kwargs: pretrain.train(arguments.parse(flags(*changes)), **kwargs)


@pytest.fixture
def refused(capsys) -> Callable[..., str]:
    """Return a function: a command line that must end with one line and exit code 2 -> that line."""

    def run(*argv: str) -> str:
        assert cli.main([str(word) for word in argv]) == 2
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        assert err.count("\n") == 1
        return err

    return run
