"""The tokenizer of a converted model is the one that transformers reads, or the conversion ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import carried_files, verify
from megatron_npu.conversion.tokenizer import tokenizer_files, tokenizer_proof
from megatron_npu.data.tokenization.gpt2_bpe import GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from tests.support.tokenizers_made import GPT2_CONFIG, byte_level, write_gpt2_files, write_json

transformers = pytest.importorskip("transformers")

ADDED = ("<|endoftext|>", "<|user|>", "<|end|>")
TALK = "<|user|>hi<|end|>"


@pytest.fixture
def folder(tmp_path) -> Path:
    """A folder with the config.json of a GPT-2 alone."""
    place = tmp_path / "model"
    place.mkdir()
    write_json(place / "config.json", GPT2_CONFIG)
    return place


@pytest.fixture
def talking(folder) -> Path:
    """A GPT-2 with added tokens, one of which ends a text, in all the forms that a published model has."""
    tokenizer = byte_level(special=ADDED)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_gpt2_files(folder, tokenizer)
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"})
    return folder


def chosen(folder: Path, vocabulary: int = 400, **options: str) -> tokenizer_files.Chosen:
    return tokenizer_files.choose(folder, folder, vocabulary, **options)


def built(found: tokenizer_files.Chosen) -> GPT2Tokenizer | HuggingFaceTokenizer:
    words = found.flags
    if "GPT2BPETokenizer" in words:
        return GPT2Tokenizer(words[words.index("--vocab-file") + 1], words[words.index("--merge-file") + 1])
    return HuggingFaceTokenizer(words[words.index("--tokenizer-model") + 1])


def test_added_tokens_and_the_end_are_those_of_tokenizer_json(talking):
    found = chosen(talking)
    ours, theirs = built(found), transformers.AutoTokenizer.from_pretrained(talking)
    assert ours.encode(TALK) == theirs.encode(TALK)
    assert ours.encode(TALK)[0] == ours.vocabulary["<|user|>"]
    assert ours.eod == theirs.convert_tokens_to_ids("<|end|>") == ours.encode(TALK)[-1]
    assert ours.decode(ours.encode(TALK)) == TALK
    assert "a text ends with <|end|>" in " ".join(found.said)
    assert found.flags[-2:] == ["--vocab-size", "400"]


@pytest.mark.parametrize("named", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens_beside_the_two_files_of_gpt2(folder, named):
    write_gpt2_files(folder, byte_level())
    size = len(json.loads((folder / "vocab.json").read_text()))
    described = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|end|>"}
    if named == "added_tokens.json":
        write_json(folder / named, {"<|user|>": size, "<|end|>": size + 1})
    else:
        tokens = {str(size + i): {"content": t, "special": True} for i, t in enumerate(ADDED[1:])}
        described["added_tokens_decoder"] = tokens
    write_json(folder / "tokenizer_config.json", described)
    found = chosen(folder)
    ours, theirs = built(found), transformers.AutoTokenizer.from_pretrained(folder)
    assert "tokenizer.json was missing" in found.said[0]
    assert ours.encode(TALK) == theirs.encode(TALK)
    assert ours.encode(TALK)[0] == size
    assert ours.eod == size + 1


def test_a_vocabulary_that_cuts_numbers_otherwise_is_not_gpt2_s(folder):
    tokenizer = byte_level(pre_tokenizers.Digits(individual_digits=True))
    tokenizer.save(str(folder / "tokenizer.json"))
    write_gpt2_files(folder, tokenizer)
    described = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", described)
    ours, theirs = built(chosen(folder)), transformers.AutoTokenizer.from_pretrained(folder)
    for text in ("12 34", "3 x 4", "1  2"):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == text


def test_the_two_files_of_gpt2_alone_are_megatron_s_own(folder):
    write_gpt2_files(folder, byte_level())
    found = chosen(folder)
    assert isinstance(built(found), GPT2Tokenizer)
    assert "both tokenizers agree" in found.said[0]
    assert "<|endoftext|> inside a text is read as ordinary characters" in found.said[1]


def test_another_tokenizer_than_transformers_reads_is_refused_with_an_example(talking):
    with pytest.raises(UsageError, match=r"differ: .*<\|end\|>.* (in|by) ours and .* that of transformers"):
        chosen(talking, kind="GPT2BPETokenizer")


@pytest.mark.parametrize(
    "changed",
    [
        lambda ours: setattr(ours, "eod", 3),
        lambda ours: setattr(ours, "encode", lambda text: [1] if text.startswith("中") else real(ours, text)),
        lambda ours: setattr(ours, "decode", lambda ids: "?"),
        lambda ours: setattr(ours, "vocabulary", {**ours.vocabulary, "new": 7}),
    ],
    ids=["end", "encode", "decode", "vocabulary"],
)
def test_the_proof_sees_each_difference(talking, changed):
    ours, theirs = HuggingFaceTokenizer(talking), tokenizer_proof.reference(talking)
    assert tokenizer_proof.difference(ours, theirs) is None
    changed(ours)
    with pytest.raises(
        UsageError,
        match="Nothing was written, because the model would read and write different tokens than in training",
    ):
        tokenizer_proof.require_equal(ours, theirs)


def real(ours: HuggingFaceTokenizer, text: str) -> list[int]:
    return HuggingFaceTokenizer.encode(ours, text)


def test_a_file_that_transformers_reads_otherwise_becomes_what_it_reads(folder):
    """Its class for GPT-2 rebuilds the cuts, whatever tokenizer.json has."""
    byte_level(words=False).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    before = HuggingFaceTokenizer(folder).encode("to be")
    found = chosen(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    assert built(found).encode("to be") == theirs.encode("to be") != before
    assert "tokenizer.json was rewritten in the form in which transformers reads it" in found.said[0]


def test_lengths_of_somebody_s_batches_are_left_aside(folder):
    tokenizer = byte_level()
    tokenizer.enable_truncation(5)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    found = chosen(folder)
    assert not any("was rewritten" in line for line in found.said)
    assert len(built(found).encode("x" * 50)) == 50
    assert len(built(found).encode("x")) == 1


def test_an_end_that_no_file_names_is_asked_for(folder):
    write_json(folder / "config.json", {"model_type": "llama", "eos_token_id": 2})
    byte_level(special=("<|end|>",)).save(str(folder / "tokenizer.json"))
    with pytest.raises(UsageError, match=r"does not define the end-of-text token.*--eos-token"):
        chosen(folder)
    with pytest.raises(UsageError, match="eos_token"):
        chosen(folder, end="<|nowhere|>")
    found = built(chosen(folder, end="<|end|>"))
    assert found.eod == found.vocabulary["<|end|>"]


def test_the_end_of_transformers_class_counts_where_the_model_has_it_too(folder):
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|endoftext|>")
    with pytest.raises(UsageError, match="--eos-token"):
        chosen(folder)
    write_json(folder / "config.json", {"model_type": "gpt2", "eos_token_id": end})
    assert built(chosen(folder)).eod == end


def test_a_model_that_ends_its_texts_otherwise_is_told_of(talking):
    assert "the model's eos_token_id 50256 is not used" in chosen(talking).said[-1]
    end = HuggingFaceTokenizer(talking).eod
    write_json(talking / "generation_config.json", {"eos_token_id": [7, end]})
    assert not any("eos_token_id" in line for line in chosen(talking).said)


def test_no_tokenizer_is_said_and_can_be_asked_for(folder, talking):
    found = chosen(talking, kind="NullTokenizer")
    assert found.flags == ["--tokenizer-type", "NullTokenizer", "--vocab-size", "399"]
    assert "as requested" in found.said[0]
    carried_files.remove_tokenizer(folder)
    assert f"{folder} has no tokenizer" in chosen(folder).said[0]


@pytest.mark.parametrize(
    ("config", "generation", "end", "said"),
    [
        ({}, {}, None, "without an eos_token_id, texts end with the last id, 399"),
        ({"eos_token_id": 2}, {"eos_token_id": 7}, 2, "texts end with 2, the model's eos_token_id"),
        ({}, {"eos_token_id": 7}, 7, "texts end with 7"),
        ({"eos_token_id": [5, 7, 9]}, {}, 5, "but not with 7, 9"),
        ({"eos_token_id": 399}, {}, None, "texts end with 399"),
        ({"eos_token_id": 50256}, {}, None, "the last id, 399"),  # none of this model's
    ],
)
def test_without_a_tokenizer_the_model_says_what_ends_a_text(folder, config, generation, end, said):
    write_json(folder / "config.json", {"model_type": "gpt2", **config})
    write_json(folder / "generation_config.json", generation)
    found = chosen(folder)
    assert found.flags[4:] == ([] if end is None else ["--null-tokenizer-eod-id", str(end)])
    assert said in found.said[0]


def test_a_tokenizer_for_another_model(talking):
    size = HuggingFaceTokenizer(talking).vocab_size
    with pytest.raises(
        UsageError, match=f"has {size} tokens, more than the model's vocabulary of {size - 1}"
    ):
        chosen(talking, size - 1)
    assert "--vocab-size" not in chosen(talking, size).flags


def test_files_that_transformers_cannot_read(folder):
    (folder / "tokenizer.model").write_bytes(b"no sentencepiece")
    with pytest.raises(UsageError, match=r"transformers cannot read the tokenizer in .*NullTokenizer"):
        chosen(folder)


def test_without_transformers_the_files_must_say_it_all(talking, monkeypatch):
    monkeypatch.setattr(verify, "has_reference", lambda: False)
    found = chosen(talking)
    assert built(found).eod == built(found).vocabulary["<|end|>"]
    assert "the tokenizer was NOT compared" in found.said[0]
    (talking / "tokenizer.json").unlink()
    with pytest.raises(UsageError, match=r"no tokenizer\.json"):
        chosen(talking)


def test_messages_name_the_folder_that_was_given(talking, tmp_path):
    copied = tmp_path / "copied"
    carried_files.copy(talking, copied)
    (copied / "tokenizer.json").write_text("{")
    with pytest.raises(UsageError) as caught:
        tokenizer_files.choose(talking, copied, 400)
    assert str(talking) in str(caught.value)
    assert str(copied) not in str(caught.value)


# -- which files come along ----------------------------------------------------------------------------------


def test_links_stay_inside_the_folder(folder, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("{}")
    (folder / "real.json").write_text("{}")
    (folder / "special_tokens_map.json").symlink_to("real.json")
    carried_files.copy(folder, tmp_path / "copied")
    assert not (tmp_path / "copied" / "special_tokens_map.json").is_symlink()
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(UsageError, match=r"tokenizer\.json is a link to .*secret"):
        carried_files.copy(folder, tmp_path / "again")
    assert not (tmp_path / "again" / "tokenizer.json").exists()


def test_links_of_the_hub_s_cache_are_followed(folder, tmp_path):
    cache = tmp_path / "models--someone--something"
    (cache / "blobs").mkdir(parents=True)
    (cache / "blobs" / "0f").write_text('{"eos_token": "e"}')
    (cache / "snapshots").mkdir()
    snapshot = folder.rename(cache / "snapshots" / "abc")
    (snapshot / "tokenizer_config.json").symlink_to("../../blobs/0f")
    carried_files.copy(snapshot, tmp_path / "copied")
    assert (tmp_path / "copied" / "tokenizer_config.json").read_text() == '{"eos_token": "e"}'
    (cache / "refs").write_text("abc")
    (snapshot / "tokenizer.json").symlink_to("../../refs")
    with pytest.raises(UsageError, match="is a link to"):
        carried_files.copy(snapshot, tmp_path / "again")


def test_templates_of_conversations_come_along(folder, tmp_path):
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    carried_files.copy(folder, tmp_path / "copied")
    for name in ("chat_template.jinja", "additional_chat_templates/tools.jinja"):
        assert (tmp_path / "copied" / name).read_text() == (folder / name).read_text()


# -- to Hugging Face -----------------------------------------------------------------------------------------


def exported(folder: Path, place: Path, kind: str = "gpt2", **arguments: object) -> dict:
    """Write the files of a run's tokenizer for a model of a kind, prove them, and return the keys for
    config.json.
    """
    from argparse import Namespace

    plain = {"vocab_file": None, "merge_file": None, "tokenizer_model": None, "max_position_embeddings": 32}
    args = Namespace(**{**plain, **arguments})
    if args.tokenizer_type == "GPT2BPETokenizer":
        tokenizer = GPT2Tokenizer(args.vocab_file, args.merge_file)
    else:
        tokenizer = HuggingFaceTokenizer(args.tokenizer_model)
    place.mkdir()
    write_json(place / "config.json", {"model_type": kind})
    keys = tokenizer_files.copy_from_checkpoint(folder, args, tokenizer, place)
    write_json(place / "config.json", {"model_type": kind, **keys})
    assert any("agree" in line for line in tokenizer_files.prove(tokenizer, place))
    return keys


def test_a_run_s_own_tokenizer_json_is_written(talking, tmp_path):
    """The folder of a tokenizer that was trained for the run has no config.json."""
    (talking / "config.json").unlink()
    place = tmp_path / "written"
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(talking)}
    keys = exported(tmp_path, place, **arguments)
    theirs = transformers.AutoTokenizer.from_pretrained(place)
    assert keys["eos_token_id"] == theirs.eos_token_id == theirs.convert_tokens_to_ids("<|end|>")
    assert len(theirs.encode(TALK)) == 2 + len(HuggingFaceTokenizer(talking).encode("hi"))


def test_transformers_is_told_to_take_tokenizer_json_as_it_is(folder, tmp_path):
    """Without a class it would take GPT-2's cuts for this GPT-2."""
    (folder / "config.json").unlink()
    byte_level(words=False).save(str(folder / "tokenizer.json"))
    write_json(folder / "tokenizer_config.json", {"eos_token": "<|endoftext|>"})
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(folder)}
    exported(tmp_path, tmp_path / "written", **arguments)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "written")
    assert theirs.encode("to be") == Tokenizer.from_file(str(folder / "tokenizer.json")).encode("to be").ids


@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_gpt2_s_own_files_are_written_with_its_end(folder, tmp_path, kind):
    """Mixtral's class reads neither of the two files: it gets a ``tokenizer.json``."""
    write_gpt2_files(folder, byte_level())
    (folder / "config.json").unlink()
    vocab_file = (folder / "vocab.json").rename(tmp_path / "gpt2-vocab.json")
    merge_file = (folder / "merges.txt").rename(tmp_path / "gpt2-merges.txt")
    names = {"vocab_file": str(vocab_file), "merge_file": str(merge_file)}
    keys = exported(tmp_path, tmp_path / "written", kind, tokenizer_type="GPT2BPETokenizer", **names)
    assert keys["bos_token_id"] == keys["eos_token_id"] == GPT2Tokenizer(vocab_file, merge_file).eod
    assert (tmp_path / "written" / "tokenizer.json").exists() == (kind == "mixtral")


def test_another_tokenizer_takes_the_place_of_the_one_that_came_with_the_weights(talking, folder, tmp_path):
    """As after training on with other text: the checkpoint's folder still has the first one."""
    root = tmp_path / "root"
    root.mkdir()
    write_json(talking / "generation_config.json", {"eos_token_id": 1})
    talking.rename(root / "hf")
    other = tmp_path / "other"
    other.mkdir()
    byte_level(special=("<|stop|>",)).save(str(other / "tokenizer.json"))
    write_json(other / "tokenizer_config.json", {"eos_token": "<|stop|>"})
    arguments = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(other)}
    keys = exported(root, tmp_path / "written", **arguments)
    assert keys["eos_token_id"] == HuggingFaceTokenizer(other).eod
    assert not (tmp_path / "written" / "generation_config.json").exists()
    assert not (tmp_path / "written" / "vocab.json").exists()
