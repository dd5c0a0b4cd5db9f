"""Hugging Face folders of a stranger: weights, configurations, tokenizers, cards."""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.campaign.accounts.rooms import Room
from tests.campaign.accounts.samples import Samples, config
from tests.campaign.accounts.trials import EITHER, REFUSED, Try
from tests.support.payload import Runs

_PLACE = "models and tokenizers of another account"
Make = Callable[[Path, Path], object]  # of a folder and a mark
_TENSOR = {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}


def tries(room: Room) -> Iterator[Try]:
    """Yield the imports of hostile folders, then tokenizations with hostile tokenizers."""
    samples = Samples(room)
    for name, (make, expected) in MODELS.items():
        folder = room.place(f"model {name}")
        (folder / "config.json").write_text(config())
        _safetensors({})(folder, folder)
        make(folder, room.mark(name))
        room.give(folder)
        yield Try(_PLACE, f"convert: {name}", samples.convert(folder), expected, limit=200, starts=False)
    lines = samples.written("ones.jsonl", '{"text":"' + "1 " * 40 + '3"}\n')
    for name, (make, expected) in TOKENIZERS.items():
        folder = room.place(f"tokenizer {name}")
        (folder / "tokenizer_config.json").write_text('{"eos_token": "2"}')
        make(folder, room.mark(name))
        room.give(folder)
        flags = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(folder)]
        words = ["preprocess", "--input", str(lines), "--output-prefix", str(room.temporary / "t"), *flags]
        what = f"tokenizer: {name}"
        yield Try(_PLACE, what, words, expected, prepare=_limited, limit=120, starts=False)


def _limited() -> None:
    """Let what expands without end meet a limit before the machine does."""
    resource.setrlimit(resource.RLIMIT_AS, (12 << 30, 12 << 30))


def _safetensors(header: dict[str, object] | bytes, body: bytes = b"") -> Make:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()

    def make(folder: Path, mark: Path) -> None:
        (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)

    return make


def _config(text: str | None = None, **changes: object) -> Make:
    return lambda folder, mark: (folder / "config.json").write_text(text or config(**changes))


def _instead(name: str, target: str) -> Make:
    """Return what puts a link, or a pipe for an empty target, in the place of a file."""

    def make(folder: Path, mark: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target) if target else os.mkfifo(folder / name)

    return make


def _files(**texts: object) -> Make:
    """Return what writes files; __ in a name is a point, {mark} in a text is the mark."""

    def make(folder: Path, mark: Path) -> None:
        for name, text in texts.items():
            written = text if isinstance(text, str) else json.dumps(text)
            (folder / name.replace("__", ".")).write_text(written.replace("{mark}", str(mark)))

    return make


def _bin(content: Callable[[Path], bytes]) -> Make:
    def make(folder: Path, mark: Path) -> None:
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(content(mark))

    return make


def _saved(mark: Path) -> bytes:
    import torch

    stream = io.BytesIO()
    torch.save(Runs(mark), stream)
    return stream.getvalue()


def _expanding(mark: Path) -> bytes:
    """Return a saved file whose part of 4 GiB takes a few MB."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", pickle.dumps({}))
        archive.writestr("a/version", "3\n")
        with archive.open("a/data/0", "w", force_zip64=True) as part:
            for _ in range(4096):
                part.write(bytes(1 << 20))
    return stream.getvalue()


_CODE = 'open("{mark}", "w")\nclass T: pass\nclass C: pass\n'
_REMOTE = {"AutoConfig": "evil.C", "AutoTokenizer": ["evil.T", None], "AutoModelForCausalLM": "evil.C"}

MODELS: dict[str, tuple[Make, str]] = {
    "a header of 2^63 bytes": (
        lambda folder, _: (folder / "model.safetensors").write_bytes(struct.pack("<Q", 1 << 63) + b"{}"),
        REFUSED,
    ),
    "offsets outside": (_safetensors({"a": _TENSOR}), REFUSED),
    "negative offsets": (_safetensors({"a": {**_TENSOR, "data_offsets": [-16, 0]}}, bytes(16)), REFUSED),
    "a shape of 2^80": (
        _safetensors({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 0]}}),
        REFUSED,
    ),
    "a header of nested lists": (_safetensors(b'{"a":' + b"[" * 200_000), REFUSED),
    "a name with a surrogate": (
        _safetensors(b'{"\\ud800":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
        REFUSED,
    ),
    "a name that is twice": (_safetensors(b'{"a":{},"a":{}}'), REFUSED),
    "another dtype": (_safetensors({"a": {**_TENSOR, "dtype": "F7"}}, bytes(16)), REFUSED),
    "pickle in a saved file": (_bin(_saved), REFUSED),
    "plain pickle": (_bin(lambda mark: pickle.dumps(Runs(mark))), REFUSED),
    "a part of 4 GiB in 4 MB": (_bin(_expanding), REFUSED),
    "an index that leads outside": (
        _files(model__safetensors__index__json={"weight_map": {"a": "../x.safetensors"}}),
        REFUSED,
    ),
    "an index with an absolute path": (
        _files(model__safetensors__index__json={"weight_map": {"a": "/etc/passwd"}}),
        REFUSED,
    ),
    "an index of lists": (_files(model__safetensors__index__json={"weight_map": {"a": ["x"]}}), REFUSED),
    "an index that is a list": (_files(model__safetensors__index__json=[1]), REFUSED),
    "weights of /dev/zero": (_instead("model.safetensors", "/dev/zero"), REFUSED),
    "weights in a pipe": (_instead("model.safetensors", ""), REFUSED),
    "config in a pipe": (_instead("config.json", ""), REFUSED),
    "config of /dev/zero": (_instead("config.json", "/dev/zero"), REFUSED),
    "config of /proc/self/mem": (_instead("config.json", "/proc/self/mem"), REFUSED),
    "config nested": (_config('{"a":' + "[" * 300_000), REFUSED),
    "config that is a list": (_config("[1]"), REFUSED),
    "config with 10^4 digits": (_config('{"model_type":"llama","vocab_size":' + "9" * 10_000 + "}"), REFUSED),
    "10^9 layers": (_config(num_hidden_layers=10**9), REFUSED),
    "no heads": (_config(num_attention_heads=0), REFUSED),
    "negative heads": (_config(num_attention_heads=-4), REFUSED),
    "vocabulary nan": (_config(vocab_size=float("nan")), REFUSED),
    "hidden size is text": (_config(hidden_size="64; rm"), REFUSED),
    "layers is a list": (_config(num_hidden_layers=[2]), REFUSED),
    "layers is true": (_config(num_hidden_layers=True), REFUSED),
    "10^7 experts": (_config(model_type="mixtral", num_local_experts=10**7, num_experts_per_tok=2), REFUSED),
    "rope_scaling of text": (_config(rope_scaling="x"), REFUSED),
    "rope_scaling nan": (_config(rope_scaling={"rope_type": "llama3", "factor": float("nan")}), REFUSED),
    "dtype of code": (_config(torch_dtype="__import__('os')"), REFUSED),
    "remote code": (
        lambda folder, mark: (
            _config(auto_map=_REMOTE, model_type="evil")(folder, mark),
            _files(evil__py=_CODE, configuration_evil__py=_CODE, __init____py=_CODE)(folder, mark),
        ),
        REFUSED,
    ),
    "remote code with a known type": (
        lambda folder, mark: (
            _config(auto_map=_REMOTE)(folder, mark),
            _files(evil__py=_CODE, modeling_llama__py=_CODE)(folder, mark),
        ),
        REFUSED,
    ),
    "quantization config": (_config(quantization_config={"quant_method": "evil"}), REFUSED),
    "a surrogate": (_config('{"model_type":"\\ud800"}'), REFUSED),
    "a key with a newline": (_config('{"model_type":"x\\n\\u001b[2Jmegatron: done"}'), REFUSED),
    "generation_config is a pipe": (_instead("generation_config.json", ""), REFUSED),
    "a card of 100 MB": (lambda folder, _: (folder / "README.md").write_bytes(b"-" * (100 << 20)), REFUSED),
    "a card of recursive YAML": (_files(README__md="---\na: &a [*a]\nb: *a\n---\n"), REFUSED),
    "a card that runs": (
        _files(README__md='---\na: !!python/object/apply:os.mkdir ["{mark}"]\n---\n'),
        REFUSED,
    ),
}

_WORDS = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"1": 0, "2": 1, "3": 2}, "unk_token": "1"},
}


def _tokenizer(**changes: object) -> dict[str, object]:
    return {**_WORDS, **changes}


TOKENIZERS: dict[str, tuple[Make, str]] = {
    "of /dev/zero": (_instead("tokenizer.json", "/dev/zero"), REFUSED),
    "in a pipe": (_instead("tokenizer.json", ""), REFUSED),
    "nested": (_files(tokenizer__json='{"model":' + "[" * 200_000), REFUSED),
    "config in a pipe": (
        lambda folder, mark: (
            _files(tokenizer__json=_WORDS)(folder, mark),
            _instead("tokenizer_config.json", "")(folder, mark),
        ),
        REFUSED,
    ),
    "remote code": (
        _files(
            tokenizer__json=_WORDS,
            tokenizer_config__json={"auto_map": _REMOTE, "tokenizer_class": "T"},
            evil__py=_CODE,
        ),
        EITHER,
    ),
    "a regular expression that explodes": (
        _files(
            tokenizer__json=_tokenizer(
                pre_tokenizer={
                    "type": "Split",
                    "pattern": {"Regex": "(1|1 |1 2)*(1|1 2|1 )*x"},
                    "behavior": "Isolated",
                    "invert": False,
                }
            )
        ),
        EITHER,
    ),
    "a broken regular expression": (
        _files(tokenizer__json=_tokenizer(pre_tokenizer={"type": "Split", "pattern": {"Regex": "(["}})),
        REFUSED,
    ),
    "a replacement that expands": (
        _files(
            tokenizer__json=_tokenizer(
                normalizer={
                    "type": "Sequence",
                    "normalizers": [
                        {"type": "Replace", "pattern": {"String": "1"}, "content": "1" * 10_000}
                        for _ in range(3)
                    ],
                }
            )
        ),
        REFUSED,
    ),
    "ids of 2^32": (
        _files(tokenizer__json=_tokenizer(model={**_WORDS["model"], "vocab": {"1": 0, "2": 2**32}})),  # type: ignore[dict-item]
        REFUSED,
    ),
    "ids of 2^31": (
        _files(tokenizer__json=_tokenizer(model={**_WORDS["model"], "vocab": {"1": 0, "2": 2**31}})),  # type: ignore[dict-item]
        EITHER,
    ),
    "negative ids": (
        _files(tokenizer__json=_tokenizer(model={**_WORDS["model"], "vocab": {"1": -1}})),  # type: ignore[dict-item]
        REFUSED,
    ),
    "no vocabulary": (
        _files(tokenizer__json=_tokenizer(model={"type": "BPE", "vocab": {}, "merges": []})),
        EITHER,
    ),
    "a million added tokens": (
        _files(
            tokenizer__json=_tokenizer(
                added_tokens=[
                    {
                        **{"id": 3 + number, "content": f"<{number}>", "special": True, "normalized": False},
                        **{"single_word": False, "lstrip": False, "rstrip": False},
                    }
                    for number in range(200_000)
                ]
            )
        ),
        EITHER,
    ),
    "special tokens map is a list": (
        _files(tokenizer__json=_WORDS, special_tokens_map__json="[1]"),
        EITHER,
    ),
    "eos is a list": (
        _files(tokenizer__json=_WORDS, tokenizer_config__json={"eos_token": ["x"]}),
        EITHER,
    ),
    "a chat template that runs": (
        _files(
            tokenizer__json=_WORDS,
            tokenizer_config__json={
                "chat_template": "{{ ''.__class__.__mro__[1] }}{% for i in range(10**9) %}{% endfor %}",
                "eos_token": "2",
            },
        ),
        EITHER,
    ),
}
