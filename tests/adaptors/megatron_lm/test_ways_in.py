"""A stock script without ``megatron-npu run``: an installed package's entry point, or one import."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from tests.support import private, processes, stock_lm


def entry_point(checkout: Path, folder: Path) -> tuple[list[str], str]:
    """Return a command without any mention of the plug-in, and a folder that makes it look installed."""
    installed = folder / "megatron_npu-0.dist-info"
    installed.mkdir()
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: megatron_npu\nVersion: 0\n")
    (installed / "entry_points.txt").write_text(
        "[torch.backends]\nmegatron_npu = megatron_npu_autoload:arm\n"
    )
    return [str(checkout / "pretrain_gpt.py")], str(folder)


def first_line(checkout: Path, folder: Path) -> tuple[list[str], str]:
    """Return the command of a copy of the script that begins with ``import megatron_npu``."""
    copy = folder / "pretrain_gpt.py"
    copy.write_text("import megatron_npu\n" + (checkout / "pretrain_gpt.py").read_text())
    return [str(copy)], str(checkout)


@pytest.mark.parametrize("way", [entry_point, first_line])
def test_way_in(checkout, data, tmp_path, way):
    command, on_path = way(checkout, tmp_path)
    environment = stock_lm.environment()
    environment["PYTHONPATH"] = os.pathsep.join([on_path, environment["PYTHONPATH"]])
    written = tmp_path / "written"
    written.mkdir(mode=0o750)
    for file in (*data.glob("text.*"), *data.glob("*.json"), *data.glob("*.txt")):  # indices come beside them
        shutil.copy(file, written)
    before = set(written.rglob("*"))
    save = [
        "--save-interval",
        "3",
        "--save",
        str(written / "checkpoint"),
        "--tensorboard-dir",
        str(written / "board"),
    ]
    flags = [*stock_lm.flags(written), "--train-iters", "3", *save]
    result = processes.run(
        [sys.executable, *command, *flags],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        umask=0o022,
    )
    output = stock_lm.succeeded(result)
    assert "megatron_lm 285068c8 · cpu/gloo" in output
    assert sorted(stock_lm.losses(output)) == [1, 2, 3]
    private.assert_all(set(written.rglob("*")) - before, "*.pt", "events.out.*", "*.npy")
