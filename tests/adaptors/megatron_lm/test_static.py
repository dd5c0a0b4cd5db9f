"""What can be said of the patches of this upstream without importing Megatron."""

from __future__ import annotations

import shutil

import pytest

from megatron_npu import cli, upstream
from megatron_npu.adaptors import megatron_lm
from megatron_npu.patching.registry import registry
from tests.adaptors.megatron_lm.appendix import LISTED


@pytest.mark.parametrize("adaptor", LISTED)
def test_listed_functions_have_their_adaptor(adaptor):
    megatron_lm.register()
    for target, room in LISTED[adaptor].items():
        upstreams = ("", "megatron_lm")
        patches = [
            patch for patch in registry.patches if patch.target == target and patch.upstream in upstreams
        ]
        assert patches, target
        assert {patch.origin.split(".")[3] for patch in patches} == {room}


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
    assert upstream.find(tmp_path).version == "unknown"
    assert cli.main(["check", "--megatron", str(tmp_path)]) == 1
    failing = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAILS")]
    assert len(failing) == 1
    assert failing[0].endswith("megatron.model.transformer:CoreAttention.forward")
