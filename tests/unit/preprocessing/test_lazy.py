"""Datasets of ``lazy`` and ``cached``: the commands read them as those of ``mmap``, damage is a line."""

from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.commands import cli
from megatron_npu.data.preprocessing import indexed_dataset
from megatron_npu.safe_files import lazy_index


@pytest.fixture
def both(tmp_path, corpus_file, tiny):
    """Return prefix -> that of a dataset of ``preprocess``: lazy, cached and mmap of the same text."""
    source = corpus_file([{"text": "a dataset"}, {"text": ""}, {"text": "of three documents"}])
    words = ["--vocab-file", str(tiny.vocab_file), "--merge-file", str(tiny.merge_file), "--append-eod"]
    for kind in ("lazy", "cached", "mmap"):
        line = ["--input", str(source), "--output-prefix", str(tmp_path / kind), "--dataset-impl", kind]
        assert cli.main(["preprocess", *line, *words]) == 0
    return {kind: tmp_path / f"{kind}_text_document" for kind in ("lazy", "cached", "mmap")}


def of(prefix) -> tuple:
    summary = indexed_dataset.validate(prefix)
    tokens = np.fromfile(f"{prefix}.bin", summary.dtype).tolist()
    lengths = indexed_dataset.sequence_lengths(prefix).tolist()
    counts = (summary.sequences, summary.documents, summary.tokens, summary.largest_token)
    return tokens, lengths, indexed_dataset.document_boundaries(prefix).tolist(), counts


def test_it_says_what_mmap_says(both):
    assert of(both["lazy"]) == of(both["cached"]) == of(both["mmap"])
    assert both["lazy"].with_suffix(".idx").read_bytes() == both["cached"].with_suffix(".idx").read_bytes()
    assert lazy_index.is_lazy(f"{both['lazy']}.idx")
    assert not lazy_index.is_lazy(f"{both['mmap']}.idx")
    assert not lazy_index.is_lazy("s3://bucket/absent.idx")


def test_commands_of_data_read_it(both, capsys):
    capsys.readouterr()
    found = []
    for kind in ("lazy", "mmap"):
        assert cli.main(["data", "inspect", "--json", str(both[kind])]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one.pop("format") for one in found] == ["lazy or cached", "mmap"]
    for name in ("dataset", "type", "bytes"):
        assert found[0].pop(name) != found[1].pop(name)
    assert found[0] == found[1]
    assert cli.main(["data", "verify", str(both["lazy"])]) == 0


@pytest.mark.parametrize(
    ("at", "number", "told"),
    [
        (8, 2, "version 2"),
        (16, 77, "token type 77"),
        (32, 1 << 40, "truncated"),
        (56, 5, "must be one-dimensional lists of tokens"),
        (56 + 8 * 5, 3, "invalid sequence offsets"),
        (56 + 8 * 6, -1, "invalid sequence lengths"),
        (56 + 8 * 9, 3, "invalid document boundaries"),
    ],
)
def test_damage_is_said_in_a_line(both, at, number, told):
    index = both["lazy"].with_suffix(".idx")
    content = bytearray(index.read_bytes())
    content[at : at + 8] = struct.pack("<q", number)
    if at == 32:
        content[40:48] = content[32:40]
    index.write_bytes(content)
    with pytest.raises(UsageError, match=told):
        indexed_dataset.validate(both["lazy"])


def test_a_file_that_ends_early_is_said_in_a_line(both):
    index = both["lazy"].with_suffix(".idx")
    for size in (20, 100):
        index.write_bytes(index.read_bytes()[:size])
        with pytest.raises(UsageError, match="truncated"):
            indexed_dataset.validate(both["lazy"])
