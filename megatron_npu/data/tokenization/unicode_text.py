"""Check that text from a command line, which may contain invalid bytes, is valid Unicode."""

from __future__ import annotations

from megatron_npu.base.errors import UsageError


def require(text: str) -> None:
    """Check that a text can be encoded as UTF-8.

    Python stores each byte of a command line that is not UTF-8 as a lone surrogate, and JSON can contain lone
    surrogates too.

    Raises:
        UsageError: the text cannot be encoded.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError(
            f"the text must be valid UTF-8, but its character {error.start + 1} is {text[error.start]!a}",
            remedy="Enter it again in an editor or terminal that uses UTF-8.",
        ) from error
