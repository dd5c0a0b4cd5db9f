"""Data sets of every kind, their columns and their labels; and one line for what is wrong with them."""

from __future__ import annotations

import contextlib
import gzip
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_npu.base.arg_parser import Parser
from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.data import columns, data_flags, datasets, labels, text_files, texts, vocabulary
from megatron_npu.finetune.data.parts import Parts
from megatron_npu.finetune.rapidformer.state import get_logger
from megatron_npu.finetune.run.flag_parts import DataFlags
from megatron_npu.finetune.tasks.sequence_classification import columns_of_texts
from tests.support import train_runs

library = pytest.importorskip("datasets")

ROWS = [{"sentence": f"row {number}", "label": number % 3} for number in range(20)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    library.disable_progress_bars()
    yield
    library.enable_progress_bars()


def args(path: Path | str, **values: Any) -> DataFlags:
    found = {"data_path": str(path), "data_name": None, "validation_fraction": 0.1, "seed": 1}
    return DataFlags(**(found | values))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    rows_of = library.Dataset.from_list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".txt":
        path.write_text("".join(f"{row['sentence']}\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".tsv":
        rows_of.to_csv(str(path), sep="\t")
    else:
        {".csv": rows_of.to_csv, ".jsonl": rows_of.to_json, ".parquet": rows_of.to_parquet}[path.suffix](
            str(path)
        )
    return path


def test_files_of_a_folder_that_have_changed_are_read_again(tmp_path: Path) -> None:
    """Of a folder with configurations, whose rows ``datasets`` itself keeps for ever."""
    for rows in (16, 24, 24):
        folder = train_runs.glue(tmp_path / "glue", train=rows)
        assert len(datasets.load(args(folder, data_name="mrpc"))["train"]) == rows
        shutil.rmtree(folder)


def test_a_copy_in_the_hubs_cache_is_found_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    revision, place = 40 * "b", tmp_path / "datasets--someone--glue"
    (place / "refs").mkdir(parents=True)
    (place / "refs" / "main").write_text(revision)
    train_runs.glue(place / "snapshots" / revision)
    parts = datasets.load(args("someone/glue", data_name="mrpc"))
    assert [len(parts[part]) for part in ("train", "validation", "test")] == [48, 19, 5]
    with pytest.raises(UsageError, match="unless it is in the cache"):
        datasets.load(args("someone/else", data_name="mrpc"))


@pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet", "txt"])
def test_a_file_of_any_kind_gives_the_same_two_parts(tmp_path: Path, suffix: str) -> None:
    parts = datasets.load(args(write(tmp_path / f"all.{suffix}", ROWS)))
    assert {part: len(rows) for part, rows in parts.items()} == {"train": 18, "validation": 2}
    column = "text" if suffix == "txt" else "sentence"
    texts = [*parts["train"][column], *parts["validation"][column]]
    assert sorted(texts) == sorted(row["sentence"] for row in ROWS)
    assert texts == [f"row {number}" for number in _order_of_seed_1()]


def _order_of_seed_1() -> list[int]:
    """Return the rows of both parts, as the library's own split has them."""
    both = library.Dataset.from_list([{"row": row} for row in range(20)]).train_test_split(2, seed=1)
    return [*both["train"]["row"], *both["test"]["row"]]


def test_another_seed_takes_other_rows(tmp_path: Path) -> None:
    file = write(tmp_path / "all.jsonl", ROWS)
    one, again, other = (datasets.load(args(file, seed=seed))["validation"][:] for seed in (1, 1, 2))
    assert one == again
    assert one != other


def test_a_folder_has_a_file_for_each_part(tmp_path: Path) -> None:
    for name, rows in {
        "train-0": ROWS[:7],
        "train-1": ROWS[7:12],
        "dev": ROWS[12:15],
        "test": ROWS[15:],
    }.items():
        write(tmp_path / "data" / f"{name}.jsonl", rows)
    (tmp_path / "data" / "README.md").write_text("not of the data")
    parts = datasets.load(args(tmp_path / "data"))
    assert [len(rows) for rows in parts.values()] == [12, 3, 5]
    assert parts["validation"]["sentence"][0] == "row 12"


def test_a_folder_of_save_to_disk(tmp_path: Path) -> None:
    saved = library.Dataset.from_list(ROWS)
    saved.save_to_disk(tmp_path / "one")
    library.DatasetDict({"train": saved, "valid": saved.select([3])}).save_to_disk(tmp_path / "two")
    assert len(datasets.load(args(tmp_path / "one"))["train"]) == 18
    assert datasets.load(args(tmp_path / "two"))["validation"]["sentence"][:] == ["row 3"]


def _no_bytes(folder: Path) -> DataFlags:
    (folder / "empty.jsonl").touch()
    return args(folder / "empty.jsonl")


def _configured(folder: Path) -> DataFlags:
    return args(write(folder / "one.jsonl", ROWS), data_name="mrpc")


def _configured_folder(folder: Path) -> DataFlags:
    write(folder / "glue" / "mrpc" / "train.csv", ROWS)
    return args(folder / "glue", data_name="mrpc")


def _lonely(folder: Path) -> DataFlags:
    return args(write(folder / "one.jsonl", ROWS[:1]))


def _without_train(folder: Path) -> DataFlags:
    return args(write(folder / "data" / "dev.csv", ROWS).parent)


def _empty(folder: Path) -> DataFlags:
    rows = library.Dataset.from_list(ROWS)
    library.DatasetDict({"train": rows, "test": rows.select([])}).save_to_disk(folder / "saved")
    return args(folder / "saved")


def _empty_file(folder: Path) -> DataFlags:
    write(folder / "data" / "train.csv", ROWS)
    (folder / "data" / "validation.csv").write_text("sentence,label\n")
    return args(folder / "data")


def _head_alone(folder: Path) -> DataFlags:
    (folder / "all.tsv").write_text("sentence\tlabel\n")
    return args(folder / "all.tsv")


def _no_rows(folder: Path) -> DataFlags:
    (folder / "all.json").write_text("[]")
    return args(folder / "all.json")


def _encoded(path: Path, encoding: str) -> Path:
    """Write rows of which the third has a character that is not ASCII's."""
    write(path, [*ROWS[:2], {"sentence": "caf@", "label": 1}, *ROWS])
    path.write_bytes(path.read_text(encoding="utf-8").replace("@", "\xe9").encode(encoding))
    return path


def _two_kinds(folder: Path) -> DataFlags:
    write(folder / "data" / "train.csv", ROWS)
    return args(write(folder / "data" / "test.jsonl", ROWS).parent)


def _packed(path: Path) -> Path:
    path.write_bytes(gzip.compress(b"sentence,label\na,1\n"))
    return path


def _head(path: Path, head: str) -> Path:
    path.write_text(f"{head}\n", encoding="utf-8")
    return path


def _broken(folder: Path) -> DataFlags:
    (folder / "a.jsonl").write_text('{"sentence": \n')
    return args(folder / "a.jsonl")


BAD: dict[str, tuple[Callable[[Path], DataFlags], str]] = {
    "one row": (
        _lonely,
        "the number of rows, 1, is too small for a split into training and validation rows with "
        "--validation-fraction 0.1. Add "
        "a file named validation.jsonl, or pass",
    ),
    "nothing to train on": (_without_train, "its splits are 'validation'"),
    "an empty part": (_empty, "a split has no rows"),
    "an empty file": (
        _empty_file,
        "data/validation.csv has no rows below its head, but every file must have at least one row",
    ),
    "a head alone": (
        _head_alone,
        "all.tsv has no rows below its head, but every file must have at least one row",
    ),
    "no row of json": (_no_rows, "all.json has no rows, but every file must have at least one row"),
    "lines in Latin-1": (
        lambda folder: args(_encoded(folder / "all.jsonl", "latin-1")),
        "all.jsonl is not UTF-8: byte 0xe9 in line 3, but the file must contain UTF-8 text",
    ),
    "a table in Latin-1": (
        lambda folder: args(_encoded(folder / "all.csv", "latin-1")),
        "all.csv is not UTF-8: byte 0xe9 in line 4, but the file must contain UTF-8 text",
    ),
    "a table in UTF-16": (
        lambda folder: args(_encoded(folder / "all.csv", "utf-16")),
        "all.csv appears to be encoded in UTF-16, but the file must contain UTF-8 text",
    ),
    "a packed table": (
        lambda folder: args(_packed(folder / "all.csv")),
        "Decompress it with gunzip and pass the result.",
    ),
    "a column twice": (
        lambda folder: args(_head(folder / "all.csv", "label,sentence,label")),
        "all.csv contains the column 'label' more than once, but column names must be unique.",
    ),
    "the same with tabs": (
        lambda folder: args(_head(folder / "all.tsv", "a, b\tc\tc")),
        "all.tsv contains the column 'c' more than once, but column names must be unique.",
    ),
    "a file of no bytes": (_no_bytes, "empty.jsonl is empty"),
    "a file has no configurations": (_configured, "--data-name mrpc cannot be used with --data-path"),
    "a folder of folders": (_configured_folder, "Pass only --data-path glue/mrpc."),
    "two kinds": (_two_kinds, "but the files have .csv and .jsonl"),
    "no such file": (lambda folder: args(folder / "a.csv"), "a.csv: no such file"),
    "no such kind": (lambda folder: args(__file__), "but the files have .py"),
    "an empty folder": (lambda folder: args(folder), "the folder has no file for any split"),
    "broken": (_broken, "a.jsonl:"),
    "not in the cache": (lambda folder: args("glue", data_name="mrpc"), "--data-path glue --data-name mrpc:"),
    "several": (
        lambda folder: args("x", data_path=["a", "b"]),
        "--data-path accepts only one path, but got a b",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_with_a_data_set_is_told_in_a_line(name: str, tmp_path: Path) -> None:
    make, said = BAD[name]
    with pytest.raises(UsageError) as refused:
        datasets.load(make(tmp_path))
    assert said in str(refused.value).replace(f"{tmp_path}/", "")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("all.csv", "row 13 below the header of {}"),
        ("all.jsonl", "row 13 of {}"),
        ("all.json", "row 13 of {}"),
    ],
)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_row_is_named_as_the_file_has_it_whatever_is_taken_to_validate_on(
    tmp_path: Path, name: str, place: str, seed: int
) -> None:
    rows = [{**row, "label": str(row["label"])} for row in ROWS]
    rows[12] |= {"sentence": None, "label": "odd"}
    file = write(tmp_path / name, rows)
    found = datasets.load(args(file, seed=seed, validation_fraction=0.5))
    part = next(part for part, own in found.items() if None in own["sentence"][:])
    with pytest.raises(UsageError) as refused:
        texts.require(found, {"text": "sentence"})
    assert f"{place.format(file)} (split {part!r}) has no text in the column 'sentence'." in str(
        refused.value
    )
    assert (
        found.place(part, found[part]["sentence"][:].index(None)) == f"{place.format(file)} (split {part!r})"
    )


@pytest.mark.parametrize("name", ["validation_mismatched", "val_old", "validation-2.bak", "dev", "devset"])
def test_only_a_part_s_own_file_is_taken_for_it(tmp_path: Path, name: str) -> None:
    """Beside validation.csv, what has a like name, or another name of the part, is left alone."""
    for file, rows in {"train": ROWS[:9], "validation": ROWS[9:12], name: ROWS[12:]}.items():
        write(tmp_path / "data" / f"{file}.csv", rows)
    found = datasets.load(args(tmp_path / "data"))
    assert (len(found["train"]), len(found["validation"])) == (9, 3)


def test_the_matched_part_of_mnli_is_validated_on(tmp_path: Path) -> None:
    files = {"train": ROWS[:9], "validation_matched": ROWS[9:12], "validation_mismatched": ROWS[12:]}
    for file, rows in files.items():
        write(tmp_path / "data" / f"{file}.csv", rows)
    assert len(datasets.load(args(tmp_path / "data"))["validation"]) == 3


@pytest.mark.parametrize(
    "names",
    [("validation-0", "validation-1"), ("dev-00000-of-00002", "dev-00001-of-00002"), ("val_1", "val.2")],
)
def test_a_part_may_be_in_pieces(tmp_path: Path, names: tuple[str, str]) -> None:
    write(tmp_path / "data" / "train.csv", ROWS[:9])
    for file, rows in zip(names, (ROWS[9:11], ROWS[11:14]), strict=True):
        write(tmp_path / "data" / f"{file}.csv", rows)
    assert len(datasets.load(args(tmp_path / "data"))["validation"]) == 5


def test_a_label_is_named_by_its_row_in_the_file(tmp_path: Path) -> None:
    rows = [{"sentence": "a", "label": str(number % 2)} for number in range(19)]
    file = write(tmp_path / "all.jsonl", [*rows, {"sentence": "a", "label": "odd"}])
    seed = next(seed for seed in range(99) if _is_taken(19, 20, seed))
    with pytest.raises(UsageError) as refused:
        labels.of_rows(datasets.load(args(file, seed=seed)), "label")
    assert f"the label 'odd' in row 20 of {file} (split 'validation') is invalid; it must be one" in str(
        refused.value
    )


def _is_taken(row: int, rows: int, seed: int) -> bool:
    numbered = library.Dataset.from_dict({"row": list(range(rows))})
    return row in numbered.train_test_split(0.1, seed=seed)["test"]["row"][:]


def test_rows_of_parts_that_are_no_single_files_are_named_by_their_part(tmp_path: Path) -> None:
    for name, rows in {"train-0": ROWS[:7], "train-1": ROWS[7:12], "dev": ROWS[12:15]}.items():
        write(tmp_path / "data" / f"{name}.jsonl", rows)
    found = datasets.load(args(tmp_path / "data"))
    assert found.place("train", 8) == "row 9 of the split 'train'"
    dev = tmp_path / "data" / "dev.jsonl"
    assert found.place("validation", 2) == f"row 3 of {dev} (split 'validation')"
    flat = found.changed(lambda rows: rows.rename_column("sentence", "text"))
    assert flat.place("validation", 2) == found.place("validation", 2)
    library.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    saved = datasets.load(args(tmp_path / "saved"))
    row = int(saved["validation"]["sentence"][0].split()[1])
    assert saved.place("validation", 0) == f"row {row + 1} of the split 'train', used for 'validation'"


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
def test_characters_may_go_on_in_the_next_chunk(tmp_path: Path, chunk: int, monkeypatch) -> None:
    monkeypatch.setattr(text_files, "_CHUNK", chunk)
    file = tmp_path / "a.txt"
    file.write_text("caf\xe9 \u4e2d\u6587\n\U0001f600\n", encoding="utf-8")
    text_files.require(file)
    with file.open("ab") as more:
        more.write(b"x\ny \xe4\xb8")  # the rest of the character is not there
    with pytest.raises(UsageError, match=r"a.txt is not UTF-8: byte 0xe4 in line 4, "):
        text_files.require(file)


def test_tokens_that_a_model_has_not_are_found_in_a_column() -> None:
    rows = library.Dataset.from_dict({"input_ids": [[1, 2], [], [9, 3]], "label": [0, 1, 0]})
    vocabulary.require_known_column(rows, 10, "the data")
    vocabulary.require_known_column(rows, None, "the data")
    vocabulary.require_known_column(rows.remove_columns("input_ids"), 1, "the data")
    vocabulary.require_known_column([{"input_ids": [9]}], 1, "the data")  # has no columns
    vocabulary.require_known_column(rows.select([0, 1]), 9, "the data")
    with pytest.raises(
        UsageError,
        match="the data contains the token id 9, but the model has 9 tokens, so ids must be from 0 to",
    ):
        vocabulary.require_known_column(rows, 9, "the data")


def test_texts_have_the_names_of_glue_or_those_that_are_said() -> None:
    def found(*there: str, said: tuple[tuple[str, str], ...] = ()) -> tuple[str, str | None]:
        return columns_of_texts({"train": there}, "label", said)

    assert found("idx", "sentence1", "sentence2", "label") == ("sentence1", "sentence2")
    assert found("question", "sentence", "label") == ("question", "sentence")
    assert found("text", "label") == ("text", None)
    assert found("a", "b", "label", said=(("text", "b"), ("label", "label"))) == ("b", None)
    with pytest.raises(
        UsageError, match="has only the columns 'a', 'label', but a column for the text is required"
    ):
        found("a", "label")
    with pytest.raises(UsageError, match="the column 'label' is used both as the text and as its label"):
        found("a", "label", said=(("text", "label"),))


def test_a_column_that_is_not_there_is_told_with_those_that_are() -> None:
    there = {"train": ["question", "context", "answers"], "validation": ["question", "context"]}
    roles = {role: (role,) for role in ("question", "context", "answers")}
    with pytest.raises(
        UsageError,
        match=r"the split 'validation' has no column 'answers' \(the columns of this split are 'question'",
    ):
        columns.find(there, roles, ())
    with pytest.raises(UsageError, match="the split 'train' has no column 'reply'"):
        columns.find(there, roles, (("answers", "reply"),))
    with pytest.raises(
        UsageError,
        match="--columns tokens=x: the task has no role tokens; the roles of the task are question, context",
    ):
        columns.find(there, roles, (("tokens", "x"),))


def test_columns_are_said_as_role_and_name() -> None:
    parser = Parser("x")
    data_flags.add_data_flags(parser.add_argument)
    assert parser.parse_args(["--columns", "text=a", "label=b=c"]).columns == [
        ("text", "a"),
        ("label", "b=c"),
    ]
    with pytest.raises(UsageError, match="--columns must be ROLE=NAME"):
        parser.parse_args(["--columns", "text"])


def parts(train: list[Any], validation: list[Any] | None = None, feature: Any = None) -> Parts:
    kinds = library.Features({"label": feature}) if feature else None
    both = {"train": train} | ({"validation": validation} if validation is not None else {})
    return Parts(
        {part: library.Dataset.from_dict({"label": rows}, features=kinds) for part, rows in both.items()}
    )


def test_labels_are_numbers_names_or_of_the_data_set_s_own() -> None:
    numbers = labels.of_rows(parts([0, 2, 1]), "label")
    assert numbers.config()["id2label"] == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}
    names = labels.of_rows(parts(["night", "day"]), "label")
    assert names.config() == {
        "num_labels": 2,
        "id2label": {0: "day", 1: "night"},
        "label2id": {"day": 0, "night": 1},
    }
    assert names.number("night") == 1
    own = library.ClassLabel(names=["no", "yes", "maybe"])
    assert labels.of_rows(parts([0, 1], feature=own), "label").names == ("no", "yes", "maybe")
    amounts = labels.of_rows(parts([0.5, 4.0]), "label")
    assert amounts.config() == {"num_labels": 1, "problem_type": "regression"}
    tags = labels.of_tokens(parts([["O", "B-PER"], ["O"]]), "label")
    assert tags.names == ("B-PER", "O")


@pytest.mark.parametrize(
    ("train", "validation", "said"),
    [
        (
            [0, 1],
            [1, 2],
            "the label 2 in row 2 of the split 'validation' is invalid; it must be "
            "one of the labels of the training data (0 to 1",
        ),
        ([0, -1], [], "the label -1 in row 2 of the split 'train'"),
        (
            ["a", "b"],
            ["c"],
            "the label 'c' in row 1 of the split 'validation' is invalid; it must be "
            "one of the labels of the training data ('a'",
        ),
        (["a", None], ["a"], "the label None in row 2"),
        ([0.5, float("nan")], [], "the label nan in row 2"),
        (
            [0.5, float("-inf")],
            [],
            "the label -inf in row 2 of the split 'train' is invalid; it must be a number",
        ),
        ([0, 0], [0], "all rows have the same label"),
        ([3, 3], [3], "all rows have the same label, 3"),
        (
            [0, 1, 5],
            [0],
            "the labels 0, 1, 5, but not 2, 3, 4. Use every number from 0 to 5,",
        ),
        ([1, 3], [1], "the labels 1, 3, but not 2. Use every number from 1 to 3,"),
        (
            [1, 2],
            [0],
            "the label 0 in row 1 of the split 'validation' is invalid; it must be "
            "one of the labels of the training data (1 to 2",
        ),
        (
            [0, 10**15],
            [0],
            "the labels 0, 1000000000000000, but not 1, 2, 3, 4, 5, 6, 7, 8, …",
        ),
    ],
)
def test_labels_out_of_range_are_told_with_their_row(
    train: list[Any], validation: list[Any], said: str
) -> None:
    with pytest.raises(UsageError) as refused:
        labels.of_rows(parts(train, validation), "label")
    assert said in str(refused.value)


def test_classes_that_the_model_brings_keep_their_names_and_numbers(caplog: pytest.LogCaptureFixture) -> None:
    own = ("pos", "neg", "none")
    assert labels.of_rows(parts([0, 2, 1]), "label", own).names == own
    assert labels.of_rows(parts(["neg", "pos"]), "label", own).numbers == {"pos": 0, "neg": 1, "none": 2}
    assert labels.of_rows(parts(["neg", "new"]), "label", own).names == ("neg", "new")
    assert labels.of_rows(parts([0, 1]), "label", own).names == ("LABEL_0", "LABEL_1")
    with _propagating(caplog):
        assert labels.of_rows(parts([0, 2]), "label", own).names == own
    assert "no training row has the label 1, although the model has 3 labels" in caplog.text


def test_numbers_that_do_not_begin_at_0_are_classes_in_their_order(caplog: pytest.LogCaptureFixture) -> None:
    stars = labels.of_rows(parts([5, 1, 3, 2, 4], [4]), "label")
    assert stars.names == ("1", "2", "3", "4", "5")
    assert [stars.number(label) for label in (1, 5)] == [0, 4]
    assert stars.config()["id2label"] == {0: "1", 1: "2", 2: "3", 3: "4", 4: "5"}
    tags = labels.of_tokens(parts([[2, 3], [3]]), "label")
    assert (tags.names, tags.numbers) == (("2", "3"), {2: 0, 3: 1})
    # a model that was trained on them has them as names, whatever rows there are now
    again = labels.of_rows(parts([1, 4, 2], [5]), "label", stars.names)
    assert (again.names, again.number(5)) == (stars.names, 4)
    with _propagating(caplog):  # a model of six other classes has numbers for these
        six = labels.of_rows(parts([1, 2, 3, 4, 5]), "label", tuple("abcdef"))
    assert (six.names, six.number(5)) == (tuple("abcdef"), 5)
    assert "no training row has the label 0, although the model has 6 labels" in caplog.text


@contextlib.contextmanager
def _propagating(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let pytest see what the package logs, which it does not pass on to the root logger."""
    logger = get_logger()
    logger.addHandler(caplog.handler)
    try:
        yield
    finally:
        logger.removeHandler(caplog.handler)


def test_a_label_beyond_those_of_the_data_set_is_out_of_range() -> None:
    table = parts([0, 1])["train"].cast_column("label", library.ClassLabel(names=["no", "yes"]))
    assert labels.are_hidden(parts([-1, -1])["train"], "label")
    assert not labels.are_hidden(table, "label")
    hidden = parts([-1, 1], feature=library.ClassLabel(names=["no", "yes"]))
    with pytest.raises(
        UsageError, match=r"the label -1 in row 1 of the split 'train' is invalid; it must be .* \(0 to 1\)"
    ):
        labels.of_rows(hidden, "label")


def test_tags_that_are_no_lists_are_told() -> None:
    with pytest.raises(UsageError, match="has one label per row"):
        labels.of_tokens(parts(["a", "b"]), "label")


@pytest.mark.parametrize(
    ("rows", "hidden"),
    [
        ([{"labels": -1}, {"labels": -1}], True),
        ([{"label": -1}, {"label": 0}], False),
        ([{"labels": [-100, 3]}], False),
        ([{"text": "x"}], False),
        ([torch.tensor([1])], False),
        ([], False),
        (None, False),
    ],
    ids=str,
)
def test_test_data_without_labels_are_known(rows: object, hidden: bool) -> None:
    assert labels.not_given_away(rows) == hidden


def test_na_and_null_in_a_table_are_texts(tmp_path: Path) -> None:
    """And an empty cell is none."""
    words = ["NA", "null", "a", "", "b", "nan"]
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{word},1\n" for word in words))
    parts = datasets.load(args(tmp_path / "rows.csv", validation_fraction=0.2))
    found = [text for rows in parts.values() for text in rows["text"][:]]
    assert sorted(text or "" for text in found) == sorted(words)
    assert None in found
