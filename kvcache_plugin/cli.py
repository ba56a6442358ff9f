"""``kvcache-plugin``: its parser, and what runs a command. The commands are in ``commands/``.

Exit status 0 when all is fine, 1 when something is wrong, 2 when the command is used wrongly.
A command is imported when it is run, and torch with it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final

from kvcache_plugin import __version__
from kvcache_plugin.commands.common import FINE, MISUSED, WRONG, say
from kvcache_plugin.errors import KVCacheError, anchored

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["FINE", "MISUSED", "WRONG", "main", "parser"]

#: What ``machine.find_device`` takes.
_DEVICE_HERE: Final = (
    "cuda:0, cpu, or the architecture of a card that is here; default: the GPU, if any"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    :param argv: what stands after the program's name; that of this process by default.
    :returns: the exit status.
    """
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without our characters
    arguments = parser().parse_args(argv)
    try:
        status: int = import_module(f"kvcache_plugin.commands.{arguments.command}").run(arguments)
        sys.stdout.flush()
    except KVCacheError as error:
        return say(error, WRONG)
    except BrokenPipeError:  # whoever reads has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return WRONG
    return status


def _replace_closed_streams() -> None:
    """Whoever closed one (``>&-``) wants to see nothing of it; Python has ``None`` there."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            setattr(sys, name, os.fdopen(nowhere, "w", encoding="utf-8", closefd=False))


def parser() -> argparse.ArgumentParser:
    """All commands, with their arguments and options."""
    parser = argparse.ArgumentParser(
        prog="kvcache-plugin",
        description="Checks and quantizes the KV caches of vLLM and SGLang.",
        epilog=(
            "Begin with: kvcache-plugin doctor; kvcache-plugin check PATH. A message that ends "
            "with [errors#NAME] is explained under NAME in docs/errors.md of the repository. Exit "
            "status: 0 all is fine, 1 something is wrong, 2 used wrongly."
        ),
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, summary: str, epilog: str | None = None) -> argparse.ArgumentParser:
        """The parser of the command that ``commands/{name}.py`` runs."""
        added = commands.add_parser(name, help=summary, description=summary, epilog=epilog)
        added.add_argument("--json", action="store_true", help="print JSON instead of text")
        added.set_defaults(command=name)
        return added

    add("plugins", "List the implementations that are installed.")
    _add_explain_options(
        add(
            "explain",
            "Say which implementation serves a device and format, and why.",
            "Example: kvcache-plugin explain --device sm_90 --kv-cache-dtype nvfp4",
        )
    )
    add("doctor", "Find out whether the plugin works with the engines installed here.")
    _add_check_options(
        add(
            "check",
            "Look for what is wrong with a checkpoint's K/V scales before it is served.",
            "Exit status: 0 sound, 1 problems, 2 unreadable or used wrongly. Headers and scales "
            "alone are read, and nothing is downloaded.",
        )
    )
    selftest = add(
        "selftest",
        "Check every implementation that serves the hardware of this machine, bit by bit.",
        "Send the output of --json from hardware that nobody else has. On a GPU the first run "
        "compiles kernels, and so takes some minutes.",
    )
    selftest.add_argument("--device", help=_DEVICE_HERE)
    _add_bench_options(
        add(
            "bench",
            "Time every implementation that serves a device, beside a copy and plain torch.",
            "It takes a minute at most, without --tokens and what is compiled at a first call. "
            "docs/performance.md says what the columns mean.",
        )
    )
    add("demo", "See a corrupt scale refused, and K/V quantized in every format.")
    return parser


def _add_explain_options(explain: argparse.ArgumentParser) -> None:
    explain.add_argument("--device", required=True, help="cpu, sm_90, gfx942, cuda:0 ...")
    explain.add_argument("--kv-cache-dtype", required=True, help="fp8, fp8_e5m2, nvfp4 ...")


def _add_check_options(check: argparse.ArgumentParser) -> None:
    check.add_argument(
        "path",
        metavar="PATH",
        help="a folder, a .safetensors file, or a model in the local Hugging Face cache",
    )
    check.add_argument("--kv-cache-dtype", help="fp8, nvfp4 ...; default: the declared one")
    check.add_argument("--device", help="cpu, sm_90, gfx942 ...; default: the GPU, if any")
    check.add_argument(
        "--plot", metavar="FILE", help="draw the scales by layer into a .png or .svg"
    )
    check.add_argument("--against", metavar="OTHER", help="compare with another checkpoint")


def _add_bench_options(bench: argparse.ArgumentParser) -> None:
    bench.add_argument("--device", help=_DEVICE_HERE)
    bench.add_argument(
        "--kv-cache-dtype",
        type=_names,
        metavar="FORMAT,...",
        help="fp8, fp8_e5m2, nvfp4 ...; default: fp8,nvfp4",
    )
    bench.add_argument(
        "--tokens",
        type=_numbers,
        metavar="N,...",
        help="how many tokens K has; default: 1,16,256,4096,65536",
    )
    bench.add_argument(
        "--peers",
        action="store_true",
        help="also time the quantizers of torchao, vLLM and SGLang, where they are installed",
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(
            anchored(f"{text!r} has an empty name in it", "option-value")
        )
    return names


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(
            anchored(f"{text!r} is not numbers from 1 up, as in 1,256,4096", "option-value")
        )
    return tuple(map(int, numbers))
