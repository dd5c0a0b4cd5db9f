"""What does not go together is said in one line, and nothing else is refused."""

from __future__ import annotations

import itertools
import re

import pytest

from megatron_npu.base.errors import UsageError
from megatron_npu.finetune.run import command
from megatron_npu.options import switch_rules
from megatron_npu.options.switch_rules import DEVICES, Place
from megatron_npu.options.switches import FULLY, SHARDINGS, Switches
from tests.conftest import ROOT


def every_combination():
    """Yield all switches in all combinations; those that are on or off in a few of them."""
    rows = itertools.product(SHARDINGS, (None, "bf16", "fp16"), (False, True), (0, 8))
    for sharding, precision, offload, rank in rows:
        yield Switches(
            sharding=sharding,
            mixed_precision=precision,
            cpu_offload=offload,
            lora_rank=rank,
        )


@pytest.mark.parametrize("family", switch_rules.FAMILIES)
@pytest.mark.parametrize("device", switch_rules.DEVICES)
@pytest.mark.parametrize(("cut", "alone"), [(False, False), (False, True), (True, False), (True, True)])
def test_refused_or_not(family, device, cut, alone, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)  # all is installed
    place = Place(family, device, cut, alone)
    for switches in every_combination():
        against = []
        if switches.cpu_offload and device == "cpu":
            against.append("--cpu-offload on the cpu device")
        if family == "megatron":
            against += ["--lora-rank for a Megatron model"] if switches.lora_rank else []
            fully = switches.sharding in FULLY and not cut and not alone
            gathers = switches.sharding in ("zero-3", "fsdp")
            against += ["with tensor, pipeline or context parallelism"] if cut and gathers else []
            against += ["fp16"] if fully and switches.mixed_precision == "fp16" else []
            against += ["--cpu-offload"] if fully and switches.cpu_offload else []
            against += ["in fp32"] if switches.cpu_offload and not switches.mixed_precision else []
        if not against:
            switch_rules.refuse(switches, place)
            continue
        with pytest.raises(UsageError) as error:
            switch_rules.refuse(switches, place)
        assert "\n" not in str(error.value)
        assert any(part in error.value.given for part in against), error.value.given


def test_the_documents_word_for_graphs_means_our_operations_on_an_npu():
    """Where torch.compile has no kernels; our own word is refused there."""
    words = Switches(graph_optimization=True, graph_word="--onnx-runtime-training")
    fused, line = switch_rules.meant(words, Place("user", "npu"))
    assert (fused.fused_ops, fused.graph_optimization) == (True, False)
    assert line.startswith("--onnx-runtime-training means --fused-ops on an NPU: ")
    switch_rules.refuse(fused, Place("user", "npu"))
    for given, place in (
        (words, Place("user", "cpu")),
        (Switches(graph_optimization=True), Place("user", "npu")),
    ):
        assert switch_rules.meant(given, place) == (given, "")
    with pytest.raises(UsageError, match="--graph-optimization on the npu device"):
        switch_rules.refuse(Switches(graph_optimization=True), Place("transformers", "npu"))


def test_a_refusal_names_the_word_that_was_typed(monkeypatch):
    monkeypatch.setattr("shutil.which", lambda name: None)
    for word in ("--onnx-runtime-training", "--graph-optimization"):
        with pytest.raises(UsageError, match=f"{word} requires a C"):
            switch_rules.refuse(Switches(graph_optimization=True, graph_word=word), Place("user", "cpu"))


def test_a_compiler_that_cxx_names_must_exist_because_torch_tries_no_other(tmp_path, monkeypatch):
    """Found by the campaign: with another compiler on PATH, ``train`` ended with a traceback of torch."""
    other = tmp_path / "g++"
    other.write_text("")
    other.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(switch_rules.sys, "platform", "linux")
    switch_rules.need_compiler("cpu")
    for name in ("/nowhere/g++", ""):
        monkeypatch.setenv("CXX", name)
        with pytest.raises(
            UsageError, match=rf"there is no CXX={re.escape(name)}\. Correct or unset CXX, or"
        ):
            switch_rules.need_compiler("cpu")
    switch_rules.need_compiler("cuda")


def test_every_pair_that_is_refused_somewhere_is_in_the_table():
    """Nothing is refused that the page does not say: on one device a switch may be refused by itself."""
    page = (ROOT / "docs" / "reference" / "train-switches.md").read_text(encoding="utf-8")
    places = [Place(family, device) for family in ("transformers", "megatron") for device in DEVICES]
    for place, (one, other) in itertools.product(places, itertools.combinations(switch_rules.WORDS, 2)):
        if one.name == other.name:
            continue
        both = Switches(**{one.name: one.value, other.name: other.value})
        found = switch_rules.refusal_of(both, place)
        if found is not None and set(found.switches) == {one.name, other.name}:
            assert f"| `{one.flag}`, `{other.flag}` |" in page, (place, found.expected)
            assert found.expected in page


def test_every_switch_is_in_the_table():
    assert {word.name for word in switch_rules.WORDS} == set(Switches.__dataclass_fields__) - {"graph_word"}
    for word in switch_rules.WORDS:
        refused = any(
            rule.refuses(Switches(**{word.name: word.value}), Place("megatron", "cuda"))
            for rule in switch_rules.REFUSALS
            if "mixed_precision" not in rule.switches
        )
        assert refused is (word.megatron is None), word.flag


def test_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(command.devices, "current", command.devices.CpuDevice)
    script = tmp_path / "script.py"
    script.write_text("raise SystemExit('it ran')")
    with pytest.raises(UsageError, match="--cpu-offload on the cpu device"):
        command.main(["--user-script", str(script), "--cpu-offload", "--train-iters", "1"])
