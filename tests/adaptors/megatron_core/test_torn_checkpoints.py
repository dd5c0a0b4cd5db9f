"""Checkpoints of stock scripts that are torn, or not there: one line, where upstream prints pages."""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from zipfile import BadZipFile

import pytest

from megatron_npu.adaptors.megatron_core.checkpoints.untrusted_checkpoints import load_data_only
from megatron_npu.adaptors.shared import checksums as of_scripts
from megatron_npu.base.errors import UsageError

pytest.importorskip("megatron.core")
ARGS = Namespace(ckpt_step=None, non_persistent_ckpt_type=None)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The place of a checkpoint that the tracker beside it names."""
    (tmp_path / of_scripts.TRACKER).write_text("4")
    place = tmp_path / "iter_0000004"
    place.mkdir()
    return place


def load(root: Path, *errors: BaseException, step: int | None = None) -> str:
    """Load as a script does, where upstream raises these errors of its ranks; return what is read."""

    def upstream(*_: object) -> str:
        logging.error("a traceback of a reader")
        if len(errors) == 1:
            raise errors[0]
        if errors:
            from torch.distributed.checkpoint.api import CheckpointException

            raise CheckpointException("read", {rank: (each, None) for rank, each in enumerate(errors)})
        return "read"

    return load_data_only(upstream, str(root), Namespace(**{**vars(ARGS), "ckpt_step": step}))


@pytest.mark.parametrize("text", ["garbage", "", "-5", "3.5", "7 7"])
def test_a_tracker_that_is_none(text: str, saved: Path) -> None:
    assert load(saved.parent) == "read"
    (saved.parent / of_scripts.TRACKER).write_text(text)
    with pytest.raises(UsageError, match="must contain an iteration number or `release`, but it contains"):
        load(saved.parent)


def test_a_checkpoint_that_is_not_there(saved: Path) -> None:
    with pytest.raises(UsageError, match=r"the checkpoint .*iter_0000007 does not exist"):
        load(saved.parent, step=7)
    (saved.parent / of_scripts.TRACKER).write_text("77")
    with pytest.raises(UsageError, match=r"the checkpoint .*iter_0000077 does not exist"):
        load(saved.parent)
    assert load(saved.parent, step=4) == "read"


@pytest.mark.parametrize("text", ["{", "[]", "null", "[" * 100_000, "\xff"])
def test_a_description_that_is_none(text: str, saved: Path) -> None:
    (saved / "metadata.json").write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"metadata\.json cannot be read"):
        load(saved.parent)


@pytest.mark.parametrize(
    "errors",
    [
        [EOFError()],
        [BadZipFile("no zip")],
        [ValueError("the checkpoint's .metadata is invalid: it ends")],
        [AssertionError("metadata is None; global metadata read failed")],
        [EOFError(), RuntimeError("another rank's")],
        [RuntimeError("PytorchStreamReader failed"), RuntimeError("the same")],
    ],
)
def test_a_file_that_was_cut_short(errors: list[Exception], saved: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot be read: .*Its files must not have changed") as caught:
        load(saved.parent, *errors)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("error", [ValueError("another"), AssertionError("a shape"), KeyError("model")])
def test_what_is_no_file_of_the_checkpoint_keeps_its_traceback(error: Exception, saved: Path) -> None:
    with pytest.raises(type(error)) as caught:
        load(saved.parent, error)
    assert caught.value is error
    assert caught.value.__cause__ is None
