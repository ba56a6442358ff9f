"""Plugins of other packages, installed with pip: the good one wins, broken ones harm nobody."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvcache_plugin.manager import BUILT_IN, OWN_DISTRIBUTION
from kvcache_plugin.plugins import SELECTED_HOOKS
from tests.fresh_venv import NOT_SOURCE, copy_of_project, environment, fresh_venv, pip_install

pytestmark = pytest.mark.venv

PLUGINS = Path(__file__).parent / "third_party"
EXAMPLE = "kvcache-plugin-example 1.0"
#: Takes FP8 on the CPU over, which stays with the reference here.
FOR_ENGINES = "example_writer"
ALL_NAMES = (
    *BUILT_IN,
    "example_npu",
    "example_cpu_nvfp4",
    "broken_answers",
    "broken_arguments",
    "broken_exit",
    "broken_hook_name",
    "broken_import",
)

# Entry point, distribution and reason of what cannot be loaded.
BROKEN = (
    pytest.param(
        "broken_import",
        "kvcache-plugin-broken-import 1.0",
        "it cannot be imported: ModuleNotFoundError: "
        "No module named 'kvcache_plugin_missing_kernels'",
        id="import",
    ),
    pytest.param(
        "broken_hook_name",
        "kvcache-plugin-broken-hook-name 1.0",
        "PluginValidationError: unknown hook 'quantise_kv'",
        id="hook name",
    ),
    pytest.param(
        "broken_arguments",
        "kvcache-plugin-broken-arguments 1.0",
        "PluginValidationError: Plugin 'broken_arguments' for hook 'quantize_kv'",
        id="arguments",
    ),
    pytest.param(
        "cpu_reference",
        "kvcache-plugin-broken-duplicate 1.0",
        "the name is taken by kvcache-plugin ",
        id="duplicate",
    ),
    pytest.param(
        "broken_exit",
        "kvcache-plugin-broken-exit 1.0",
        "it cannot be imported: SystemExit: this machine has no licence",
        id="exit",
    ),
)

_PRELUDE = """
import dataclasses, json, logging, sys

import torch

import kvcache_plugin as kv

logging.basicConfig(format="%(levelname)s %(name)s %(message)s")


def show(**found):
    print(json.dumps(found))


def rows(device, kv_cache_dtype):
    found = kv.explain(device, kv_cache_dtype)
    return [dataclasses.asdict(row) | {"chosen": row.chosen} for row in found]
"""


@dataclass(frozen=True)
class Outcome:
    """What a script in the venv showed, and the warnings of the package, as they came."""

    shown: dict[str, Any]
    warnings: tuple[str, ...]


@dataclass(frozen=True)
class Venv:
    """A venv with the project and every third-party package."""

    python: Path

    def run(self, script: str, **switches: str) -> Outcome:
        """Run a script, which calls ``show`` once."""
        done = subprocess.run(
            [self.python, "-c", _PRELUDE + textwrap.dedent(script)],
            env=environment() | switches,
            cwd=self.python.parent,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = re.findall(r"^WARNING kvcache_plugin\S* (.*)$", done.stderr, re.MULTILINE)
        return Outcome(json.loads(done.stdout), tuple(found))


@pytest.fixture(scope="session")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Venv:
    """A fresh venv with the project and the packages."""
    folder = tmp_path_factory.mktemp("third_party")
    python = fresh_venv(folder)
    sources = [copy_of_project(folder / "project")]
    for source in sorted(PLUGINS.iterdir()):
        if source.name == FOR_ENGINES:
            continue
        sources.append(shutil.copytree(source, folder / source.name, ignore=NOT_SOURCE))
    pip_install(python, *map(str, sources))
    return Venv(python)


@pytest.fixture(scope="session")
def plain(venv: Venv) -> Outcome:
    """What holds without any switch."""
    return venv.run(
        """
        def third_party():
            return sorted(name for name in sys.modules if name.startswith("kvcache_plugin_"))

        for name in kv.__all__:
            getattr(kv, name)
        before = third_party()
        x = torch.linspace(-3, 3, 96).reshape(2, 3, 16)
        quantized = kv.quantize_kv(x, 0.5, "nvfp4")
        from kvcache_plugin_example import cpu_nvfp4

        npu = kv.Device("npu", "npu_v2")
        served = kv.validate_kv_scales(0.5, 0.25, kv_cache_dtype="fp8", device=npu)
        heads = torch.tensor([0.5, 0.25])
        per_head = kv.validate_kv_scales(
            heads, heads, kv_cache_dtype="fp8", device=npu, granularity="head", num_kv_heads=2
        )
        refused = ""
        try:
            kv.validate_kv_scales(0.5, 1e-38, kv_cache_dtype="fp8", device=npu, layer="layers.3")
        except kv.KVScaleError as error:
            refused = str(error)
        show(
            home=kv.__file__,
            before=before,
            after=third_party(),
            served=[served.k, served.v],
            per_head=per_head.k.tolist(),
            refused=refused,
            elsewhere=kv.validate_kv_scales(0.5, 1e-38, kv_cache_dtype="fp8").v,
            calls=cpu_nvfp4.calls,
            back=kv.dequantize_kv(quantized, dtype=torch.float32).sub(x).abs().max().item(),
            nvfp4=rows("cpu", "nvfp4"),
            fp8=rows("cpu", "fp8"),
            npu_v2=rows(npu, "fp8"),
            npu_v1=rows(kv.Device("npu", "npu_v1"), "fp8"),
            npu_nvfp4=rows(npu, "nvfp4"),
            sm_90=rows("sm_90", "fp8"),
        )
        """
    )


def test_the_venv_holds_the_installed_project(venv: Venv, plain: Outcome) -> None:
    assert Path(plain.shown["home"]).is_relative_to(venv.python.parents[1])


# Who wins


def test_the_third_party_implementation_comes_before_the_built_in_one(plain: Outcome) -> None:
    rows = plain.shown["nvfp4"]
    example, built_in = _row(rows, "example_cpu_nvfp4"), _row(rows, "cpu_fast")
    assert example["distribution"] == EXAMPLE
    assert example["chosen_for"] == ["quantize_kv"]
    assert example["reason"].startswith("Example NVFP4 on the CPU")
    assert rows.index(example) < rows.index(built_in)
    assert not built_in["chosen"]
    assert built_in["chosen_for"] == ["dequantize_kv", "validate_kv_scales"]
    assert "example_cpu_nvfp4 comes before it for quantize_kv" in built_in["reason"]


def test_quantize_kv_goes_through_the_third_party_implementation(plain: Outcome) -> None:
    assert plain.shown["calls"] == 1
    assert plain.shown["back"] <= 0.5


def test_a_format_that_it_does_not_serve_stays_with_the_built_in_one(plain: Outcome) -> None:
    rows = plain.shown["fp8"]
    built_in = _row(rows, "cpu_fast")
    assert built_in["chosen_for"] == list(SELECTED_HOOKS)
    example = _row(rows, "example_cpu_nvfp4")
    assert example["reason"] == "serves nvfp4 on cpu, and this is fp8_e4m3 on cpu"
    assert not example["chosen_for"]


def test_a_device_that_only_a_third_party_knows_is_served_by_it(plain: Outcome) -> None:
    rows = plain.shown["npu_v2"]
    assert _row(rows, "example_npu")["chosen_for"] == [
        "quantize_kv",
        "dequantize_kv",
        "validate_kv_scales",
    ]
    assert "example_npu comes before it" in _row(rows, "cpu_reference")["reason"]


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("npu_v1", "FP8 came with npu_v2, and this is npu_v1"),
        ("npu_nvfp4", "stores fp8_e4m3 and fp8_e5m2, and this is nvfp4"),
        ("sm_90", "serves NPUs, and this is sm_90"),
    ],
)
def test_where_it_does_not_serve_its_reason_is_shown(
    plain: Outcome, case: str, reason: str
) -> None:
    rows = plain.shown[case]
    assert _row(rows, "example_npu")["reason"] == reason
    assert not _row(rows, "example_npu")["chosen_for"]
    assert any(row["chosen"] for row in rows)


# Who is left out


@pytest.mark.parametrize(("name", "dist", "reason"), BROKEN)
def test_a_broken_package_is_left_out_with_one_warning(
    plain: Outcome, name: str, dist: str, reason: str
) -> None:
    (warning,) = (line for line in plain.warnings if dist in line)
    sentence = f"implementation {name!r} ({dist}) is left out: "
    assert warning.startswith(sentence + reason)
    row = _row(plain.shown["fp8"], name, dist)
    assert f"{row['reason']} [errors#plugin-left-out]" == warning.removeprefix(sentence)


def test_the_sentence_about_an_argument_names_it(plain: Outcome) -> None:
    (warning,) = (line for line in plain.warnings if "broken-arguments" in line)
    assert "stream" in warning


def test_what_is_left_out_is_chosen_for_nothing_and_comes_last(plain: Outcome) -> None:
    left_out = {tuple(param.values[:2]) for param in BROKEN}
    for case in ("nvfp4", "fp8", "npu_v2", "npu_v1", "npu_nvfp4", "sm_90"):
        rows = plain.shown[case]
        last = rows[-len(left_out) :]
        assert {(row["name"], row["distribution"]) for row in last} == left_out
        assert not any(row["chosen_for"] for row in last)


def test_one_whose_supports_kv_raises_is_left_out_where_it_was_asked(plain: Outcome) -> None:
    row = _row(plain.shown["fp8"], "broken_answers")
    assert row["distribution"] == "kvcache-plugin-broken-answers 1.0"
    assert row["reason"] == "its supports_kv raised OSError: the driver does not answer"
    assert not row["chosen_for"]
    (warning,) = (line for line in plain.warnings if "for fp8_e4m3 on cpu" in line)
    assert warning == (
        "implementation 'broken_answers' (kvcache-plugin-broken-answers 1.0) is left out for "
        "fp8_e4m3 on cpu: its supports_kv raised OSError: the driver does not answer "
        "[errors#supports-kv-failed]"
    )


def test_the_warnings_are_those_and_no_more(plain: Outcome) -> None:
    about_answers = [line for line in plain.warnings if "broken-answers" in line]
    # nvfp4 and fp8 on cpu, fp8 on npu_v2, npu_v1 and sm_90, nvfp4 on npu_v2
    assert len(about_answers) == 6
    assert len(plain.warnings) == len(about_answers) + len(BROKEN)


# Blocking


def test_a_blocked_implementation_is_not_imported_and_the_next_one_serves(venv: Venv) -> None:
    blocked = venv.run(
        """
        quantized = kv.quantize_kv(torch.full((2, 16), 6.0), 1.0, "nvfp4")
        show(
            imported=sorted(name for name in sys.modules if "kvcache_plugin_example" in name),
            back=kv.dequantize_kv(quantized).unique().tolist(),
            rows=rows("cpu", "nvfp4"),
        )
        """,
        KVCACHE_PLUGIN_BLOCK="example_cpu_nvfp4",
    )
    assert blocked.shown["imported"] == ["kvcache_plugin_example", "kvcache_plugin_example.npu"]
    assert blocked.shown["back"] == [6.0]
    row = _row(blocked.shown["rows"], "example_cpu_nvfp4")
    assert (row["distribution"], row["chosen_for"]) == (EXAMPLE, [])
    assert row["reason"] == "blocked by KVCACHE_PLUGIN_BLOCK"
    assert _row(blocked.shown["rows"], "cpu_fast")["chosen"]
    assert not any("example" in line for line in blocked.warnings)


def test_a_blocked_name_that_nobody_has_is_reported_with_the_known_ones(venv: Venv) -> None:
    outcome = venv.run(
        'show(chosen=[row["name"] for row in rows("cpu", "nvfp4") if row["chosen"]])',
        KVCACHE_PLUGIN_BLOCK="example_cpu_nvpf4, broken_import",
    )
    assert outcome.shown["chosen"] == ["example_cpu_nvfp4"]
    (warning,) = (line for line in outcome.warnings if "example_cpu_nvpf4" in line)
    head, known = warning.split(". The implementations are ")
    assert head == "KVCACHE_PLUGIN_BLOCK names no implementation: example_cpu_nvpf4"
    names = known.removesuffix(" [errors#blocked-name-unknown]").split(", ")
    assert set(names) == set(ALL_NAMES)


def test_with_everything_blocked_the_error_lists_each_with_its_reason(venv: Venv) -> None:
    outcome = venv.run(
        """
        errors = {}
        for kv_cache_dtype in ("fp8", "nvfp4"):
            try:
                kv.quantize_kv(torch.ones(2, 16), 1.0, kv_cache_dtype)
            except kv.NoImplementationError as error:
                errors[kv_cache_dtype] = str(error)
        third_party = ("kvcache_plugin_example", "kvcache_plugin_broken")
        show(
            errors=errors,
            imported=[name for name in sys.modules if name.startswith(third_party)],
        )
        """,
        KVCACHE_PLUGIN_BLOCK=",".join(ALL_NAMES),
    )
    for stored, message in (
        ("fp8_e4m3", outcome.shown["errors"]["fp8"]),
        ("nvfp4", outcome.shown["errors"]["nvfp4"]),
    ):
        assert message.startswith(f"quantize_kv of {stored} on cpu: ")
        for name in ALL_NAMES:
            assert re.search(rf"\b{name} \([^)]+\): blocked by KVCACHE_PLUGIN_BLOCK", message)
        assert f"example_npu ({EXAMPLE})" in message
    assert not outcome.shown["imported"]
    assert not outcome.warnings


# When they are imported


def test_third_party_modules_are_imported_at_first_use_and_not_before(plain: Outcome) -> None:
    assert plain.shown["before"] == []
    assert plain.shown["after"] == [
        "kvcache_plugin_broken_answers",
        "kvcache_plugin_broken_arguments",
        "kvcache_plugin_broken_duplicate",
        "kvcache_plugin_broken_hook_name",
        "kvcache_plugin_example",
        "kvcache_plugin_example.cpu_nvfp4",
        "kvcache_plugin_example.npu",
    ]


# What the examples compute: they are the template, so they must be right


def test_the_examples_agree_with_the_reference_bit_by_bit(venv: Venv) -> None:
    outcome = venv.run(
        """
        from kvcache_plugin.hardware import cpu_reference
        from kvcache_plugin_example import cpu_nvfp4, npu

        torch.manual_seed(0)
        x = torch.randn(4, 3, 64) * torch.logspace(-6, 6, 12).reshape(4, 3, 1)
        x[0, 0, :16] = 0.0
        x[1, 1, 3], x[1, 2, 5], x[2, 0, 7] = torch.nan, torch.inf, -torch.inf
        x[3, 2, :8] = torch.tensor([-0.25, 0.75, 1.25, -1.75, 2.5, 3.5, -5.0, 6.0])

        def same(a, b):
            return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))

        differ = []
        for module, name, scale in (
            (cpu_nvfp4, "nvfp4", [0.01]),
            (cpu_nvfp4, "nvfp4", [1e38]),
            (npu, "fp8_e4m3", [0.5]),
            (npu, "fp8_e4m3", [0.5, 2.0, 1e-3]),
            (npu, "fp8_e5m2", [0.5]),
        ):
            for dtype in (torch.float32, torch.bfloat16, torch.float16):
                g = torch.tensor(scale)
                given = dict(tensor=x.to(dtype), scale=g, kv_cache_dtype=name, out=None)
                ours = module.quantize_kv(**given)
                theirs = cpu_reference.quantize_kv(**given, device=kv.Device("cpu"))
                filled = module.quantize_kv(**given | {"out": kv.OutBuffers(
                    torch.zeros_like(theirs.data),
                    None if theirs.block_scales is None else torch.zeros_like(theirs.block_scales),
                )})
                for result in (ours, filled):
                    fits = result.kv_cache_dtype == name and result.scale is g
                    fits &= same(result.data, theirs.data)
                    if theirs.block_scales is not None:
                        fits &= same(result.block_scales, theirs.block_scales)
                    if not fits:
                        differ.append([name, scale, str(dtype)])
                if module is npu:
                    values = npu.dequantize_kv(ours, dtype)
                    expected = cpu_reference.dequantize_kv(theirs, dtype, kv.Device("cpu"))
                    if values.dtype != dtype or not values.equal(expected):
                        if not torch.equal(values.nan_to_num(), expected.nan_to_num()):
                            differ.append([name, scale, str(dtype), "back"])
        show(differ=differ)
        """
    )
    assert outcome.shown["differ"] == []


def test_the_example_refuses_scales_that_its_hardware_cannot_hold(plain: Outcome) -> None:
    assert plain.shown["served"] == [0.5, 0.25]
    assert plain.shown["per_head"] == [0.5, 0.25]
    assert re.match(
        r"layers\.3: the NPU needs scales of at least \S+, got v_scale=1e-38\. Export",
        plain.shown["refused"],
    )
    assert plain.shown["elsewhere"] == 1e-38


# Helpers


def _row(rows: list[dict[str, Any]], name: str, dist: str = "") -> dict[str, Any]:
    """The one row of a name, of a distribution where two have that name; built-in by default."""
    found = [row for row in rows if row["name"] == name]
    if len(found) > 1:
        found = [row for row in found if row["distribution"] == (dist or OWN_DISTRIBUTION)]
    (row,) = found
    return row
