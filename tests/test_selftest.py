"""``kvcache-plugin selftest``: what it runs, what it finds, and what its report holds."""

from __future__ import annotations

import io
import json
import os
import platform
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import cli, device, formats, machine, manager
from kvcache_plugin.conformance import cases
from kvcache_plugin.hardware import cpu_reference
from tests.conftest import THEIRS

if TYPE_CHECKING:
    from pathlib import Path

CHECKS = ("plain", "zeros", "infinity", "extreme_scales", "dequantize_known", "default_scales")


@pytest.fixture(autouse=True)
def _few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVCACHE_PLUGIN_")]:
        monkeypatch.delenv(name)
    few = tuple(check for check in cases.CHECKS if check.name in CHECKS)
    monkeypatch.setattr(cases, "CHECKS", few)


class Theirs:
    """Theirs: as the reference, for two formats on the CPU."""

    @kv.hookimpl
    def supports_kv(self, device: kv.Device, kv_cache_dtype: str) -> bool | str:
        return kv_cache_dtype in ("fp8_e4m3", "nvfp4") or f"does not serve {kv_cache_dtype}"

    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        return cpu_reference.quantize_kv(tensor, scale, kv_cache_dtype, kv.Device("cpu"), out)


class Wrong(Theirs):
    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        right = super().quantize_kv(tensor, scale, kv_cache_dtype, out)
        codes = right.data.view(torch.uint8)
        if kv_cache_dtype == "fp8_e4m3":
            codes.masked_fill_(tensor.isinf(), 0x7F)
        return right


class Raises(Theirs):
    error: BaseException = OSError("the driver\ndoes not answer")

    @kv.hookimpl
    def quantize_kv(self, tensor: Any, kv_cache_dtype: str) -> Any:
        if kv_cache_dtype == "nvfp4":
            raise self.error
        return None


class Exits(Raises):
    error = SystemExit(3)


class SupportsRaises(Theirs):
    @kv.hookimpl
    def supports_kv(self) -> bool | str:
        raise OSError("no driver")


class PassesOnFloat32(Theirs):
    @kv.hookimpl
    def quantize_kv(self, tensor: Any, scale: Any, kv_cache_dtype: str, out: Any) -> Any:
        if tensor.dtype == torch.float32:
            return None
        return super().quantize_kv(tensor, scale, kv_cache_dtype, out)


class Policy:
    """Wraps what others do."""

    @kv.hookimpl(wrapper=True)
    def quantize_kv(self) -> Any:
        return (yield)


def run_json(capsys: pytest.CaptureFixture[str]) -> tuple[int, Any]:
    status = cli.main(["selftest", "--device", "cpu", "--json"])

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return status, json.loads(capsys.readouterr().out, parse_constant=refuse)


def by_name(report: Any) -> dict[str, Any]:
    return {each["name"]: each for each in report["implementations"]}


def findings(implementation: Any) -> list[Any]:
    return [case for case in implementation["cases"] if case["result"] in ("failed", "raised")]


# What it finds


@pytest.mark.usefixtures("install")
def test_what_is_here_conforms(capsys: pytest.CaptureFixture[str]) -> None:
    status, report = run_json(capsys)
    assert status == cli.FINE
    assert report["succeeded"]
    found = by_name(report)
    assert set(found) == set(manager.BUILT_IN)
    reference = found["cpu_reference"]
    assert {case["result"] for case in reference["cases"]} == {"passed"}
    assert {case["check"] for case in reference["cases"]} == set(CHECKS)
    assert {case["dtype"] for case in reference["cases"]} == {"float32", "bfloat16", "float16", ""}
    assert all(case["compared"] for case in reference["cases"] if case["dtype"])
    assert set(reference["descriptions"]) == {f.name for f in formats.BUILT_IN}
    assert reference["descriptions"]["nvfp4"]["how"].startswith("CPU reference")
    tolerance = {"codes": 0.0, "block_scales": 0.0, "nan": False}
    assert reference["descriptions"]["nvfp4"]["tolerance"] == tolerance
    for name in set(manager.BUILT_IN) - {"cpu_fast", "cpu_reference"}:
        assert found[name]["not_run"].startswith("serves ")
        assert not found[name]["is_broken"]


def test_it_says_where_it_ran(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    machine = run_json(capsys)[1]["machine"]
    assert machine["torch_device"] == machine["arch"] == "cpu"
    assert machine["name"]
    assert machine["versions"]["kvcache-plugin"] == kv.__version__
    assert machine["versions"]["torch"] == torch.__version__
    assert machine["python"] == ".".join(map(str, sys.version_info[:3]))
    assert machine["variables"]["TRITON_INTERPRET"] == "1"


def test_other_packages_are_examined_too(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(theirs=Theirs(), policy=Policy())
    status, report = run_json(capsys)
    assert status == cli.FINE
    theirs = by_name(report)["theirs"]
    assert theirs["distribution"] == THEIRS
    assert {case["kv_cache_dtype"] for case in theirs["cases"]} == {"fp8_e4m3", "nvfp4"}
    assert {case["result"] for case in theirs["cases"]} == {"passed"}
    assert by_name(report)["policy"]["not_run"] == "wraps quantize_kv"


def test_a_difference_is_shown_with_its_values(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(theirs=Wrong())
    status, report = run_json(capsys)
    assert status == cli.WRONG
    found = findings(by_name(report)["theirs"])
    assert {(case["check"], case["kv_cache_dtype"], case["result"]) for case in found} == {
        (check, "fp8_e4m3", "failed") for check in ("infinity", "extreme_scales")
    }
    (infinity, *_) = (case for case in found if case["check"] == "infinity")
    assert infinity["problems"] == [
        {
            "what": "known answers: codes",
            "differing": 2,
            "compared": 128,
            "first": [
                {
                    "index": [0, 0, place],
                    "given": f"{sign}inf, scale 1",
                    "got": "0x7f (nan)",
                    "expected": f"{code} ({sign}448)",
                }
                for place, sign, code in ((0, "", "0x7e"), (1, "-", "0xfe"))
            ],
        }
    ]
    assert cli.main(["selftest"]) == cli.WRONG
    printed = capsys.readouterr().out
    assert f"failed: theirs ({THEIRS}): infinity-fp8_e4m3-float32\n" in printed
    assert "    [0, 0, 0]: inf, scale 1: got 0x7f (nan), expected 0x7e (448)\n" in printed
    assert "checks found something, in" in printed


def test_what_it_passes_on_is_skipped_and_no_finding(
    install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    install(theirs=PassesOnFloat32())
    status, report = run_json(capsys)
    assert status == cli.FINE
    results = {(case["dtype"], case["result"]) for case in by_name(report)["theirs"]["cases"]}
    dtypes = ("bfloat16", "float16")
    assert results == {("float32", "skipped"), *((dtype, "passed") for dtype in dtypes)}


@pytest.mark.parametrize(
    ("implementation", "said"),
    [(Raises(), "OSError: the driver does not answer"), (Exits(), "SystemExit: 3")],
)
def test_an_exception_is_a_finding_and_the_others_go_on(
    install: Any, capsys: pytest.CaptureFixture[str], implementation: Any, said: str
) -> None:
    install(theirs=implementation)
    status, report = run_json(capsys)
    assert status == cli.WRONG
    raised = [case for case in findings(by_name(report)["theirs"]) if case["result"] == "raised"]
    assert raised
    for case in raised:
        assert case["kv_cache_dtype"] == "nvfp4"
        assert case["reason"].startswith(said)
        assert case["frames"][-1].startswith("test_selftest.py:")
    assert not findings(by_name(report)["cpu_reference"])
    assert cli.main(["selftest"]) == cli.WRONG
    assert f"  {said}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("plugin", "said"),
    [
        (SupportsRaises(), "its supports_kv raised OSError: no driver"),
        (ImportError("no kernels"), "it cannot be imported: ImportError: no kernels"),
    ],
)
def test_one_that_is_broken_is_a_finding(
    install: Any, capsys: pytest.CaptureFixture[str], plugin: Any, said: str
) -> None:
    install(theirs=plugin)
    status, report = run_json(capsys)
    assert status == cli.WRONG
    theirs = by_name(report)["theirs"]
    assert (theirs["not_run"], theirs["is_broken"], theirs["cases"]) == (said, True, [])
    assert by_name(report)["cpu_reference"]["cases"]


@pytest.mark.usefixtures("install")
def test_a_blocked_one_is_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cuda_sm90")
    status, report = run_json(capsys)
    assert status == cli.FINE
    assert by_name(report)["cuda_sm90"]["not_run"] == "blocked by KVCACHE_PLUGIN_BLOCK"
    assert report["machine"]["variables"]["KVCACHE_PLUGIN_BLOCK"] == "cuda_sm90"


@pytest.mark.usefixtures("install")
def test_with_nothing_to_examine_it_does_not_succeed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_fast,cpu_reference")
    assert cli.main(["selftest", "--device", "cpu"]) == cli.WRONG
    assert "no implementation serves cpu" in capsys.readouterr().out


# In words


@pytest.mark.usefixtures("install")
def test_the_table_counts_for_each_implementation_and_format(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_fast")
    assert cli.main(["selftest", "--device", "cpu"]) == cli.FINE
    captured = capsys.readouterr()
    lines = [line.split() for line in captured.out.splitlines()]
    rows = {line[1]: line[2:6] for line in lines if line[:1] == ["cpu_reference"]}
    # plain has one case, default_scales one, each of the others one for each dtype
    assert rows == {f.name: ["14", "0", "0", "0"] for f in formats.BUILT_IN}
    assert "not run: rocm_fnuz (kvcache-plugin" in captured.out
    assert "0 of 56 checks found something, in" in captured.out
    assert captured.err == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.usefixtures("install")
def test_on_a_terminal_a_line_says_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    assert cli.main(["selftest", "--device", "cpu", "--json"]) == cli.FINE
    json.loads(capsys.readouterr().out)
    lines = terminal.getvalue().split("\r")
    assert "cpu_reference 1/56 default_scales-fp8_e4m3".ljust(49) in lines
    assert lines[-2:] == [" " * 49, ""]
    assert {len(line) for line in lines if line} == {49}


# Where it runs


@pytest.mark.usefixtures("install")
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sm_90", "there is no sm_90 on this machine: torch sees no GPU"),
        ("gfx942", "there is no gfx942 on this machine: torch sees no GPU"),
        ("cuda:0", "no tensor can be put on 'cuda:0' here: torch sees no GPU. Name"),
        ("privateuseone", "no tensor can be put on 'privateuseone' here: "),
        ("meta", "no tensor can be put on 'meta' here: "),
        ("toaster", "unknown device 'toaster'"),
    ],
)
def test_a_device_that_is_not_here_is_2(
    name: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["selftest", "--device", name]) == cli.MISUSED
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
    assert name == "toaster" or "Name a device of this machine" in printed


def test_an_architecture_is_the_first_card_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    archs = {0: "sm_80", 1: "sm_90", 2: "sm_90"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(archs))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda index: kv.Device.parse(archs[index]).capability,
    )
    monkeypatch.setattr(torch.version, "hip", None)
    device._of_card.cache_clear()
    try:
        assert machine.find_device("sm_90") == torch.device("cuda:1")
        with pytest.raises(kv.KVCacheError, match="cuda:0 is sm_80, cuda:1 is sm_90, cuda:2 is"):
            machine.find_device("sm_100")
    finally:
        device._of_card.cache_clear()


def test_the_cpu_is_the_default_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine.find_device(None) == torch.device("cpu")


@pytest.mark.parametrize(
    ("told", "name"),
    [
        (
            "processor\t: 0\nmodel\t\t: 143\nmodel name\t: Xeon Platinum 8480+\nflags\t\t: fpu\n",
            "Xeon",
        ),
        ("processor\t: 0\nBogoMIPS\t: 50.00\nCPU part\t: 0xd40\n", "aarch64"),
        (None, "aarch64"),
    ],
    ids=["x86", "Arm", "no Linux"],
)
def test_the_processor_has_the_name_that_linux_gives_it(
    told: str | None, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    monkeypatch.setattr(machine, "_CPU_INFO", tmp_path / "cpuinfo")
    if told is not None:
        (tmp_path / "cpuinfo").write_text(told, encoding="utf-8")
    assert machine.describe_machine(torch.device("cpu")).name.startswith(name)
