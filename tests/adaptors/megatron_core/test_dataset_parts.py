"""Few documents: a part of the split that has none is left out or refused; upstream alone would never end."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_npu.base.errors import UsageError
from tests.conftest import checkout
from tests.support import tiny
from tests.support.stock_core import losses, pretrain

# no document of five for validation and test
SPLIT = "998,1,1"


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """The prefix of a dataset of five documents."""
    return tiny.write_dataset(tmp_path_factory.mktemp("few") / "few", documents=5)


def build(sizes: list[int | None], blend: tuple, split: str = SPLIT) -> list[int | None]:
    """Return the lengths of the datasets that megatron-core builds, None for a part that is left out."""
    import megatron_npu

    megatron_npu.install()
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    tokenizer = SimpleNamespace(eod=255, vocab_size=256, unique_identifiers={"class": "numbers"})
    described = GPTDatasetConfig(
        random_seed=1,
        sequence_length=8,
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        blend=blend,
        split=split,
    )
    built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, described).build()
    return [None if dataset is None else len(dataset) for dataset in built]


def test_empty_parts_that_are_not_read_are_left_out(few: Path) -> None:
    train, valid, test = build([10, 0, 0], ([str(few)], None))
    assert train >= 10
    assert valid is test is None


def test_so_they_are_of_a_blend(few: Path, tmp_path: Path) -> None:
    many = tiny.write_dataset(tmp_path / "many", documents=2000)
    train, valid, test = build([10, 0, 0], ([str(many), str(few)], [0.5, 0.5]))
    assert train >= 10
    assert valid is test is None


@pytest.mark.parametrize(
    ("split", "sizes", "part"),
    [(SPLIT, [10, 4, 0], "validation"), (SPLIT, [10, 0, 4], "the test"), ("1,998,1", [4, 4, 0], "training")],
)
def test_an_empty_part_that_is_read_is_refused(few: Path, split: str, sizes: list[int], part: str) -> None:
    refusal = f"--split '{split}' leaves none of the 5 documents in {few} for {part}"
    with pytest.raises(UsageError, match=refusal):
        build(sizes, ([str(few)], None), split)


def test_one_pass_of_nothing_is_upstreams_own(few: Path) -> None:
    assert build([10, None, None], ([str(few)], None))[1:] == [0, 0]


@pytest.mark.parametrize("version", ["0.12.1", "0.16.1"])
def test_the_stock_script_says_which_part_in_one_line(version: str, few: Path, tmp_path: Path) -> None:
    done = pretrain(checkout("megatron_core", version), tmp_path, "--split", "969,30,1", data=few)
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if "error:" in line]
    assert f"--split '969,30,1' leaves none of the 5 documents in {few} for validation" in line
    assert line.endswith("Provide more documents or another split, or pass --eval-iters 0.")
    assert "Traceback" not in done.stderr


def test_the_stock_script_trains_without_an_evaluation(few: Path, tmp_path: Path) -> None:
    changes = ["--split", "969,30,1", "--eval-iters", "0", "--train-iters", "2"]
    assert len(losses(pretrain(checkout("megatron_core", "0.16.1"), tmp_path, *changes, data=few))) == 2
