"""Links of the documentation lead somewhere, on GitHub and on the site, which has every page."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from tests.pages.blocks import prose
from tests.pages.markdown import DOCS, ROOT, pages

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
#: What mkdocstrings puts there: on the site alone.
_DOCUMENTED = re.compile(r"^::: (\S+)$", re.MULTILINE)


def links() -> Iterator[tuple[Path, str]]:
    for page in pages():
        for target in _LINK.findall(prose(page)):
            if "://" not in target:
                yield page, target


def slug(heading: str) -> str:
    """The anchor of a heading on GitHub: its letters and digits, with hyphens for spaces."""
    words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def anchors(page: Path) -> list[str]:
    text = prose(page)
    return [*map(slug, _HEADING.findall(text)), *_DOCUMENTED.findall(text)]


@pytest.mark.parametrize(
    ("heading", "anchor"),
    [
        ("Who is called", "who-is-called"),
        ("`quantize_kv(tensor, scale)`", "quantize_kvtensor-scale"),
        ("FP8, and [NVFP4](formats.md)!", "fp8-and-nvfp4"),
    ],
)
def test_anchors_are_githubs(heading: str, anchor: str) -> None:
    assert slug(heading) == anchor


def test_links_lead_to_pages_and_headings() -> None:
    found = list(links())
    assert len(found) > 50
    for page, target in found:
        path, _, anchor = target.partition("#")
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), f"{page.name}: {target}"
        if page.parent == DOCS:
            assert other.parent == DOCS, f"{page.name}: {target} is not on the site"
        if anchor:
            assert anchors(other).count(anchor) == 1, f"{page.name}: {target}"


def test_a_heading_that_is_linked_has_the_same_anchor_on_the_site() -> None:
    """MkDocs writes another one where a heading has letters beyond ASCII, or several hyphens."""
    for page, target in links():
        _, _, anchor = target.partition("#")
        assert anchor.isascii(), f"{page.name}: {target}"
        assert "--" not in anchor, f"{page.name}: {target}"


def test_every_page_of_the_site_is_in_its_menu_once() -> None:
    _, _, menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    menu = re.split(r"^\S", menu, flags=re.MULTILINE)[0]
    assert sorted(re.findall(r"^ +- (?:.+: )?(\S+\.md)$", menu, re.MULTILINE)) == sorted(
        page.name for page in DOCS.glob("*.md")
    )
