"""The public names."""

from __future__ import annotations

import inspect
from typing import Final

import kvcache_plugin
from tests.pages.markdown import code, table

#: Of what has no docstring of its own.
_SUMMARIES: Final = {
    "__version__": "The version of the package.",
    "hookimpl": "Marks the functions of an implementation.",
    "hookspec": "Marks the specifications of the hooks.",
}


def public_names() -> str:
    """Each with the first line of its docstring."""
    return table(
        ("name", "what it is"),
        [
            (f"[{code(name)}](#kvcache_plugin.{name})", _summary(name))
            for name in sorted(kvcache_plugin.__all__, key=str.lower)
        ],
    )


def _summary(name: str) -> str:
    if name in _SUMMARIES:
        return _SUMMARIES[name]
    docstring = inspect.getdoc(getattr(kvcache_plugin, name)) or ""
    return docstring.partition("\n")[0].replace("``", "`")
