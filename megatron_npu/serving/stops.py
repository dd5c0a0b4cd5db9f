"""Detect stop strings in streamed text, and hold back text that may be the beginning of a stop string."""

from __future__ import annotations

from collections.abc import Sequence


class Stops:
    """Detects the first stop string that occurs in a text.

    Args:
        stops: non-empty strings.

    Attributes:
        found: whether a stop string was found. No text is passed on afterwards.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.found = False

    def passed(self, piece: str) -> str:
        """Add ``piece`` to the text, and return the characters that cannot be part of a stop string."""
        if self.found:
            return ""
        text = self._held + piece
        places = [place for place in map(text.find, self._stops) if place >= 0]
        if places:
            self.found, self._held = True, ""
            return text[: min(places)]
        held = self._beginning(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def rest(self) -> str:
        """Return the characters that are still held back when the text ends without a stop string."""
        return self._held

    def _beginning(self, text: str) -> int:
        """Return the length of the longest suffix of the text that may be the beginning of a stop string."""
        longest = min(max(map(len, self._stops), default=0) - 1, len(text))
        ends = (text[-number:] for number in range(longest, 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self._stops)), 0)
