"""Texts that end a text, found in pieces of any size."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_npu.serving.stops import Stops

LETTERS = st.text("ab", max_size=4)


@given(st.lists(LETTERS, max_size=12), st.lists(LETTERS.filter(bool), max_size=3))
def test_pieces_give_what_stands_before_the_first_one(pieces, stops):
    watched = Stops(stops)
    shown = [watched.passed(piece) for piece in pieces]
    text, whole = "".join(shown), "".join(pieces)
    ends = [end for end in range(len(whole) + 1) if any(whole[:end].endswith(stop) for stop in stops)]
    if ends:
        assert watched.found
        assert whole.startswith(text)
        assert not any(stop in text for stop in stops)
        assert watched.rest() == ""
    else:
        assert not watched.found
        assert text + watched.rest() == whole


def test_the_beginning_of_one_is_held_back_until_it_is_none():
    watched = Stops(["END"])
    assert [watched.passed(piece) for piece in ("aE", "N", "x", "EN", "D more")] == ["a", "", "ENx", "", ""]
    assert watched.found
