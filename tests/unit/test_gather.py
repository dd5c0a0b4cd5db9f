"""Joining the parts of a checkpoint that another user may have written."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.checkpoint_files import checksums, gather
from megatron_npu.commands import cli


@pytest.fixture
def part(tmp_path: Path) -> Path:
    """One machine's part, which is the whole checkpoint."""
    folder = tmp_path / "part" / "iter_0000003"
    folder.mkdir(parents=True)
    (folder / "__0_0.distcp").write_bytes(b"weights")
    checksums.write(folder)
    return folder


def test_a_copy_does_not_make_this_user_the_owner_of_a_setuid_file(part: Path, tmp_path: Path) -> None:
    """The copy had the mode of its source: a program that everybody in the group ran as this user."""
    (part / "__0_0.distcp").chmod(0o6755)
    place, count = gather.join([part], tmp_path / "joined")
    assert count == 2
    assert (place / "__0_0.distcp").read_bytes() == b"weights"
    assert not stat.S_IMODE((place / "__0_0.distcp").stat().st_mode) & 0o7111


def test_a_link_does_not_make_a_private_file_a_part_of_the_checkpoint(part: Path, tmp_path: Path) -> None:
    """The joined checkpoint, which others can read, contained the file."""
    (tmp_path / "private").write_text("secret")
    (part / "more").symlink_to(tmp_path / "private")
    with pytest.raises(UsageError, match=r"more is a link to .*private, but every file of a part must be in"):
        gather.join([part], tmp_path / "joined")
    assert not (tmp_path / "joined").exists() or not [*(tmp_path / "joined").iterdir()]
    (part / "more").unlink()
    (part / "more").symlink_to("__0_0.distcp")
    place, _ = gather.join([part], tmp_path / "joined")
    assert (place / "more").read_bytes() == b"weights"


def test_an_empty_folder_name_is_not_the_working_directory(part: Path, capfd: pytest.CaptureFixture) -> None:
    assert cli.main(["checkpoint", "gather", str(part), "--into", ""]) == 2
    assert "--into must not be empty. Pass a value." in capfd.readouterr().err
