"""The guide from its first command to its last, on the CPU."""

from __future__ import annotations

import subprocess

import pytest

from tests.adaptors.megatron_lm import guide
from tests.conftest import LONGEST
from tests.support import processes, stock_lm, walk, warm

# longer than the window of 2,048 tokens, which else is no window
ITERATIONS = 14
LONG = {"SEQ_LENGTH": "2112", "TRAIN_ITERS": str(ITERATIONS)}


@pytest.fixture(scope="module")
def walking(checkout, tmp_path_factory) -> walk.Walk:
    pytest.importorskip("nltk", reason="sentences are split with nltk, which is not installed")
    pytest.importorskip("wikiextractor", reason="wikiextractor is not installed")

    folder = tmp_path_factory.mktemp("guide")

    def run(*command: str, **changes: str) -> subprocess.CompletedProcess[str]:
        return processes.run(
            command,
            env=warm.for_scripts(stock_lm.environment(**changes), *guide.imported(folder)),
            capture_output=True,
            text=True,
            timeout=LONGEST,
            check=False,
        )

    return guide.through(guide.COMMANDS, checkout, folder, run, **LONG)


@pytest.mark.parametrize("number", range(len(guide.COMMANDS)), ids=map(walk.bare, guide.COMMANDS))
def test_command(walking, number):
    guide.check(walking, number, "cpu", iterations=ITERATIONS)


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_layouts_agree_and_windows_do_not(walking, precision):
    """SBH and BSH give the same losses to the last digit; a window gives others than causal attention."""
    script = f"pretrain_gpt_distributed_{precision}.sh"
    causal, window = (guide.losses_of(walking, script, pre) for pre in ("65536", "2048"))
    assert causal[0] == causal[1] != window[0] == window[1]


def test_each_training_has_a_folder_and_the_files_lie_where_the_guide_moves_them(walking):
    walking.output(len(walking.commands) - 1)
    scripts = guide.scripts_in(walking.home)
    trained = [line for line in walking.commands if "bash pretrain_" in line]
    assert len(trained) == len(list((scripts / "checkpoint").iterdir())) >= 9
    root = scripts.parents[1]
    for name in ("pretrain_gpt.py", "main.py"):
        assert "stock_script" in (root / name).read_text()
        assert not (scripts / name).exists()
    assert (root / "zeroshot_gpt" / "evaluate.py").is_file()


def test_the_page_has_every_command_of_the_guide():
    """In the same order, word for word, but for where this project is cloned from."""
    if guide.DOCUMENT is None:
        pytest.skip("no text of the guide in ../shared/seeds")
    asked = [walk.bare(line) for line in guide.COMMANDS if not guide.OUR_CLONE.match(line)]
    assert len(asked) == 35
    have = iter(map(walk.bare, guide.PAGE_COMMANDS))
    missing = [command for command in asked if command not in have]
    assert not missing
