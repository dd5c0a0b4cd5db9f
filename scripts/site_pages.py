"""Build the documentation site with Zensical: site_pages.py [--stage]

The pages in docs/ link to files outside it: pictures, tests, the change log. They are copied to build/docs,
where these links lead to copies (pictures, pages) or become plain text (code). Then Zensical builds
build/site from mkdocs.yml, and any warning fails the build. With --stage, the pages are copied but the site
is not built.
"""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STAGED = Path("build") / "docs"
BESIDE = ("README.md", "README.zh-CN.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
_LINK = re.compile(r"(!?)\[((?:[^][]|\[[^][]*\])*)\]\(([^)\s#]*)(#[^)\s]*)?\)")
_CODE_WITH_BAR = re.compile(r"(?<!`)`([^`\n]*\\\|[^`\n]*)`(?!`)")
_FLAG = re.compile(r"(?<!`)`(--[^`\n|]{1,34})`(?!`)")
_CHINESE = "[\u3000-\u303f\u4e00-\u9fff\uff00-\uffef]"
_CHINESE_LINE_END = re.compile(rf"(?<={_CHINESE})\n(?={_CHINESE})")
_HIDDEN = "---\nsearch:\n  exclude: true\n---\n\n"


def place(path: Path, root: Path = ROOT) -> Path | None:
    """Return the path of a repository file in the site, below build/docs, or None if it is not there."""
    if (root / "docs") in path.parents:
        return path.relative_to(root / "docs")
    if path.suffix in (".png", ".svg"):
        return Path("assets") / path.relative_to(root)
    if path.suffix == ".md" and path.is_file():
        return Path("project") / path.relative_to(root)
    return None


def staged(page: Path, root: Path = ROOT) -> tuple[str, set[Path]]:
    """Return a page with its links adapted to the site, and the files outside docs/ that it links to."""
    wanted: set[Path] = set()

    def changed(match: re.Match[str]) -> str:
        shown, text, target, anchor = match[1], match[2], match[3], match[4] or ""
        if not target or re.match(r"[a-z]+:", target):
            return match[0]
        file = (page.parent / target).resolve()
        there, here = place(file, root), place(page, root)
        if there is None or here is None or not file.is_file():
            return text
        if (root / "docs") not in file.parents:
            wanted.add(file)
        return f"{shown}[{text}]({os.path.relpath(there, here.parent)}{anchor})"

    parts = re.split(r"(^```.*?^```$)", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    text = "".join(part if part.startswith("```") else _for_html(_LINK.sub(changed, part)) for part in parts)
    hidden = place(page, root)
    if hidden is not None and hidden.parts[0] in ("internals", "records"):
        text = _HIDDEN + text
    return text, wanted


def _for_html(text: str) -> str:
    r"""Adapt a page so that Python-Markdown renders it like GitHub, and join Chinese lines without spaces.

    Python-Markdown shows the backslash of ``a\|b`` in a table's code, and browsers show a line end between
    two Chinese characters as a space, and break ``--flag`` behind its hyphens. A long list of alternatives
    may break behind each bar, and a short flag not at all (``site.css``).
    """

    def code(match: re.Match[str]) -> str:
        return f"<code>{html.escape(match[1]).replace(chr(92) + '|', '&#124;<wbr>')}</code>"

    def flag(match: re.Match[str]) -> str:
        return f'<code class="flag">{html.escape(match[1])}</code>'

    text = _CODE_WITH_BAR.sub(code, text)
    lines = (line if line.startswith("#") else _FLAG.sub(flag, line) for line in text.split("\n"))
    return _CHINESE_LINE_END.sub("", "\n".join(lines))


def stage(folder: Path, root: Path = ROOT) -> int:
    """Write every page and picture of the site to a folder, and return the number of pages."""
    shutil.rmtree(folder, ignore_errors=True)
    waiting = [*sorted((root / "docs").rglob("*.md")), *(root / name for name in BESIDE)]
    pictures = {path for path in (root / "docs").rglob("*") if path.suffix in (".png", ".svg", ".css")}
    done: set[Path] = set()
    while waiting:
        page = waiting.pop()
        to = place(page, root)
        if page in done or to is None:
            continue
        done.add(page)
        text, wanted = staged(page, root)
        (folder / to).parent.mkdir(parents=True, exist_ok=True)
        (folder / to).write_text(text, encoding="utf-8")
        waiting += [path for path in wanted if path.suffix == ".md"]
        pictures |= {path for path in wanted if path.suffix != ".md"}
    for picture in pictures:
        to = folder / (place(picture, root) or "")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(picture, to)
    return len(done)


def main(argv: list[str]) -> int:
    """Stage the pages, and build the site unless --stage is given."""
    print(f"{stage(ROOT / STAGED)} pages in {STAGED}")
    if "--stage" in argv:
        return 0
    return subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--clean", "--strict"], cwd=ROOT, check=False
    ).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
