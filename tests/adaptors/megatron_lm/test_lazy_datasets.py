"""``--dataset-impl lazy`` and ``cached``: upstream's own builder and readers are the judges."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from functools import partial

import numpy as np
import pytest
import torch

from megatron_npu.adaptors.shared import data
from megatron_npu.commands import cli
from megatron_npu.data.preprocessing import indexed_dataset
from tests.support import stock_lm

DOCUMENTS = ([[5, 6, 7], [8]], [[9, 70000]], [[1] * 40, [2, 3]])  # of sentences


@pytest.fixture
def upstream(checkout, monkeypatch):
    """Upstream's module as it is, without its package."""
    monkeypatch.setattr(np, "float", float, raising=False)
    package = types.ModuleType("megatron")
    package.print_rank_0 = lambda *_: None
    monkeypatch.setitem(sys.modules, "megatron", package)
    path = checkout / "megatron" / "data" / "indexed_dataset.py"
    spec = importlib.util.spec_from_file_location("upstream_indexed_dataset", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def ours(tmp_path):
    """Return a dataset in the format of lazy and cached, as ``preprocess`` writes it."""
    with indexed_dataset.Writer(str(tmp_path / "ours"), np.dtype(np.int32), lazy=True) as writer:
        for document in DOCUMENTS:
            tokens = np.concatenate([np.array(one, np.int32) for one in document])
            lengths = np.array([len(one) for one in document], np.int32)
            writer.add(tokens.tobytes(), lengths, np.array([len(document)]))
        writer.finish()
        indexed_dataset.publish([writer])
    return tmp_path / "ours"


def test_the_bytes_are_those_of_upstreams_builder(upstream, ours, tmp_path):
    builder = upstream.make_builder(str(tmp_path / "theirs.bin"), "lazy", vocab_size=100)
    for document in DOCUMENTS:
        for sentence in document:
            builder.add_item(torch.IntTensor(sentence))
        builder.end_document()
    builder.finalize(str(tmp_path / "theirs.idx"))
    for end in ("bin", "idx"):
        assert ours.with_suffix(f".{end}").read_bytes() == (tmp_path / f"theirs.{end}").read_bytes()


@pytest.mark.parametrize("impl", ["lazy", "cached", "infer"])
def test_upstreams_readers_give_the_tokens(upstream, ours, impl):
    dataset = upstream.make_dataset(str(ours), impl)
    if impl != "lazy":
        dataset.prefetch(range(len(dataset)))
    sentences = [sentence for document in DOCUMENTS for sentence in document]
    assert [dataset[number].tolist() for number in range(len(dataset))] == sentences
    assert dataset.doc_idx.tolist() == [0, 2, 3, 5]


@pytest.mark.parametrize("impl", ["lazy", "cached", "infer"])
def test_a_training_opens_it_as_its_samplers_ask(upstream, ours, impl, monkeypatch):
    """Sizes of 32 bits and parts of a sequence, which upstream's readers of these do not have."""
    theirs = upstream.make_dataset(str(ours), impl)
    assert theirs.sizes.dtype == np.int64
    assert not hasattr(theirs, "get")
    index = upstream.MMapIndexedDataset.Index
    read = partial(data.read_either, index.__init__)
    monkeypatch.setattr(index, "__init__", lambda self, *args, **kwargs: read(self, *args, **kwargs))
    dataset = data.through_a_map(upstream.make_dataset, str(ours), impl, True)
    assert (dataset.sizes.dtype, dataset.doc_idx.dtype) == (np.int32, np.int64)
    assert dataset.sizes.tolist() == theirs.sizes.tolist()
    assert dataset.get(2, offset=1).tolist() == [70000]
    assert dataset.get(3, offset=2, length=3).tolist() == [1, 1, 1]


def test_the_stock_script_trains_on_what_preprocess_writes(checkout, tmp_path):
    vocabulary, merges = stock_lm.write_vocabulary(tmp_path)
    source = tmp_path / "texts.jsonl"
    texts = ["another text of many " * number for number in range(1, 30)]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    words = f"--vocab-file {vocabulary} --merge-file {merges} --append-eod --input {source}".split()
    found = {}
    for kind in ("mmap", "lazy"):
        output = ["--dataset-impl", kind, "--output-prefix", str(tmp_path / kind)]
        assert cli.main(["preprocess", *words, *output]) == 0
        own = (
            f"--data-path {tmp_path / kind}_text_document --data-impl {kind} --train-iters 2 --split 90,10,0"
        )
        flags = [*stock_lm.flags(tmp_path), *own.split(), "--num-layers", "1"]
        result = stock_lm.run(checkout / "pretrain_gpt.py", flags)
        found[kind] = stock_lm.losses(stock_lm.succeeded(result))
    assert list(found["lazy"]) == [1, 2]
    assert found["lazy"] == found["mmap"]
