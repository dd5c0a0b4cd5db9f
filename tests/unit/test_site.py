"""The site of the documentation: every link leads somewhere in it, and its navigation has every page once."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_npu.base import installed_packages
from tests.conftest import ROOT
from tests.support import processes, tiny

LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


@pytest.fixture(scope="module")
def site():
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        yield importlib.import_module("site_pages")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def pages(site, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    assert site.stage(folder) > 50
    return folder


def test_links_of_the_site_stay_in_it(pages):
    for page in pages.rglob("*.md"):
        text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
        for target in LINK.findall(text):
            if not re.match(r"[a-z]+:", target):
                file = (page.parent / target).resolve()
                assert file.is_file(), f"{page.relative_to(pages)} links to {target}"
                assert pages.resolve() in file.parents, f"{page.relative_to(pages)} links to {target}"


def test_style_sheets_that_the_site_names_are_in_it(pages):
    settings = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    sheets = re.findall(r"- (\S+)", "".join(re.findall(r"^extra_css:\n((?:  - \S+\n)+)", settings, re.M)))
    assert sheets
    assert [sheet for sheet in sheets if not (pages / sheet).is_file()] == []


def test_a_link_to_code_becomes_text(site, tmp_path):
    page = tmp_path / "docs" / "how-to" / "page.md"
    page.parent.mkdir(parents=True)
    (tmp_path / "NOTES.md").write_text("notes\n")
    (tmp_path / "code.py").write_text("")
    page.write_text("[notes](../../NOTES.md#part), [code](../../code.py), [out](https://example.org)\n")
    text, wanted = site.staged(page, tmp_path)
    assert text == "[notes](../project/NOTES.md#part), code, [out](https://example.org)\n"
    assert wanted == {tmp_path / "NOTES.md"}


def test_code_with_a_bar_in_a_table_and_chinese_line_ends_look_as_on_github(site, tmp_path):
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "## `--b`\n| [`--a X\\|<Y>`](#a) | `--b <N>` `b` |\n\n第一行，\n第二行\nABC\n", encoding="utf-8"
    )
    text, _ = site.staged(page, tmp_path)
    bar = "<code>--a X&#124;<wbr>&lt;Y&gt;</code>"
    flag = '<code class="flag">--b &lt;N&gt;</code>'
    assert text == f"## `--b`\n| [{bar}](#a) | {flag} `b` |\n\n第一行，第二行\nABC\n"


def test_the_navigation_has_every_page_once_and_no_record(pages):
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    assert len(listed) == len(set(listed))
    there = {str(page.relative_to(pages)) for page in pages.rglob("*.md")}
    assert set(listed) <= there
    kept_out = {name for name in there if name.startswith(("internals/", "records/", "project/"))}
    assert there - set(listed) <= kept_out
    assert not [name for name in listed if name.startswith(("internals/", "records/"))]


@pytest.mark.parametrize("folder", ["internals", "records"])
def test_search_leaves_generated_pages_and_records_out(pages, folder):
    found = sorted((pages / folder).glob("*.md"))
    assert found
    for page in found:
        assert page.read_text(encoding="utf-8").startswith("---\nsearch:\n  exclude: true\n---\n"), page.name


def test_the_site_builds_without_a_warning():
    if not installed_packages.is_installed("zensical"):
        pytest.skip("the case: zensical, which builds the site, is not installed (pip install -e '.[docs]')")
    done = processes.run(
        [sys.executable, str(ROOT / "scripts" / "site_pages.py")],
        env=tiny.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
