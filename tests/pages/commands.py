"""The command line: each command, with every argument and option of its parser."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from kvcache_plugin import cli
from tests.pages.markdown import code, table

if TYPE_CHECKING:
    from collections.abc import Mapping


def commands() -> Mapping[str, argparse.ArgumentParser]:
    """The parsers of all commands, by name."""
    (found,) = (
        action for action in cli.parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    return found.choices


def summaries() -> str:
    return table(
        ("command", "what it does"),
        [
            (f"[{code(name)}](#{name})", parser.description or "")
            for name, parser in commands().items()
        ],
    )


def options(parser: argparse.ArgumentParser) -> str:
    """The arguments and options of one command, or those before it."""
    return table(
        ("argument", "what it is"),
        [
            (_shown(action), action.help or "")
            for action in parser._actions
            if not isinstance(action, argparse._SubParsersAction)
        ],
    )


def _shown(action: argparse.Action) -> str:
    """As it is written: ``PATH``, ``--json``, ``--device DEVICE``."""
    metavar = action.metavar or action.dest.upper()
    if not action.option_strings:
        return code(metavar)
    value = "" if action.nargs == 0 else f" {metavar}"
    shown = code(f"{', '.join(action.option_strings)}{value}")
    return f"{shown}, needed" if action.required else shown
