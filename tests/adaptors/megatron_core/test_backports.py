"""The wrong numbers of upstream: in its own functions where the list says so, and in none with our cures."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron_npu.adaptors import known_bugs
from megatron_npu.adaptors.megatron_core.backports import parallel
from megatron_npu.adaptors.shared import decorators
from megatron_npu.base import settings
from megatron_npu.commands import cli
from megatron_npu.patching.registry import registry
from tests.conftest import ROOT, checkout
from tests.support import on_version, tiny, warm

WORKER = Path(__file__).with_name("backports_worker.py")
VERSIONS = ["0.12.1", "0.16.1", "0.17.1", "0.19.2"]
if os.environ.get("TEST_EVERY_VERSION") == "1":  # the same states of the bugs as in their neighbours
    VERSIONS += ["0.13.1", "0.14.0", "0.15.3", "0.18.2", "0.20.0"]
# what the worker looks at: upstream's pull request, or version with the fix; the right value
RIGHT = {
    "aux": ("#5047", 1.0),
    "z": ("#5047", 1.0),
    "seq": ("#5047 #5798", 1.0),
    "z logged over": ("#3199", [0, 1, 2, 3]),
    "reduced": ("#5338", 2.0),
    "gathered": ("0.13", 1.0),
    "expert bias counts": ("#5916", True),
    "learning rates": ("#4705", [0.1, 0.2]),
    "decoupled rates": ("#4705", [0.1, 0.2]),
    "overridden rates": ("filed upstream", [0.2, 0.1]),
    "updates": ("#5976", [1.0, 0.0]),
    "gathered logits": ("#7452/2", [0.7417, -0.5237]),
    "smoothed loss": ("#7464", 0.9417),
    "offset counts": ("#7530", True),
    "further gradient": ("#7452/3", 1.5),
    "further logged": ("#7452/3", 1.5),
    "recompute group": ("#7452/4", True),
    "padding of rank": ("#7452/5", [True, True]),
    "embeddings of rank": ("#7452/7", [0.0, 1.0]),
    "projection group": ("#7452/6", True),
    "output norm": ("#7452/11", 2.0),
    "second stage": ("#7452/12", [f"module.decoder.layers.{number}.weight" for number in (2, 3, 2, 3)]),
    "counted places": ("#6981", [2, 4, 4]),
    "splits": ("#7512", [[0.5, 0.5, 0.0], "UsageError", "UsageError", [0.9, 0.1, 0.0]]),
    "factors of a script": ("filed upstream", [2, 32.0]),
}


def has(version: str, numbers: str) -> bool:
    """Return whether the list says that the version has one of these bugs."""
    listed = [bug for bug in known_bugs.bugs("megatron_core") if bug.until.endswith(tuple(numbers.split()))]
    assert listed, numbers
    return any(bug.is_in(version) for bug in listed)


@pytest.mark.parametrize("version", VERSIONS)
def test_numbers_are_wrong_where_the_list_says_so_and_right_when_cured(version) -> None:
    root = checkout("megatron_core", version) if version == "0.16.1" else on_version.root_of(version)
    environment = tiny.environment_of(root) | {settings.BACKPORT.name: "1"}
    done = warm.run([sys.executable, str(WORKER)], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (number, right) in RIGHT.items():
        cured, stock = found["cured"][name], found["stock"][name]
        if stock is None or (name == "learning rates" and version < "0.16"):  # groups differ in more there
            continue
        assert cured == right, name
        assert (stock != right) == has(version, number), f"{name}: {stock} in {version}"
    backports = [patch for patch in registry.patches if known_bugs.is_backport(patch)]
    meant = {patch.target for patch in backports if patch.is_for("megatron_core", version)}
    meant = {target for target in meant if "_ParamAndGradBucketGroup" not in target}  # not on a cpu
    assert meant <= {row["target"] for row in found["applied"] if row["upstream_bug"]}


def test_without_the_variable_the_ledger_says_that_they_are_left_out(monkeypatch) -> None:
    known_bugs.bugs("megatron_core")
    backports = [patch for patch in registry.patches if known_bugs.is_backport(patch)]
    assert len(backports) > 10
    monkeypatch.delenv(settings.BACKPORT.name, raising=False)
    reset = decorators.OURS.set(False)  # another test of this process may have trained
    try:
        assert {patch.reason_to_skip("npu") for patch in backports} == {
            "the wrong results are upstream's own; MEGATRON_NPU_BACKPORT=1 fixes them"
        }
    finally:
        decorators.OURS.reset(reset)
    monkeypatch.setenv(settings.BACKPORT.name, "1")
    assert {patch.reason_to_skip("npu") for patch in backports} == {None}


def test_a_training_of_our_own_wants_some_without_being_asked(monkeypatch) -> None:
    known_bugs.bugs("megatron_core")
    monkeypatch.delenv(settings.BACKPORT.name, raising=False)
    reset = decorators.OURS.set(True)
    wanted = {patch.until for patch in registry.patches if decorators.is_cured_in_own_programs(patch)}
    try:
        backports = [patch for patch in registry.patches if known_bugs.is_backport(patch)]
        assert {patch.until for patch in backports if patch.reason_to_skip("cpu") is None} == wanted
    finally:
        decorators.OURS.reset(reset)
    assert {until.rpartition(" ")[2] for until in wanted} == {"#7452/3", "#7452/9", "#6981"}


@pytest.mark.parametrize("instances", [1, 2])
def test_reductions_wait_for_the_stream_that_computes(instances, monkeypatch) -> None:
    """Upstream's own, up to 0.16, waits for the default stream (#3693)."""
    waits: list[tuple[str, str]] = []

    def stream(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, wait_stream=lambda other: waits.append((name, other.name)))

    current = stream("current")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    config = SimpleNamespace(overlap_grad_reduce=True, num_distributed_optimizer_instances=instances)
    group = SimpleNamespace(ddp_config=config, communication_stream=stream("communication"))
    parallel.wait_for_gradients(lambda self: waits.append(("reduction", "begins")), group)
    parallel.wait_for_reduction(lambda self: waits.append(("reduction", "ended")), group)
    both = [("communication", "current"), ("current", "communication")]
    plain = [("reduction", "begins"), ("reduction", "ended")]
    assert waits == ([both[0], *plain, both[1]] if instances > 1 else plain)


def test_the_doctor_lists_the_bugs_of_a_megatron(capsys, monkeypatch) -> None:
    monkeypatch.delenv(settings.BACKPORT.name, raising=False)
    command = ["doctor", "--known-bugs", "--megatron", str(on_version.root_of("0.19.2"))]
    assert cli.main(command) == 0
    text = capsys.readouterr().out
    assert "fully_shard_optimizer" in text
    assert "#5338" not in text  # fixed in 0.19.0
    assert "15 that make results wrong are not fixed (MEGATRON_NPU_BACKPORT=0)" in text
    assert text.count("fixed in megatron-npu's own training commands") == 4
    monkeypatch.setenv(settings.BACKPORT.name, "1")
    assert cli.main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert all(bug["fixed"] for bug in report["bugs"])
