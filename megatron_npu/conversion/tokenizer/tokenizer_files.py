"""Find, write and verify the tokenizer of a converted model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_npu.base import files
from megatron_npu.base.errors import UsageError
from megatron_npu.conversion import carried_files, config, verify
from megatron_npu.conversion.tokenizer import tokenizer_proof
from megatron_npu.data.tokenization import hf
from megatron_npu.data.tokenization.gpt2_bpe import END_OF_TEXT, GPT2Tokenizer
from megatron_npu.data.tokenization.hf import HuggingFaceTokenizer
from megatron_npu.pretrain.checkpoint import checkpoint_files
from megatron_npu.pretrain.data import tokenizers
from megatron_npu.pretrain.flags.frozen_flags import Flags

KINDS = ("GPT2BPETokenizer", "HuggingFaceTokenizer", "NullTokenizer")
_UNPROVEN = (
    'transformers is not installed, so the tokenizer was NOT compared (pip install "megatron_npu[hf]")'
)
_LITERAL_END = f"{END_OF_TEXT} inside a text is read as ordinary characters, as in Megatron"


@dataclass(frozen=True)
class Chosen:
    """The tokenizer that was chosen for the built-in trainer.

    Attributes:
        flags: flags for the tokenizer and the model's vocabulary size.
        said: the lines to print for the user.
    """

    flags: list[str]
    said: list[str]


# -- to Megatron --------------------------------------------------------------------------------------------


def choose(
    source: Path, folder: Path, vocabulary: int, *, kind: str | None = None, end: str | None = None
) -> Chosen:
    """Return the model's tokenizer, after checking that it encodes and decodes like that of transformers.

    Args:
        source: the Hugging Face folder, used in messages.
        folder: a folder with copies of the tokenizer's files. Missing settings are written to these copies.
        vocabulary: the number of tokens in the model's vocabulary.
        kind: Megatron's name for the tokenizer. If None, it is determined from the files.
        end: the end-of-text token. If None, it is read from the files.

    Raises:
        UsageError: the files are incomplete, or transformers creates a different tokenizer from them.
    """
    names = carried_files.vocabularies(folder)
    if kind == "NullTokenizer" or (kind is None and not names):
        reason = "as requested" if kind else f"{source} has no tokenizer"
        said = f"NullTokenizer, {reason}: texts are numbers separated by spaces"
        return _numbers(folder, vocabulary, said)
    with _naming(source, folder):
        if end is not None:
            _name_end(folder, end)
        chosen = _fitting(candidate := _made(folder, kind, names), vocabulary)
        return Chosen(chosen.flags, [*chosen.said, *_other_ends(folder, candidate.tokenizer.eod)])


def _numbers(folder: Path, vocabulary: int, said: str) -> Chosen:
    """Choose a NullTokenizer as the tokenizer of the converted model.

    Its end-of-text id is ``eos_token_id`` if that is set, or else the last id.
    """
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary - 1)]
    named = [_ends(folder, name) for name in (config.NAME, carried_files.GENERATION)]
    ends = [token for token in (named[0] or named[1]) if 0 <= token < vocabulary]
    if not ends:
        return Chosen(
            flags, [f"{said}; without an eos_token_id, texts end with the last id, {vocabulary - 1}"]
        )
    others = f", but not with {', '.join(map(str, ends[1:]))}" if ends[1:] else ""
    if ends[0] != vocabulary - 1:
        flags += ["--null-tokenizer-eod-id", str(ends[0])]
    return Chosen(flags, [f"{said}; texts end with {ends[0]}, the model's eos_token_id{others}"])


@dataclass(frozen=True)
class _Candidate:
    """A candidate for the tokenizer, with its flags (except the vocabulary size) and log lines."""

    tokenizer: tokenizer_proof.Tokenizer
    flags: list[str]
    said: list[str]


def _made(folder: Path, kind: str | None, names: list[str]) -> _Candidate:
    theirs = tokenizer_proof.reference(folder) if verify.has_reference() else None
    if kind != "HuggingFaceTokenizer" and {"vocab.json", "merges.txt"} <= set(names):
        if kind == "GPT2BPETokenizer":
            return _gpt2(folder, theirs)
        if "tokenizer.json" not in names and _is_plain_gpt2(folder):
            with contextlib.suppress(UsageError):  # a byte-level BPE of others has these two files, too
                return _gpt2(folder, theirs)
    elif kind == "GPT2BPETokenizer":
        raise UsageError(
            f"{folder} must contain both vocab.json and merges.txt for this --tokenizer-type, but one of "
            "them is missing. Add the missing file, or remove --tokenizer-type."
        )
    return _hugging_face(folder, theirs)


def _is_plain_gpt2(folder: Path) -> bool:
    """Return True if tokens are defined only by ``vocab.json`` and ``merges.txt``, as in GPT-2."""
    added = hf.read_object(folder / hf.CONFIG).get("added_tokens_decoder")
    tokens = added.values() if isinstance(added, dict) else ()
    contents = [token.get("content") for token in tokens if isinstance(token, dict)]
    named = [hf.special_token(folder, role) for role in ("bos_token", "eos_token", "unk_token")]
    others = [*hf.read_object(folder / "added_tokens.json"), *contents, *named]
    return all(token in (END_OF_TEXT, None) for token in others)


def _gpt2(folder: Path, theirs: Any) -> _Candidate:
    names = str(folder / "vocab.json"), str(folder / "merges.txt")
    tokenizer = GPT2Tokenizer(*names)
    said = [_UNPROVEN] if theirs is None else [tokenizer_proof.require_equal(tokenizer, theirs)]
    flags = ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", names[0], "--merge-file", names[1]]
    return _Candidate(tokenizer, flags, [*said, f"GPT2BPETokenizer: {_LITERAL_END}"])


def _hugging_face(folder: Path, theirs: Any) -> _Candidate:
    _settle_end(folder, theirs)
    said = _rewritten(folder, theirs)
    tokenizer = HuggingFaceTokenizer(folder)
    said.append(_UNPROVEN if theirs is None else tokenizer_proof.require_equal(tokenizer, theirs))
    return _Candidate(
        tokenizer, ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)], said
    )


def _rewritten(folder: Path, theirs: Any) -> list[str]:
    """Make ``tokenizer.json`` equivalent to the tokenizer that transformers creates from all files.

    Return a line for the user if the file changed. Old folders do not have the file, and transformers 5
    rebuilds some tokenizers from their vocabulary, with its own rules for the space before the first word.
    """
    path = folder / hf.FILE
    if theirs is None:
        return []
    why = None
    if path.is_file():
        why = tokenizer_proof.difference(HuggingFaceTokenizer(folder), theirs)
        if why is None:
            return []
    if not hasattr(theirs, "backend_tokenizer"):
        raise UsageError(
            f"the tokenizer in {folder}, a {type(theirs).__name__}, cannot be converted to a tokenizer.json; "
            "only fast tokenizers (of the package tokenizers) are supported. Pass --tokenizer-type "
            "NullTokenizer to convert without a tokenizer."
        )
    files.write(path, theirs.backend_tokenizer.to_str(pretty=True))
    if why is None:
        return ["tokenizer.json was missing; transformers generated it from the other files"]
    return [f"tokenizer.json was rewritten in the form in which transformers reads it: {why}"]


def _settle_end(folder: Path, theirs: Any) -> None:
    """Make sure that the files define an end-of-text token.

    Raises:
        UsageError: the files do not determine it.
    """
    if hf.special_token(folder, "eos_token") is not None:
        return
    # the class of transformers has one of its own, which is right where the model says the same
    if theirs is not None and theirs.eos_token_id in _ends_of_the_model(folder):
        _name_end(folder, theirs.eos_token)
        return
    raise UsageError(
        f"{folder} does not define the end-of-text token (there is no eos_token in {hf.CONFIG}). Pass it "
        "with --eos-token, or pass --tokenizer-type NullTokenizer to convert without a tokenizer."
    )


def _ends_of_the_model(folder: Path) -> set[int]:
    """Return the ids of the end-of-text tokens in ``config.json`` and in the generation settings."""
    return {token for name in (config.NAME, carried_files.GENERATION) for token in _ends(folder, name)}


def _ends(folder: Path, name: str) -> list[int]:
    """Return the ids in a file's key ``eos_token_id``, whose value may be one id or several."""
    value = hf.read_object(folder / name).get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    return [token for token in ids if isinstance(token, int) and not isinstance(token, bool)]


def _other_ends(folder: Path, end: int) -> list[str]:
    """Return a warning if the tokenizer's end-of-text token is not one of the model's end-of-text tokens."""
    ends = _ends_of_the_model(folder)
    if not ends or end in ends:
        return []
    others = ", ".join(map(str, sorted(ends)))
    return [
        f"the model's eos_token_id {others} is not used, because texts end with the tokenizer's {end} here"
    ]


def _name_end(folder: Path, end: str) -> None:
    """Write the end-of-text token into ``tokenizer_config.json``."""
    path = folder / hf.CONFIG
    # without a class transformers would guess one by the model, and that may know better than tokenizer.json
    values = hf.read_object(path) or {"tokenizer_class": "PreTrainedTokenizerFast"}
    files.write(path, json.dumps({**values, "eos_token": end}, indent=2, ensure_ascii=False) + "\n")


def _fitting(candidate: _Candidate, vocabulary: int) -> Chosen:
    size = candidate.tokenizer.vocab_size
    if size > vocabulary:
        raise UsageError(
            f"the tokenizer has {size} tokens, more than the model's vocabulary of {vocabulary}. "
            f"Use this model's tokenizer, or pass --tokenizer-type NullTokenizer to convert "
            "without a tokenizer."
        )
    more = ["--vocab-size", str(vocabulary)] if size < vocabulary else []
    return Chosen([*candidate.flags, *more], candidate.said)


@contextlib.contextmanager
def _naming(source: Path, folder: Path) -> Iterator[None]:
    """Make error messages name the source folder instead of the folder that is being written."""
    try:
        yield
    except UsageError as error:
        parts = (error.given, error.expected, error.remedy)
        raise UsageError(*(part.replace(str(folder), str(source)) for part in parts)) from error


# -- to Hugging Face ----------------------------------------------------------------------------------------


def copy_from_checkpoint(
    root: Path, args: Flags, tokenizer: tokenizers.Tokenizer, destination: Path
) -> dict[str, Any]:
    """Copy the tokenizer of a checkpoint to a Hugging Face folder.

    Return keys for the folder's ``config.json``.

    Args:
        root: the checkpoint's directory, which contains Hugging Face files if it was converted.
        args: the checkpoint's flags.
        tokenizer: the tokenizer that the flags select.
        destination: the folder.
    """
    origin = _hf_folder(root, args)
    keys: dict[str, Any] = {}
    if origin is not None:
        carried_files.copy(origin, destination)
        (destination / config.NAME).unlink(missing_ok=True)
        keys = _harmless_keys(origin)
    home = _home(args)
    if origin is not None and (home is None or home.samefile(origin)):
        return keys
    if isinstance(tokenizer, HuggingFaceTokenizer):
        carried_files.copy_tokenizer(Path(args.tokenizer_model), destination)
    elif isinstance(tokenizer, GPT2Tokenizer):
        _write_gpt2(args, destination)
    return keys | _ids_of(destination, tokenizer)


def _home(args: Flags) -> Path | None:
    """Return the folder from which the flags load the tokenizer, or None for a NullTokenizer."""
    named = {"GPT2BPETokenizer": args.vocab_file, "HuggingFaceTokenizer": args.tokenizer_model}
    path = named.get(args.tokenizer_type)
    if path is None:
        return None
    return Path(path) if Path(path).is_dir() else Path(path).parent


def _write_gpt2(args: Flags, destination: Path) -> None:
    carried_files.remove_tokenizer(destination)
    for name, path in (("vocab.json", args.vocab_file), ("merges.txt", args.merge_file)):
        files.write(destination / name, Path(path).read_bytes())
    described = {
        "tokenizer_class": "GPT2Tokenizer",
        "model_max_length": args.max_position_embeddings,
        **dict.fromkeys(("bos_token", "eos_token", "unk_token"), END_OF_TEXT),
    }
    files.write(destination / hf.CONFIG, json.dumps(described, indent=2) + "\n")


def _ids_of(folder: Path, tokenizer: tokenizers.Tokenizer) -> dict[str, Any]:
    """Return the ids of the begin-of-text and the end-of-text tokens.

    The generation settings are removed, because their ids differ.
    """
    (folder / carried_files.GENERATION).unlink(missing_ok=True)
    begin = hf.special_token(folder, "bos_token")
    known = getattr(tokenizer, "vocabulary", {})
    return {"bos_token_id": known.get(begin), "eos_token_id": tokenizer.eod}


def prove(tokenizer: tokenizers.Tokenizer, folder: Path) -> Iterator[str]:
    """Check that transformers creates the tokenizer of the checkpoint from the folder that was written.

    Yield log lines.

    Raises:
        UsageError: transformers creates a different tokenizer.
    """
    if not isinstance(tokenizer, GPT2Tokenizer | HuggingFaceTokenizer):
        yield "NullTokenizer: texts are numbers, so no tokenizer was written"
    elif not verify.has_reference():
        yield _UNPROVEN
    else:
        yield _proven(tokenizer, folder)


def _proven(tokenizer: tokenizer_proof.Tokenizer, folder: Path) -> str:
    try:
        theirs = tokenizer_proof.reference(folder)
    except UsageError:
        if not isinstance(tokenizer, GPT2Tokenizer):
            raise
        _add_tokenizer_json(folder)
        theirs = tokenizer_proof.reference(folder)
    described = hf.read_object(folder / hf.CONFIG)
    if isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer_proof.difference(tokenizer, theirs):
        # the model was trained on tokenizer.json as it is, and not on what a class makes of its vocabulary
        described["tokenizer_class"] = "PreTrainedTokenizerFast"
        files.write(folder / hf.CONFIG, json.dumps(described, indent=2, ensure_ascii=False) + "\n")
        theirs = tokenizer_proof.reference(folder)
    return tokenizer_proof.require_equal(tokenizer, theirs)


def _add_tokenizer_json(folder: Path) -> None:
    """Add GPT-2's ``tokenizer.json`` for families whose class cannot read ``vocab.json`` (Mixtral)."""
    import transformers

    names = [str(folder / name) for name in ("vocab.json", "merges.txt")]
    made = transformers.GPT2TokenizerFast(*names, add_prefix_space=False)
    files.write(folder / hf.FILE, made.backend_tokenizer.to_str() + "\n")
    described = hf.read_object(folder / hf.CONFIG) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    files.write(folder / hf.CONFIG, json.dumps(described, indent=2) + "\n")


def model_type(root: Path, args: Flags) -> str | None:
    """Return the ``model_type`` of the model from which a checkpoint was converted, or None."""
    folder = _hf_folder(root, args)
    kind = None if folder is None else config.read(folder).get("model_type")
    return kind if isinstance(kind, str) else None


def _hf_folder(root: Path, args: Flags) -> Path | None:
    """Return the Hugging Face folder from which the tokenizer was copied, or None."""
    home = _home(args)
    near = [root / checkpoint_files.HF_FOLDER]
    if home is not None:
        near.insert(0, home)
    return next((place for place in near if (place / config.NAME).is_file()), None)


def _harmless_keys(folder: Path) -> dict[str, Any]:
    """Return those keys of a ``config.json`` that do not affect what the model computes."""
    ours = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
    carried = {key for key in config.HARMLESS - ours if not key.startswith("_")}  # which name the original
    return {key: value for key, value in config.read(folder).items() if key in carried}
