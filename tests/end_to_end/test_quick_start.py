"""docs/tutorials/quick-start-cpu.md from its first block to its last, with a small corpus."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from megatron_npu.upstream import megatrons
from tests.conftest import LONGEST, checkout
from tests.support import processes, stock_lm, tiny, walk, warm

PAGE = tiny.ROOT / "docs" / "tutorials" / "quick-start-cpu.md"
BLOCKS = walk.blocks_of_page(PAGE.read_text(encoding="utf-8"))
INSTALL, DATA, DRIVER, STOCK, OLD = range(5)


@pytest.fixture(scope="module")
def walking(tmp_path_factory) -> walk.Walk:
    trees = {
        "core_v0.16.1": checkout("megatron_core", "0.16.1"),
        "": checkout("megatron_lm", megatrons.LEGACY_VERSION),
    }

    def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        # the stock scripts start from nothing; our own commands and what they start do so elsewhere
        modules = () if "Megatron-LM" in command[-1] else warm.DRIVER
        return processes.run(
            command,
            env=warm.for_scripts({**tiny.environment(), **warm.WARM_CHILDREN, **changes}, modules),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )

    def download(block: str, home: Path) -> None:
        if block == BLOCKS[DRIVER]:
            walk.write_lambada(project(home) / "lambada_test.jsonl")

    settings = {"MEGATRON_NPU_DEVICE": "cpu"}
    return walk.Walk(BLOCKS, trees, tmp_path_factory.mktemp("start"), run, settings, download)


def project(home: Path) -> Path:
    return home / "megatron_npu"


def test_the_page_has_these_blocks():
    assert len(BLOCKS) == 1 + OLD


@pytest.mark.parametrize(("block", "runs_of_20"), [(DRIVER, 1), (STOCK, 2), (OLD, 1)])
def test_every_command_trains_from_the_beginning(walking, block, runs_of_20):
    """The one with two processes, too: it must not find the checkpoint of the one before it."""
    output = walking.output(block)
    assert output.count("iteration       20/      20 |") == runs_of_20
    losses = stock_lm.losses(output)
    assert losses[20] < 0.8 * losses[5]


@pytest.mark.parametrize("block", [DRIVER, OLD])
def test_lambada_counts_every_passage(walking, block):
    assert stock_lm.accuracy(walking.output(block))[1] == len(walk.LINES)


def test_the_line_before_the_first_iteration_is_the_one_that_is_shown(walking):
    (shown,) = (line for line in PAGE.read_text().splitlines() if line.startswith("megatron_npu 0.1.0 · "))
    pattern = re.escape(shown).replace("…", r"\d+")
    assert len(re.findall(f"^{pattern}$", walking.output(STOCK), re.M)) == 2


def test_git_does_not_see_what_the_page_makes(walking):
    """In the folder that the page changes into, which is a clone of this project."""
    walking.output(OLD)
    made = [path.name for path in project(walking.home).iterdir()]
    assert {"data", "cache", "checkpoints", "Megatron-LM", "Megatron-LM-2023"} <= set(made)
    known = processes.run(["git", "ls-files"], cwd=tiny.ROOT, capture_output=True, text=True, check=True)
    tracked = {Path(name).parts[0] for name in known.stdout.splitlines()}
    folders = [f"{name}/" for name in set(made) - tracked if (project(walking.home) / name).is_dir()]
    ignored = processes.run(
        ["git", "check-ignore", *folders], cwd=tiny.ROOT, capture_output=True, text=True, check=False
    )
    assert sorted(ignored.stdout.split()) == sorted(folders)
