"""Generated parts of pages: between two comment lines, written whole, or only checked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_npu.base import files


def inserted(page: str, begin: str, text: str, end: str) -> str:
    """Return the text of a page with ``text`` between the lines ``begin`` and ``end``.

    Raises:
        ValueError: the page lacks one of the two.
    """
    before, found, rest = page.partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise ValueError(f"the page needs the lines {begin} and {end}")
    return f"{before}{begin}\n\n{text}\n\n{end}{after}"


def finish(pages: Mapping[Path, str], *, check: bool) -> int:
    """Write the pages, or only compare them; return the exit code: 1 if ``check`` finds an old one."""
    old = [
        path for path, text in pages.items() if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    if check:
        return int(bool(old))
    for path in old:
        files.write(path, pages[path])
    return 0
