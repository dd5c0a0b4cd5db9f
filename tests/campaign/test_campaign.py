"""The short form of the campaign: one trial of each way to die, at a moment that is another each time.

Where a commit is judged (CI is set) it is the same, as far as a moment can be.
"""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.campaign import harms
from tests.campaign.run import Campaign

pytest.importorskip("megatron.core")
pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="needs Linux: it looks for processes in /proc"
)
TRIALS = [
    ("pretrain", harms.kill_writer, "saving"),
    ("pretrain, 2 ranks", harms.kill_launcher, "saving"),
    ("pretrain, 2 ranks", harms.restart, "training"),
    ("pretrain, 2 ranks", harms.kill, "training"),
    ("train, 2 ranks", harms.kill_worker, "training"),
    ("preprocess", harms.kill, "anywhere"),
    ("pretrain", harms.terminate, "saving"),
    ("pretrain", harms.hang_up, "saving"),
]


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    folder = tmp_path_factory.mktemp("campaign")
    made = Campaign(folder, folder / "faults")
    made.most = 2  # a run that has gone on once is struck again
    return made


@pytest.mark.parametrize(("label", "harm", "phase"), TRIALS, ids=[harm.__name__ for _, harm, _ in TRIALS])
def test_what_dies_leaves_nothing_and_goes_on_to_the_bit(
    campaign: Campaign, label: str, harm: harms.Harm, phase: str
) -> None:
    seed = 1 if os.environ.get("CI") else random.SystemRandom().randrange(10**6)
    [way] = [way for way in campaign.ways if way.label == label]
    fault = campaign.make(seed, random.Random(seed), way, harm, phase)
    assert fault is None, f"seed {seed}: {fault}"
