"""Writes the generated parts of all pages anew, and says which pages that changed."""

from __future__ import annotations

from tests.pages.markdown import ROOT
from tests.pages.parts import write_pages

for page in write_pages():
    print(page.relative_to(ROOT))
