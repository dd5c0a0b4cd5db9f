"""What can be said of the patches of this upstream without importing Megatron."""

from __future__ import annotations

import shutil

import pytest

from megatron_npu import adaptors
from megatron_npu.commands import cli
from megatron_npu.patching.registry import registry
from megatron_npu.upstream import megatrons
from tests.support.appendix_a import LISTED
from tests.support.tiny import ROOT

KINDS = ("replace(", "around(", "wrap(", "constant(", "watch(")


def file_of(room: str) -> str:
    """Return where in the folder of adaptors a room is."""
    return room if "/" in room else f"megatron_lm/{room}"


@pytest.mark.parametrize("adaptor", LISTED)
def test_listed_functions_have_their_adaptor(adaptor):
    adaptors.register("megatron_lm")
    for target, room in LISTED[adaptor].items():
        upstreams = ("", "megatron_lm")
        patches = [
            patch for patch in registry.patches if patch.target == target and patch.upstream in upstreams
        ]
        assert patches, target
        assert {"/".join(patch.origin.split(".")[2:4]) for patch in patches} == {file_of(room)}


def test_the_page_tells_the_line_of_every_listed_function():
    adaptors.register("megatron_lm")
    rows = (ROOT / "docs" / "internals" / "guide-functions.md").read_text(encoding="utf-8").splitlines()
    for file, functions in LISTED.items():
        for target, room in functions.items():
            start = f"| `{file}.py` | `{target}` | "
            (row,) = (row for row in rows if row.startswith(start))
            for patch in row.removeprefix(start).strip("` |").split("`, `"):
                place, line = patch.split(":")
                assert place == f"{file_of(room)}.py"
                record = (ROOT / "megatron_npu" / "adaptors" / place).read_text().splitlines()[int(line) - 1]
                assert record.strip(" @_").removeprefix("recorder.").startswith(KINDS), row


def test_pins_are_those_of_the_checkout(checkout, capsys):
    assert cli.main(["check", "--strict", "--megatron", str(checkout)]) == 0
    assert "0 fail" in capsys.readouterr().out


def test_an_altered_function_is_named(checkout, tmp_path, capsys):
    shutil.copytree(
        checkout / "megatron", tmp_path / "megatron", ignore=shutil.ignore_patterns("__pycache__")
    )
    file = tmp_path / "megatron" / "model" / "transformer.py"
    text = file.read_text()
    old = "def forward(self, query_layer, key_layer,\n                value_layer, attention_mask):"
    assert text.count(old) == 1
    file.write_text(text.replace(old, old.replace("attention_mask)", "attention_mask, bias=None)")))
    assert megatrons.find(tmp_path).version == "unknown"
    assert cli.main(["check", "--megatron", str(tmp_path)]) == 1
    failing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILS")]
    assert len(failing) == 1
    assert failing[0].endswith("megatron.model.transformer:CoreAttention.forward")
