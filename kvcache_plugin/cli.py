"""``kvcache-plugin``: plugins, explain, doctor, check, selftest, bench and demo.

Exit status 0 when all is fine, 1 when something is wrong, 2 when the command is used wrongly.
torch is imported by the commands that need it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import sys
import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from kvcache_plugin import __version__
from kvcache_plugin.errors import KVCacheError, shown
from kvcache_plugin.terminal import print_line, print_table, progress_bar, progress_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvcache_plugin.bench.run import Bench
    from kvcache_plugin.check.comparison import Comparison
    from kvcache_plugin.check.run import Check
    from kvcache_plugin.doctor import EngineStatus
    from kvcache_plugin.selftest import Selftest

FINE: Final = 0
WRONG: Final = 1
MISUSED: Final = 2

#: What ``machine.find_device`` takes.
_DEVICE_HERE: Final = (
    "cuda:0, cpu, or the architecture of a card that is here; default: the GPU, if any"
)


def main(argv: Sequence[str] | None = None) -> int:
    _replace_closed_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal without our characters
    arguments = parser().parse_args(argv)
    command: Callable[[argparse.Namespace], int] = arguments.command
    try:
        status = command(arguments)
        sys.stdout.flush()
    except KVCacheError as error:
        return _say(error, WRONG)
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
        epilog="Exit status: 0 all is fine, 1 something is wrong, 2 used wrongly.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], int], summary: str) -> Any:
        subparser = commands.add_parser(name, help=summary, description=summary)
        subparser.add_argument("--json", action="store_true", help="print JSON instead of text")
        subparser.set_defaults(command=command)
        return subparser

    add("plugins", _plugins, "List the implementations that are installed.")
    explain = add(
        "explain", _explain, "Say which implementation serves a device and format, and why."
    )
    explain.epilog = "Example: kvcache-plugin explain --device sm_90 --kv-cache-dtype nvfp4"
    explain.add_argument("--device", required=True, help="cpu, sm_90, gfx942, cuda:0 ...")
    explain.add_argument("--kv-cache-dtype", required=True, help="fp8, fp8_e5m2, nvfp4 ...")
    add("doctor", _doctor, "Find out whether the plugin works with the engines installed here.")
    check = add(
        "check",
        _check,
        "Look for what is wrong with a checkpoint's K/V scales before it is served.",
    )
    check.epilog = (
        "Exit status: 0 sound, 1 problems, 2 unreadable or used wrongly. Headers and scales alone "
        "are read, and nothing is downloaded."
    )
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
    selftest = add(
        "selftest",
        _selftest,
        "Check every implementation that serves the hardware of this machine, bit by bit.",
    )
    selftest.epilog = (
        "Send the output of --json from hardware that nobody else has. On a GPU the first run "
        "compiles kernels, and so takes some minutes."
    )
    selftest.add_argument("--device", help=_DEVICE_HERE)
    bench = add(
        "bench",
        _bench,
        "Time every implementation that serves a device, beside a copy and plain torch.",
    )
    bench.epilog = (
        "It takes a minute at most, without what is compiled when it is first called. "
        "docs/performance.md says what the columns mean."
    )
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
    add("demo", _demo, "See a corrupt scale refused, and K/V quantized in every format.")
    return parser


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name in it")
    return names


def _numbers(text: str) -> tuple[int, ...]:
    numbers = [part.strip().replace("_", "") for part in text.split(",")]
    if not all(number.isdecimal() and int(number) for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers from 1 up, as in 1,256,4096")
    return tuple(map(int, numbers))


def _plugins(arguments: argparse.Namespace) -> int:
    from kvcache_plugin.manager import get_manager

    with _output_aside():
        found = get_manager().implementations
    if arguments.json:
        _print_json([asdict(implementation) for implementation in found])
    else:
        print_table(
            ("name", "distribution", "hooks", "what it is"),
            [(f.name, f.distribution, ", ".join(f.hooks) or "-", _state(f)) for f in found],
        )
    return WRONG if any(implementation.is_broken for implementation in found) else FINE


def _explain(arguments: argparse.Namespace) -> int:
    from kvcache_plugin.api import explain
    from kvcache_plugin.hosts.write_paths import summaries
    from kvcache_plugin.hosts.writes import third_party_among
    from kvcache_plugin.settings import read_settings

    try:
        with _output_aside():
            rows = explain(arguments.device, arguments.kv_cache_dtype)
    except KVCacheError as error:  # a device or a format that nobody knows
        return _say(error, MISUSED)
    if arguments.json:
        _print_json([{**asdict(row), "chosen": row.chosen} for row in rows])
    else:
        print_table(
            ("name", "distribution", "chosen for", "reason"),
            [
                (row.name, row.distribution, ", ".join(row.chosen_for) or "-", row.reason)
                for row in rows
            ],
        )
        if not any(row.chosen for row in rows):
            print(f"\nnothing quantizes {arguments.kv_cache_dtype} on {arguments.device}")
        elif lines := list(
            summaries(
                arguments.kv_cache_dtype,
                vllm_writes=read_settings().vllm_writes,
                third_party=third_party_among(rows),
            )
        ):
            print("", *lines, sep="\n")
    return FINE if any(row.chosen for row in rows) else WRONG


def _doctor(arguments: argparse.Namespace) -> int:
    from kvcache_plugin.doctor import examine, switches

    with _output_aside():
        found = examine()
    if arguments.json:
        _print_json(
            {
                "version": __version__,
                "switches": switches(found.settings),
                "engines": [asdict(engine) for engine in found.engines],
                "implementations": [asdict(i) for i in found.implementations],
                "problems": found.problems,
                "notes": found.notes,
            }
        )
    else:
        print(f"kvcache-plugin {__version__}\n")
        print_table(("switch", "value"), list(switches(found.settings).items()))
        for engine in found.engines:
            print(f"\n{_engine_line(engine)}")
            if engine.release:
                print(f"{engine.title} {engine.version}: {engine.release}")
            if engine.seams:
                print_table(
                    ("seam", "state", "what we do there"),
                    [(s.path, s.problem or "fits", s.purpose) for s in engine.seams],
                )
                print()
                print_table(
                    ("write", "format", "codes by", "why"),
                    [(w.what, w.family, w.writer, w.why) for w in engine.writes],
                )
        print()
        print_table(
            ("implementation", "distribution", "state"),
            [(i.name, i.distribution, i.left_out or "loaded") for i in found.implementations],
        )
        print()
        for note in found.notes:
            print(f"note: {note}")
        for problem in found.problems:
            print(f"problem: {problem}")
        if not found.problems:
            is_here = any(engine.version for engine in found.engines)
            print("no problem found" + (", and no engine either" if not is_here else ""))
    return WRONG if found.problems else FINE


def _check(arguments: argparse.Namespace) -> int:
    from kvcache_plugin.check.as_json import as_json
    from kvcache_plugin.check.run import run

    try:
        with _output_aside(), progress_bar("reading headers") as progress:
            result = run(
                arguments.path,
                kv_cache_dtype=arguments.kv_cache_dtype,
                device=arguments.device,
                against=arguments.against,
                plot=arguments.plot,
                progress=progress,
            )
    except KVCacheError as error:
        return _say(error, MISUSED)
    if arguments.json:
        _print_json(as_json(result))
        if result.picture is not None:
            print(f"picture: {shown(result.picture)}", file=sys.stderr)
    else:
        _print_check(result)
    return FINE if result.report.is_sound else WRONG


def _print_check(result: Check) -> None:
    from kvcache_plugin.check import text
    from kvcache_plugin.check.rows import rows_of
    from kvcache_plugin.check.sparkline import characters_for, spark_lines

    report = result.report
    for line in text.finding_lines(report.findings):
        print_line(line, _STYLES.get(line.partition(" ")[0], ""))
    rows = rows_of(report)
    if rows:
        print_table(*text.table(report, rows), whole=text.WHOLE)
        print()
        for line in spark_lines(rows, characters_for(sys.stdout.encoding)):
            print(line)
        print()
    if result.comparison is not None:
        _print_comparison(result.comparison)
    if result.picture is not None:
        print(f"picture: {shown(result.picture)}")
    print(text.declaration_line(report))
    if result.device_from == "here":
        print(f"device: {report.device}, as this machine has it; --device takes another one")
    print_line(report.summary, "bold green" if report.is_sound else "bold red")


#: How the heading of a finding is shown.
_STYLES: Final = {"problem": "bold red", "remark": "bold yellow"}


def _print_comparison(comparison: Comparison) -> None:
    from kvcache_plugin.check import text

    print(f"against {shown(comparison.path)}, layers by {comparison.matched_by}:")
    if rows := text.comparison_rows(comparison):
        print_table(text.COMPARISON, rows, whole=text.WHOLE)
    for side in (comparison.k, comparison.v):
        print(side)
    print()


def _selftest(arguments: argparse.Namespace) -> int:
    from kvcache_plugin import selftest
    from kvcache_plugin.machine import find_device

    try:
        with _output_aside():
            device = find_device(arguments.device)
    except KVCacheError as error:
        return _say(error, MISUSED)
    with _output_aside(), progress_line() as progress:
        result = selftest.run(device, progress)
    if arguments.json:
        _print_json(_selftest_as_json(result))
    else:
        _print_selftest(result)
    return FINE if result.succeeded else WRONG


def _selftest_as_json(result: Selftest) -> object:
    implementations = [
        {
            **asdict(each),
            "descriptions": {name: asdict(described) for name, described in each.descriptions},
        }
        for each in result.implementations
    ]
    return {**asdict(result), "implementations": implementations, "succeeded": result.succeeded}


def _print_selftest(result: Selftest) -> None:
    machine = result.machine
    about = (machine.arch, machine.runtime, machine.driver, machine.system)
    print(f"{machine.torch_device}: {machine.name} ({', '.join(filter(None, about))})")
    versions = {"python": machine.python, **machine.versions, **machine.variables}
    print(f"{', '.join(f'{name} {value}' for name, value in versions.items())}\n")
    rows = [
        (
            each.name,
            name,
            *(str(each.count(name, outcome)) for outcome in ("passed", "failed", "raised")),
            str(each.count(name, "skipped")),
            described.how,
        )
        for each in result.implementations
        for name, described in each.descriptions
    ]
    columns = ("implementation", "format", "passed", "failed", "raised", "skipped", "how")
    print_table(columns, rows)
    for each in result.implementations:
        if each.not_run:
            print(f"\nnot run: {each.name} ({each.distribution}): {each.not_run}")
        for case in each.findings:
            where = "-".join(filter(None, (case.check, case.kv_cache_dtype, case.dtype)))
            print(f"\n{case.result}: {each.name} ({each.distribution}): {where}")
            for line in (case.reason, *map(str, case.problems), *case.frames):
                if line:
                    print(textwrap.indent(line, "  "))
    examined = [case for each in result.implementations for case in each.cases]
    findings = [case for case in examined if case.is_finding]
    print(
        f"\n{len(findings)} of {len(examined)} checks found something, in {result.seconds:.0f} s"
        if examined
        else f"\nno implementation serves {machine.arch}"
    )


def _bench(arguments: argparse.Namespace) -> int:
    from kvcache_plugin.bench import run
    from kvcache_plugin.bench.as_json import as_json
    from kvcache_plugin.machine import find_device

    bar = progress_bar("timing", redraws_itself=False)
    try:
        with _output_aside(), contextlib.nullcontext() if arguments.json else bar as progress:
            result = run.run(
                find_device(arguments.device),
                kv_cache_dtypes=arguments.kv_cache_dtype or run.FORMATS,
                tokens=arguments.tokens or run.TOKENS,
                with_peers=arguments.peers,
                progress=progress,
            )
    except KVCacheError as error:
        return _say(error, MISUSED)
    if arguments.json:
        _print_json(as_json(result))
    else:
        _print_bench(result)
    return FINE if result.succeeded else WRONG


def _print_bench(result: Bench) -> None:
    from kvcache_plugin.bench import text

    for line in text.head_lines(result):
        print(line)
    for each in result.contests:
        print()
        print_line(text.title(each.contest), "bold")
        print_table(text.columns(result), text.lines(each, result))
        for remark in text.remarks(each):
            print(remark)
    print()
    print_table(text.CONTESTANTS, text.contestants(result))
    print(f"\n{text.last_line(result)}")


def _demo(arguments: argparse.Namespace) -> int:
    from kvcache_plugin import demo

    with _output_aside():
        result = demo.run()
    if arguments.json:
        # NaN is what the demo is about, and JSON has none: it becomes null.
        layers = [
            {**asdict(layer), "k_scale": _finite(layer.k_scale), "v_scale": _finite(layer.v_scale)}
            for layer in result.layers
        ]
        _print_json({**asdict(result), "layers": layers, "succeeded": result.succeeded})
    else:
        print("A checkpoint with one corrupt scale:\n")
        print_table(
            ("layer", "k_scale", "v_scale", ""),
            [
                (layer.layer, f"{layer.k_scale:.4g}", f"{layer.v_scale:.4g}", _verdict(layer))
                for layer in result.layers
            ],
        )
        for layer in result.layers:
            if layer.refusal:
                print(f"\nKVScaleError: {layer.refusal}")
        print(f"\nK quantized and dequantized on {result.device}:\n")
        print_table(
            ("format", "implementation", "bits per value", "rms error", "largest error"),
            [
                (
                    trip.kv_cache_dtype,
                    trip.implementation,
                    f"{trip.bits_per_value:.1f}",
                    f"{trip.relative_error:.2%}",
                    f"{trip.largest_error:.2%}",
                )
                for trip in result.round_trips
            ],
        )
        print("\nThe rms error is over the values' rms, the largest error over the largest value.")
        print(
            "Next: install this where vLLM or SGLang is installed, and run `kvcache-plugin doctor`."
        )
    return FINE if result.succeeded else WRONG


def _output_aside() -> contextlib.AbstractContextManager[object]:
    """What other packages print while they are imported must not mix with ours."""
    return contextlib.redirect_stdout(sys.stderr)


def _say(error: KVCacheError, status: int) -> int:
    print(f"kvcache-plugin: {error}", file=sys.stderr)
    return status


def _state(implementation: Any) -> str:
    left_out = f"left out: {implementation.left_out}" if implementation.left_out else ""
    return left_out or implementation.summary


def _verdict(layer: Any) -> str:
    return "refused" if layer.refusal else "sound"


def _engine_line(engine: EngineStatus) -> str:
    if engine.version is None:
        return f"{engine.title} is not installed here"
    loads = f"does not load us: {engine.not_loaded}" if engine.not_loaded else "loads us"
    return f"{engine.title} {engine.version} {loads}"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))
