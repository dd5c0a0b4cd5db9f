"""Archives that expand to more memory than there is are refused before torch reads them."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest
import torch

from megatron_npu.base.errors import UsageError
from megatron_npu.base.replaced import Replaced
from megatron_npu.safe_files import expanded_size, safe_load, torch_readers

MANY = 100_000


@pytest.fixture
def bomb(tmp_path: Path) -> Path:
    """Return a file of torch whose records are compressed, [MANY]."""
    plain, packed = tmp_path / "plain.pt", tmp_path / "packed.pt"
    torch.save({"a": torch.zeros(MANY)}, plain)
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for entry in source.infolist():
            target.writestr(entry.filename, source.read(entry))
    assert packed.stat().st_size < MANY // 10
    return packed


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expanded_size, "MOST_BYTES", 1000)


@pytest.mark.usefixtures("limit")
def test_a_compressed_file_is_refused(bomb: Path) -> None:
    with pytest.raises(UsageError, match=r"packed\.pt has .* bytes, but its records expand to 400,"):
        safe_load.read(bomb, frozenset())


@pytest.mark.usefixtures("limit")
def test_a_file_that_torch_has_written_is_read(bomb: Path) -> None:
    content = safe_load.read(bomb.with_name("plain.pt"), frozenset())
    assert content["a"].shape == (MANY,)


def test_a_compressed_file_below_the_limit_is_read(bomb: Path) -> None:
    with expanded_size.checked():
        assert torch.load(bomb, weights_only=True)["a"].shape == (MANY,)


@pytest.mark.usefixtures("limit")
def test_a_compressed_value_in_a_checkpoint_is_refused(bomb: Path) -> None:
    torch_readers.guard(of_megatron=False)
    try:
        with pytest.raises(UsageError, match="expand to"):
            torch_readers._load_plain(io.BytesIO(bomb.read_bytes()))
        with pytest.raises(UsageError, match="expand to"):  # whoever loads it
            torch.load(bomb, weights_only=True)
    finally:
        torch_readers.release()
    assert torch.load(bomb, weights_only=True)["a"].shape == (MANY,)


@pytest.mark.usefixtures("limit")
def test_a_compressed_model_is_not_converted(bomb: Path) -> None:
    hf_files = pytest.importorskip("megatron_npu.conversion.hf_files")
    bomb.rename(bomb.with_name(hf_files.PICKLED))
    with pytest.raises(UsageError, match="expand to"):
        hf_files.Source(bomb.parent)


def test_what_is_no_archive_is_left_to_torch() -> None:
    stream = io.BytesIO(b"not an archive")
    stream.seek(3)
    expanded_size.require_plausible(stream)
    assert stream.tell() == 3


def test_the_reader_that_is_replaced_exists() -> None:
    replaced, own = Replaced(), getattr(torch.serialization, expanded_size.READER)
    expanded_size.check_in(replaced)
    assert getattr(torch.serialization, expanded_size.READER) is not own
    replaced.undo()
    assert getattr(torch.serialization, expanded_size.READER) is own
