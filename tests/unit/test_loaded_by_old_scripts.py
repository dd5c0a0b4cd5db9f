"""What scripts of old trees load from a checkpoint without checksums is looked at, as the driver's is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_npu.adaptors.deepspeed import flags_and_runs
from megatron_npu.adaptors.megatron_lm import checkpointing
from megatron_npu.checkpoint_files import checksums

Load = Callable[..., int]


class Noted:
    """A recorder that keeps what is recorded, by the target's last name."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def around(self, target: str, **_: Any) -> Callable[[Any], Any]:
        return lambda function: self.found.setdefault(target.partition(":")[2], function)


def of_deepspeed() -> Load:
    noted = Noted()
    flags_and_runs.connect_checkpoints(noted, tuple)  # type: ignore[arg-type]  # a stand-in
    return noted.found["load_checkpoint"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a checkpoint that the tracker names."""
    upstream = ModuleType("megatron")
    given = SimpleNamespace(load=str(tmp_path), deepspeed=False, verify_checkpoint=False)
    upstream.get_args = lambda: given  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron", upstream)
    monkeypatch.setattr(flags_and_runs, "data_only", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(flags_and_runs.deepspeed_device, "harmless", tuple)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("3")
    folder = tmp_path / "iter_0000003"
    folder.mkdir()
    return folder


def upstreams(model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any = None) -> int:
    with torch.no_grad():
        model[0].weight[1, 1] = -3e38
    return 3


@pytest.mark.parametrize("tree", ["285068c8", "deepspeed"])
def test_a_number_that_no_weight_is_is_named(tree, place, capsys):
    load = checkpointing.compare_checksums if tree == "285068c8" else of_deepspeed()
    assert load(upstreams, [torch.nn.Linear(2, 2)], None) == 3
    told = capsys.readouterr().err
    assert f"{place}: weight has a value of 3e+38" in told
    (place / checksums.NAME).write_text("{}")  # what is compared with them needs no look
    assert load(upstreams, [torch.nn.Linear(2, 2)], None) == 3
    assert not capsys.readouterr().err
