"""``kvcache-plugin`` as a person and as a program use it."""

from __future__ import annotations

import json
import os
import pkgutil
import pty
import shlex
import subprocess
import sys
import types
from typing import Any

import pytest

import kvcache_plugin
from kvcache_plugin import KVCacheError, cli, doctor, formats, manager
from kvcache_plugin import commands as command_modules
from kvcache_plugin.hosts import engines, fitting, seams
from tests.pages.commands import commands


@pytest.fixture(autouse=True)
def fresh_manager(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process's manager, made anew in each test; no switch of the caller reaches it."""
    for name in [name for name in os.environ if name.startswith("KVCACHE_PLUGIN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(manager, "_manager", None)
    monkeypatch.setattr(manager, "_begun", None)


def run_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = cli.main([*arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


def in_a_process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["explain"],
        ["explain", "--device", "cpu"],
        ["doctor", "--hook"],
    ],
)
def test_wrong_use_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    assert exit_.value.code == cli.MISUSED
    assert "usage:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "kv_cache_dtype", "said"),
    [
        ("toaster", "fp8", "unknown device 'toaster'"),
        ("cpu", "fp9", "unknown kv_cache_dtype 'fp9'; known names are fp8, fp8_e4m3"),
        ("cpu", "auto", "'auto' (a cache that is not quantized needs nothing from here)"),
    ],
)
def test_explain_of_what_is_unknown_is_2(
    device: str, kv_cache_dtype: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = cli.main(["explain", "--device", device, "--kv-cache-dtype", kv_cache_dtype])
    assert status == cli.MISUSED
    assert said in capsys.readouterr().err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out.strip() == kvcache_plugin.__version__


@pytest.mark.parametrize(
    "arguments",
    [["--help"], *([name, "--help"] for name in ("explain", "selftest", "check", "bench"))],
)
def test_help_does_not_wait_for_torch(arguments: list[str]) -> None:
    code = (
        "import sys; from kvcache_plugin.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: assert not {'torch', 'pluggy', 'safetensors'} & set(sys.modules)"
    )
    done = in_a_process("-c", code, *arguments)
    assert done.returncode == 0, done.stderr
    assert "usage: kvcache-plugin" in done.stdout


def test_every_command_is_a_module_and_every_module_a_command() -> None:
    modules = {module.name for module in pkgutil.iter_modules(command_modules.__path__)}
    assert modules - {"common"} == set(commands())


@pytest.mark.parametrize("command", commands())
def test_every_option_says_what_it_is(command: str) -> None:
    parser = commands()[command]
    assert parser.description
    assert all(action.help for action in parser._actions)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--tokens", "1,0", "'1,0' is not numbers from 1 up"),
        ("--tokens", "many", "'many' is not numbers from 1 up"),
        ("--kv-cache-dtype", "fp8,,nvfp4", "'fp8,,nvfp4' has an empty name in it"),
    ],
)
def test_a_value_that_an_option_does_not_take_is_2_and_has_a_name(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["bench", option, value])
    assert exit_.value.code == cli.MISUSED
    last = capsys.readouterr().err.splitlines()[-1]
    assert said in last
    assert last.endswith(" [errors#option-value]")


def test_import_brings_neither_torch_nor_an_engine() -> None:
    code = (
        "import sys, kvcache_plugin\n"
        "assert not {'torch', 'triton', 'flashinfer', 'vllm', 'sglang'} & set(sys.modules)\n"
        "assert set(kvcache_plugin.__all__) <= set(dir(kvcache_plugin))\n"
        "for name in kvcache_plugin.__all__: getattr(kvcache_plugin, name)\n"
        "assert not {'triton', 'flashinfer', 'vllm', 'sglang'} & set(sys.modules)\n"
    )
    done = in_a_process("-c", code)
    assert done.returncode == 0, done.stderr


def test_a_name_that_is_not_public_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise_kv'"):
        kvcache_plugin.quantise_kv  # noqa: B018


def test_plugins(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, "plugins")
    assert status == cli.FINE
    by_name = {implementation["name"]: implementation for implementation in found}
    assert {"cpu_reference", "rocm_fnuz"} <= set(by_name)
    assert by_name["cpu_reference"]["distribution"].startswith("kvcache-plugin ")
    assert "quantize_kv" in by_name["cpu_reference"]["hooks"]
    assert {"supports_kv", "validate_kv_scales"} <= set(by_name["rocm_fnuz"]["hooks"])


def test_plugins_shows_a_blocked_one_and_is_fine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "rocm_fnuz")
    assert cli.main(["plugins"]) == cli.FINE
    assert "left out: blocked by KVCACHE_PLUGIN_BLOCK" in capsys.readouterr().out


def test_plugins_with_a_broken_one_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "BUILT_IN", ("cpu_reference", "no_such_module"))
    status, found = run_json(capsys, "plugins")
    assert status == cli.WRONG
    (broken,) = [f for f in found if f["name"] == "no_such_module"]
    assert "ModuleNotFoundError" in broken["left_out"]


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    status, rows = run_json(capsys, "explain", "--device", "gfx942", "--kv-cache-dtype", "fp8")
    assert status == cli.FINE
    chosen = {hook: row["name"] for row in rows for hook in row["chosen_for"]}
    hooks = ("quantize_kv", "quantize_kv_pair", "dequantize_kv", "validate_kv_scales")
    assert chosen == dict.fromkeys(hooks, "rocm_fnuz")
    assert all(row["reason"] for row in rows)


def test_explain_says_who_writes_the_caches_in_both_forms(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("explain", "--device", "cpu", "--kv-cache-dtype", "fp8")
    _, rows = run_json(capsys, *arguments)
    (writes,) = [row["writes"] for row in rows if row["chosen"]]
    assert [line.split("'s caches are written by ")[0] for line in writes] == ["vLLM", "SGLang"]
    assert all(row["writes"] == [] for row in rows if not row["chosen"])
    cli.main([*arguments])
    assert capsys.readouterr().out.splitlines()[-2:] == writes


def test_explain_with_nothing_left_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_fast,cpu_reference")
    status, rows = run_json(capsys, "explain", "--device", "cpu", "--kv-cache-dtype", "nvfp4")
    assert status == cli.WRONG
    assert {row["name"]: row["reason"] for row in rows}["cpu_reference"].startswith("blocked by")
    cli.main(["explain", "--device", "cpu", "--kv-cache-dtype", "nvfp4"])
    assert "nothing quantizes nvfp4 on cpu" in capsys.readouterr().out


def test_demo_refuses_the_corrupt_layer_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    status, found = run_json(capsys, "demo")
    assert status == cli.FINE
    refused = [layer for layer in found["layers"] if layer["refusal"]]
    (layer,) = refused
    assert layer["layer"] in layer["refusal"]
    assert "must be finite, got k_scale=nan" in layer["refusal"]
    trips = {trip["kv_cache_dtype"]: trip for trip in found["round_trips"]}
    assert list(trips) == [kv_format.name for kv_format in formats.BUILT_IN]
    # Half a unit in the last place: 1/16 of a value with 3 bits of fraction, 1/8 with 2, and for
    # e2m1, whose widest step is from 4 to 6, a sixth of the block's largest.
    assert trips["fp8_e4m3"]["largest_error"] <= 1 / 16
    assert trips["fp8_e5m2"]["largest_error"] <= 1 / 8
    assert 1 / 100 < trips["nvfp4"]["largest_error"] <= 1 / 6 * (1 + 1 / 16)
    assert trips["nvfp4"]["bits_per_value"] == 4.5


def test_demo_without_an_implementation_is_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_fast,cpu_reference")
    assert cli.main(["demo"]) == cli.WRONG
    assert "no implementation serves this" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["plugins"], ["explain", "--help"], ["doctor"]])
def test_a_terminal_without_our_characters_gets_something(arguments: list[str]) -> None:
    done = in_a_process("-m", "kvcache_plugin", *arguments, PYTHONIOENCODING="ascii")
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m kvcache_plugin demo | true"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ("plugins", cli.FINE),
        ("plugins --json", cli.FINE),
        ("check nowhere", cli.MISUSED),
        ("explain --device toaster --kv-cache-dtype fp8", cli.MISUSED),
    ],
)
def test_a_stream_that_is_closed_changes_nothing_else(
    arguments: str, status: int, closed: str, tmp_path: Any
) -> None:
    command = [sys.executable, "-m", "kvcache_plugin", *arguments.split()]
    done = subprocess.run(
        ["sh", "-c", f"{shlex.join(command)} {closed}"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    shows_output = status == cli.FINE and not closed.startswith(">")
    assert bool(done.stdout) == shows_output
    shows_error = status == cli.MISUSED and "2>" not in closed
    assert done.stderr.startswith("kvcache-plugin: ") == shows_error


@pytest.mark.parametrize("arguments", [["selftest", "--device", "cpu"], ["check", "somewhere"]])
def test_progress_needs_no_stderr(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KVCacheError("far enough")

    monkeypatch.setattr("kvcache_plugin.selftest.run", stop)
    monkeypatch.setattr("kvcache_plugin.check.run.run", stop)
    monkeypatch.setattr(sys, "stderr", None)
    assert cli.main([*arguments, "--json"]) != cli.FINE
    assert not capsys.readouterr().out


def test_what_others_print_does_not_mix_with_ours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        manager.Manager, "discover", lambda self: print("a banner of another package")
    )
    status, found = run_json(capsys, "plugins")
    assert (status, found) == (cli.FINE, [])


def test_demo_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo"]) == cli.FINE
    printed = capsys.readouterr().out
    assert "KVScaleError: model.layers.2.self_attn: fp8 KV cache scales must be finite" in printed
    assert "nvfp4         cpu_fast" in printed


def test_a_terminal_gets_a_table_too() -> None:
    """Through a pseudo-terminal, where rich draws it."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "kvcache_plugin", "plugins"],
        stdout=follower,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "60", "TERM": "xterm"},
    )
    os.close(follower)
    printed = b""
    try:
        while chunk := os.read(leader, 4096):
            printed += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(leader)
    assert process.wait() == 0
    lines = printed.decode().splitlines()
    assert any("cpu_reference" in line for line in lines)
    assert (
        max(map(len, (line.replace("\x1b[1m", "").replace("\x1b[0m", "") for line in lines))) <= 60
    )


def test_tables_need_no_rich(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert cli.main(["plugins"]) == cli.FINE
    assert "cpu_reference" in capsys.readouterr().out


class TestDoctor:
    """Engines are small packages on the path: doctor reads them and imports nothing."""

    @pytest.fixture
    def vllm(self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """A package ``vllm`` with every seam, which must not be imported."""
        write_engine(tmp_path, "vllm")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "vllm", raising=False)
        return tmp_path

    def problems(self, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
        status, found = run_json(capsys, "doctor")
        assert "vllm" not in sys.modules
        return status, found["problems"]

    @pytest.mark.usefixtures("vllm")
    def test_all_fits(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert self.problems(capsys) == (cli.FINE, [])

    @pytest.mark.usefixtures("vllm")
    def test_the_last_line_with_an_engine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == cli.FINE
        assert capsys.readouterr().out.splitlines()[-1] == "no problem found"

    def test_the_last_line_without_an_engine(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["doctor"]) == cli.FINE
        last = capsys.readouterr().out.splitlines()[-1]
        assert last == "no problem found, and no engine either"

    def test_a_seam_is_missing(self, vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
        seam_file(vllm, seams.VLLM_MODEL).write_text("", encoding="utf-8")
        status, problems = self.problems(capsys)
        assert status == cli.WRONG
        assert problems == [f"vLLM: {seams.VLLM_MODEL.path} is missing"]

    def test_a_module_is_missing(self, vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
        seam_file(vllm, seams.VLLM_MARKER).unlink()
        status, (problem,) = self.problems(capsys)
        assert status == cli.WRONG
        assert f"there is no module {seams.VLLM_MARKER.module}" in problem

    @pytest.mark.parametrize(
        "signature", ["model, target_device", "model, config, target_device", "model, *args"]
    )
    def test_a_seam_has_another_signature(
        self, vllm: Any, capsys: pytest.CaptureFixture[str], signature: str
    ) -> None:
        seam_file(vllm, seams.VLLM_MODEL).write_text(
            f"def process_weights_after_loading({signature}): ...\n", encoding="utf-8"
        )
        status, (problem,) = self.problems(capsys)
        assert status == cli.WRONG
        assert "has another signature" in problem
        assert "(model, model_config, target_device)" in problem

    @pytest.mark.parametrize(
        ("signature", "fits"),
        [
            ("model, model_config, target_device, draft=False", True),
            ("model, model_config, target_device, *, draft=False, **more", True),
            ("model, model_config, target_device, draft", False),
            ("model, model_config, target_device, *, draft", False),
        ],
    )
    def test_further_parameters_need_defaults(
        self, vllm: Any, capsys: pytest.CaptureFixture[str], signature: str, fits: bool
    ) -> None:
        seam_file(vllm, seams.VLLM_MODEL).write_text(
            f"def process_weights_after_loading({signature}): ...\n", encoding="utf-8"
        )
        status, _ = self.problems(capsys)
        assert status == (cli.FINE if fits else cli.WRONG)

    @pytest.mark.usefixtures("vllm")
    @pytest.mark.parametrize(
        ("value", "loads"),
        [
            ("kvcache_plugin", True),
            ("a,kvcache_plugin", True),
            ("", False),
            ("a", False),
            ("a, kvcache_plugin", False),
        ],
    )
    def test_vllm_plugins_may_leave_us_out(
        self,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        value: str,
        loads: bool,
    ) -> None:
        monkeypatch.setenv("VLLM_PLUGINS", value)
        status, problems = self.problems(capsys)
        assert status == (cli.FINE if loads else cli.WRONG)
        assert len(problems) == (0 if loads else 1)
        assert all("VLLM_PLUGINS" in problem for problem in problems)

    @pytest.mark.parametrize(
        "content",
        [b"def f(:\n", b"\x00", b"\xef\xbb\xbf", b"# coding: latin-1\n# \xe9\n", b"\xff\n"],
        ids=["syntax", "null", "byte order mark", "latin-1", "no encoding"],
    )
    def test_a_source_that_cannot_be_read_is_a_problem(
        self, vllm: Any, capsys: pytest.CaptureFixture[str], content: bytes
    ) -> None:
        seam_file(vllm, seams.VLLM_MODEL).write_bytes(content)
        status, (problem,) = self.problems(capsys)
        assert status == cli.WRONG
        assert seams.VLLM_MODEL.path in problem

    @pytest.mark.parametrize(
        ("source", "fits"),
        [
            ("if True:\n    def process_weights_after_loading({}): ...\n", True),
            (
                "try:\n    pass\nexcept OSError:\n    pass\nelse:\n"
                "    def process_weights_after_loading({}): ...\n",
                True,
            ),
            ("async def process_weights_after_loading({}): ...\n", False),
            ("class process_weights_after_loading: ...\n", False),
            ("process_weights_after_loading = None\n", False),
        ],
    )
    def test_how_a_function_is_defined(
        self, vllm: Any, capsys: pytest.CaptureFixture[str], source: str, fits: bool
    ) -> None:
        source = source.format(", ".join(seams.VLLM_MODEL.parameters))
        seam_file(vllm, seams.VLLM_MODEL).write_text(source, encoding="utf-8")
        status, _ = self.problems(capsys)
        assert status == (cli.FINE if fits else cli.WRONG)
        # The imported module is judged in the same way.
        module = types.ModuleType("module")
        exec(source, vars(module))
        assert (fitting.check_module(seams.VLLM_MODEL, module) == "") is fits

    def test_a_folder_of_that_name_is_no_engine(
        self, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Somebody's clone of it beside where the command runs."""
        (tmp_path / "vllm" / "vllm").mkdir(parents=True)
        monkeypatch.syspath_prepend(tmp_path)
        status, found = run_json(capsys, "doctor")
        assert status == cli.FINE
        assert found["engines"][0]["version"] is None

    def test_names_that_nobody_has_are_a_problem(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("KVCACHE_PLUGIN_BLOCK", "cpu_refrence")
        status, (problem,) = self.problems(capsys)
        assert status == cli.WRONG
        assert "names no implementation: cpu_refrence" in problem
        assert "cpu_reference" in problem

    def test_unknown_switches_are_problems(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("KVCACHE_PLUGIN_MOD", "warn")
        monkeypatch.setenv("KVCACHE_PLUGIN_MODE", "lenient")
        status, problems = self.problems(capsys)
        assert status == cli.WRONG
        assert any(
            "KVCACHE_PLUGIN_MOD " in p and "is KVCACHE_PLUGIN_MODE meant" in p for p in problems
        )
        assert any("'lenient'" in p and "strict, warn, off" in p for p in problems)

    def test_without_an_engine_it_says_so_and_is_fine(
        self, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["doctor"]) == cli.FINE
        assert f"note: no engine is installed in {sys.prefix}" in capsys.readouterr().out

    @pytest.mark.usefixtures("vllm")
    def test_off_is_noted(
        self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVCACHE_PLUGIN_MODE", "off")
        assert cli.main(["doctor"]) == cli.FINE
        printed = capsys.readouterr().out
        assert "note: KVCACHE_PLUGIN_MODE=off, so no checkpoint is checked" in printed
        assert "no engine is installed" not in printed

    def test_without_torch_it_says_so(self) -> None:
        code = (
            "import sys; sys.modules['torch'] = None\n"
            "from kvcache_plugin.cli import main; sys.exit(main(['doctor']))"
        )
        done = in_a_process("-c", code)
        assert done.returncode == cli.WRONG
        assert "torch" in done.stdout
        assert "Traceback" not in done.stderr

    def test_in_words(self, vllm: Any, capsys: pytest.CaptureFixture[str]) -> None:
        seam_file(vllm, seams.VLLM_MODEL).write_text("", encoding="utf-8")
        assert cli.main(["doctor"]) == cli.WRONG
        printed = capsys.readouterr().out
        assert "vLLM of unknown version loads us" in printed
        assert "SGLang is not installed here" in printed
        assert f"problem: vLLM: {seams.VLLM_MODEL.path} is missing" in printed


def test_sglang_plugins_is_read_as_sglang_reads_it() -> None:
    (sglang,) = [engine for engine in engines.ENGINES if engine.package == "sglang"]
    assert sglang.why_not_loaded({}) == ""
    assert sglang.why_not_loaded({"SGLANG_PLUGINS": ""}) == ""
    assert sglang.why_not_loaded({"SGLANG_PLUGINS": "a, kvcache_plugin "}) == ""
    assert "SGLANG_PLUGINS='a'" in sglang.why_not_loaded({"SGLANG_PLUGINS": "a"})


def test_an_engine_without_our_entry_point_does_not_load_us() -> None:
    engine = engines.Engine("vLLM", "vllm", ("vllm",), "no.such.group", "VLLM_PLUGINS", False)
    assert "kvcache-plugin is not installed where the engine is" in engine.why_not_loaded({})


def test_every_implementation_is_examined() -> None:
    examined = [found.name for found in doctor.examine().implementations]
    assert set(examined) >= set(manager.BUILT_IN)
    assert len(examined) == len(set(examined))


def seam_file(folder: Any, seam: seams.Seam) -> Any:
    return folder.joinpath(*seam.module.split(".")).with_suffix(".py")


def write_engine(folder: Any, package: str) -> None:
    """A package whose modules define the seams, and raise when they are imported."""
    modules: dict[Any, dict[str, list[str]]] = {}
    for seam in seams.SEAMS:
        if seam.engine == package:
            owner, _, function = seam.qualname.rpartition(".")
            indent = "    " if owner else ""
            line = f"{indent}def {function}({', '.join(seam.parameters)}): ..."
            modules.setdefault(seam_file(folder, seam), {}).setdefault(owner, []).append(line)
    for path, owners in modules.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for owner, functions in owners.items():
            lines += [f"class {owner}:", *functions] if owner else functions
        lines.append("raise ImportError('doctor imports no engine')")
        path.write_text("\n".join(lines), encoding="utf-8")
    (folder / package / "__init__.py").write_text(
        "raise ImportError('doctor imports no engine')", encoding="utf-8"
    )
