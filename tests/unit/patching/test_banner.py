"""What is said before the first step."""

from __future__ import annotations

import pytest

from megatron_npu.patching import banner


@pytest.fixture(autouse=True)
def nothing_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(banner, "_say", None)


def test_said_before_the_first_step_alone() -> None:
    said = []
    banner.before_step()
    banner.prepare(lambda: said.append("words"))
    assert said == []
    banner.before_step()
    banner.before_step()
    assert said == ["words"]


def test_words_that_fail_are_not_said_again() -> None:
    """Telling must not fail every step of a run."""

    def fail() -> None:
        raise OSError("no more room on the terminal")

    banner.prepare(fail)
    with pytest.raises(OSError, match="no more room"):
        banner.before_step()
    banner.before_step()
