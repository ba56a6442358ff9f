"""A page that documents JSON field by field, and whether an object is what it says."""

from __future__ import annotations

import re
from typing import Any


def schema(page: str, heading: str) -> dict[str, dict[str, str]]:
    """The fields of each object under a heading of the page, and their types."""
    section = page.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    parts = (part.partition("\n") for part in section.split("\n### ")[1:])
    return {
        name: dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", body, re.MULTILINE))
        for name, _, body in parts
    }


def is_of(kind: str, value: Any) -> bool:
    kind = kind.strip()
    if kind.endswith(" or null"):
        return value is None or is_of(kind.removesuffix(" or null"), value)
    if kind.startswith("list of "):
        one = {"texts": "text", "numbers": "number", "whole numbers": "whole number"}
        item = kind.removeprefix("list of ")
        return isinstance(value, list) and all(is_of(one.get(item, "object"), v) for v in value)
    if kind == "number":
        return value in ("nan", "inf", "-inf") or type(value) in (int, float)
    types = {"text": str, "boolean": bool, "whole number": int}
    return type(value) is types.get(kind, dict)
