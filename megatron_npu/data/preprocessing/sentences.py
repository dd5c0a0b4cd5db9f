"""Split texts into sentences with nltk's Punkt (``--split-sentences``), as Megatron's own tool does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from megatron_npu.base.errors import UsageError


@dataclass(frozen=True)
class Sentences:
    """The settings for splitting texts into sentences.

    Attributes:
        language: the name of the Punkt model (``--lang``).
        keep_newlines: whether line breaks between sentences are kept (``--keep-newlines``).
    """

    language: str
    keep_newlines: bool

    def splitter(self) -> Callable[[str], list[str]]:
        """Return a function that splits a text into sentences.

        Raises:
            UsageError: nltk, its data, or the language is not available.
        """
        punkt = _punkt()
        try:
            model = punkt.PunktTokenizer(self.language)
        except (LookupError, ValueError) as error:
            raise UsageError(
                f"--split-sentences --lang {self.language}: nltk's sentence model for this language is not "
                "installed; it must be a language in nltk's punkt_tab data, such as english. Download the "
                "data: python -m nltk.downloader punkt_tab (set NLTK_DATA to its folder if needed)."
            ) from error
        if not self.keep_newlines:
            return model.tokenize
        return punkt.PunktSentenceTokenizer(model._params, lang_vars=_with_blanks(punkt)).tokenize


def _punkt() -> Any:
    try:
        from nltk.tokenize import punkt
    except ImportError as error:
        raise UsageError(
            f"--split-sentences requires nltk 3.9 or newer to split sentences ({error}). Install it: pip "
            "install nltk, and its data: python -m nltk.downloader punkt_tab."
        ) from error
    return punkt


def _with_blanks(punkt: Any) -> Any:
    """Return Punkt's rules, modified so that whitespace after a sentence remains part of it."""
    usual = punkt.PunktLanguageVars._period_context_fmt
    after, between = "%(SentEndChars)s", r"\s+(?P<next_tok>"
    for part in (after, between):
        if part not in usual:
            raise RuntimeError(
                f"nltk's rule for the end of a sentence has changed: it no longer contains {part!r}"
            )
    changed = usual.replace(after, rf"\S*{after}\s*", 1).replace(between, "(?P<next_tok>", 1)
    return type("KeepingBlanks", (punkt.PunktLanguageVars,), {"_period_context_fmt": changed})()
