"""Every generated part by name, and the pages that they stand on."""

from __future__ import annotations

import re
from functools import cache, partial
from typing import TYPE_CHECKING

from kvcache_plugin import cli
from kvcache_plugin.hosts.engines import ENGINES
from kvcache_plugin.hosts.releases import read_releases
from tests.pages import (
    checkpoints,
    commands,
    engines,
    formats,
    hardware,
    markdown,
    names,
    releases,
    rounding,
    switches,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

PART = re.compile(
    r"^<!-- generated: (?P<name>[\w-]+) -->\n(?P<text>.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL
)


@cache
def parts() -> Mapping[str, Callable[[], str]]:
    """What writes each part."""
    return {
        "public-names": names.public_names,
        "finding-kinds": checkpoints.kinds,
        "conventions": checkpoints.conventions,
        "convention-verdicts": checkpoints.convention_verdicts,
        "switches": switches.switches,
        "format-storage": formats.storage,
        "format-numbers": formats.numbers,
        "format-sizes": formats.sizes,
        "format-names": formats.names,
        "ranges": rounding.ranges,
        "e2m1-codes": rounding.e2m1_codes,
        **{
            f"rounding-{name}": partial(rounding.rounding, form)
            for name, form in rounding.FORMS.items()
        },
        **{
            f"seams-{engine.package}": partial(engines.engine_seams, engine.title)
            for engine in ENGINES
        },
        "seams-backend": engines.backend_seams,
        "seams-peers": engines.peer_seams,
        "releases": lambda: releases.table(read_releases()),
        "hardware-who": hardware.who,
        "hardware-who-in-short": hardware.who_in_short,
        "hardware-how": hardware.how,
        "hardware-why-not": hardware.why_not,
        "commands": commands.summaries,
        "command-options": partial(commands.options, cli.parser()),
        **{
            f"command-{name}": partial(commands.options, parser)
            for name, parser in commands.commands().items()
        },
    }


def rewritten(page: str) -> str:
    """The text of a page with its parts as the code has them.

    :raises KeyError: for a part of a name that is none.
    """

    def write(found: re.Match[str]) -> str:
        name = found["name"]
        return f"<!-- generated: {name} -->\n\n{parts()[name]()}\n\n<!-- end -->"

    return PART.sub(write, page)


def write_pages() -> Sequence[Path]:
    """Writes the pages whose parts are others now, and gives them."""
    changed = []
    for path in markdown.pages():
        page = path.read_text(encoding="utf-8")
        written = rewritten(page)
        if written != page:
            path.write_text(written, encoding="utf-8")
            changed.append(path)
    return changed
