"""The embedded driver's flags against the parser of Megatron-LM core_v0.16.1: names, places and defaults."""

from __future__ import annotations

import json
import os
import sys

import pytest

from megatron_npu.base.arg_parser import default_of
from megatron_npu.pretrain.flags.arguments import parser
from tests.conftest import ROOT, checkout
from tests.support import processes, tiny

sys.path.insert(0, str(ROOT / "scripts"))
from pretrain_flags import LATER, OTHERWISE, OWN

ADDED = {
    "--swap-optimizer",
    "--hccl-group-buffer-adaptive",
}  # of ours, which Megatron-LM's own scripts are given too

# defaults as JSON can say them: an enumeration's by its name, of one-element lists the element
ASK = """
import argparse, enum, json
import megatron_npu
from megatron.training.arguments import add_megatron_arguments

def plain(value):
    value = value[0] if isinstance(value, list) and len(value) == 1 else value
    return value.name if isinstance(value, enum.Enum) else value

actions = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions
found = {flag: (a.dest, plain(a.default)) for a in actions for flag in a.option_strings}
print(json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def stock():
    """Each flag of the stock parser: (its name in the arguments, its default)."""
    tree = str(checkout("megatron_core", "0.16.1"))
    paths = os.pathsep.join([str(ROOT), tree])
    environment = {**tiny.environment(), "PYTHONPATH": paths, "MEGATRON_LM_PATH": tree}
    command = [sys.executable, "-B", "-c", ASK]
    done = processes.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def ours():
    return {flag: action for action in parser()._actions for flag in action.option_strings}


def test_every_flag_but_the_listed_ones_is_one_of_megatron(stock, ours):
    unknown = [flag for flag in ours if flag not in stock or flag in ADDED]
    assert unknown == sorted((*OWN, *LATER), key=list(ours).index)
    for flag, action in ours.items():
        renamed = not {*LATER}.isdisjoint(action.option_strings)
        assert flag in OWN or renamed or stock[flag][0] == action.dest, flag


def test_every_default_but_the_listed_ones_is_that_of_megatron(stock, ours):
    differing = {
        flag
        for flag, action in ours.items()
        if flag not in (*OWN, *LATER) and (stock[flag][1] or None) != (action.default or None)
    }
    required = {flag for flag, action in ours.items() if action.required}
    assert differing | required <= set(OTHERWISE)
    # the others are decided once the device is known, so that the parser has none
    assert {flag for flag in set(OTHERWISE) - differing - required if default_of(ours[flag])} <= {
        "--cp-comm-type"
    }


def test_the_table_says_the_stock_default(stock):
    for flag, (told, _, _) in OTHERWISE.items():
        found = stock[flag][1] if stock[flag][1] != [] else None
        assert told == ({True: "on", False: "off"}.get(found, str(found)) if found is not None else told)
        assert found is not None or told in ("none", "off")
