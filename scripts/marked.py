"""Write or check generated pages and the generated parts of pages, each between two comment lines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_npu.base import files


def inserted(page: str, begin: str, text: str, end: str) -> str:
    """Return a page in which ``text`` replaces the text between the lines ``begin`` and ``end``.

    Raises:
        ValueError: the page lacks one of the two lines.
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page needs the lines {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def finish(pages: Mapping[Path, str], *, check: bool) -> int:
    """Write the pages, or only compare them with ``check``; return 1 if a page is not up to date, else 0."""
    old = [
        path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        return int(bool(old))
    for path in old:
        files.write(path, pages[path])
    return 0
