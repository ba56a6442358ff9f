"""``kvcache-plugin check``: its text, JSON and pictures, the comparison, and its page."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from kvcache_plugin import cli, scan_checkpoint
from kvcache_plugin.check import layer_names
from kvcache_plugin.check.comparison import compare
from kvcache_plugin.check.rows import rows_of
from kvcache_plugin.check.sparkline import ASCII, BLOCKS, characters_for, spark_lines, sparkline
from kvcache_plugin.checkpoint.report import KINDS
from tests.checkpoints_on_disk import (
    COMPRESSED_TENSORS,
    FP8_SCHEME,
    MODELOPT,
    attention_weights,
    config,
    scales,
    write,
    write_shards,
)
from tests.example_checkpoints import BROKEN, SOUND, write_examples
from tests.json_page import is_of, schema

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
NAN, INF = float("nan"), float("inf")
PER_HEAD = {**COMPRESSED_TENSORS, "kv_cache_scheme": {**FP8_SCHEME, "strategy": "attn_head"}}
# A name that SGLang has no rename for.
HUNYUAN = "model.layers.{i}.self_attn.{side}_cache.scale"


@pytest.fixture(autouse=True)
def _examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("KVCACHE_PLUGIN_")]:
        monkeypatch.delenv(name)
    write_examples(tmp_path)
    monkeypatch.chdir(tmp_path)


def checkpoint(path: str, pairs: Any, settings: Any = None, name: str | None = None) -> str:
    """One with weights for each layer."""
    layers = max(pairs) + 1
    stored = scales(pairs) if name is None else scales(pairs, name)
    write(Path(path), {**attention_weights(layers), **stored}, settings or config(layers))
    return path


@pytest.fixture
def check(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str]]:
    def run(*arguments: str) -> tuple[int, str]:
        status = cli.main(["check", *arguments])
        printed = capsys.readouterr()
        assert not printed.err
        return status, printed.out

    return run


@pytest.fixture
def as_json(check: Any) -> Callable[..., dict[str, Any]]:
    def refuse(literal: str) -> None:
        raise AssertionError(f"{literal} is no JSON")

    def run(*arguments: str) -> dict[str, Any]:
        status, printed = check(*arguments, "--json")
        found: dict[str, Any] = json.loads(printed, parse_constant=refuse)
        assert status == (cli.FINE if found["is_sound"] else cli.WRONG)
        return found

    return run


def row(printed: str, layer: str) -> list[str]:
    """The cells of a layer's row in the first table."""
    line = next(line for line in printed.splitlines() if line.startswith(f"{layer} "))
    return re.split(r"  +", line)


# Text


def test_a_sound_checkpoint(check: Any) -> None:
    status, printed = check("Llama-FP8")
    assert status == cli.FINE
    lines = printed.splitlines()
    assert re.split(r"  +", lines[0]) == [
        "layer",
        "K scale",
        "V scale",
        "source",
        "vLLM 0.32.0",
        "SGLang 0.5.23",
        "problem",
    ]
    assert row(printed, "model.layers.3.self_attn")[1:] == [
        "0.0547",
        "0.0188",
        "checkpoint",
        "yes",
        "yes",
        "-",
    ]
    assert lines[-1].startswith("8 layers with K/V scales in 1 file, checked for fp8_e4m3")
    assert lines[-3].startswith("declared: fp8_e4m3 in config.json: kv_cache_scheme = {")
    assert "problem" not in "".join(lines[1:-1])


def test_problems_come_first_and_the_summary_last(check: Any) -> None:
    status, printed = check("Llama-FP8-broken", "--device", "sm_90")
    assert status == cli.WRONG
    headings = re.findall(r"^(?:problem|remark|layer|declared|K  )", printed, re.MULTILINE)
    assert headings == ["problem", "problem", "remark", "layer", "K  ", "declared"]
    assert "problem corrupt-scale\n  model.layers.5.self_attn, K, inf: fp8 KV cache" in printed
    assert "\n  what to do: Calibrate and export again with llm-compressor" in printed
    assert printed.count("Calibrate and export again") == 1
    assert "among 7 with\n  what to do: as for corrupt-scale\n" in printed
    assert printed.splitlines()[-1] == scan_checkpoint("Llama-FP8-broken", device="sm_90").summary
    assert "device:" not in printed
    assert row(printed, "model.layers.2.self_attn")[1:] == [
        *("-", "-", "default 1.0", "-", "-", "missing-layers")
    ]
    assert row(printed, "model.layers.5.self_attn")[3] == "refused"


def test_the_device_of_this_machine_is_said(check: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "\ndevice: cpu, as this machine has it; --device takes" in check("Llama-FP8")[1]


def test_findings_that_are_alike_go_together(check: Any) -> None:
    pairs = {layer: (NAN, 0.1) if layer < 14 else (0.1, 0.1) for layer in range(16)}
    _, printed = check(checkpoint("many", pairs))
    assert printed.count("problem corrupt-scale") == 1
    assert printed.count("must be finite, got k_scale=nan") == 10
    assert "and 4 more like it, which the table has" in printed
    assert printed.count("what to do: Calibrate") == 1
    assert sum(line.endswith("corrupt-scale") for line in printed.splitlines()) == 1 + 14


def test_a_message_does_not_begin_with_a_bare_number(check: Any) -> None:
    _, printed = check(checkpoint("zeros", dict.fromkeys(range(3), (0.0, 0.0))))
    assert "\n  model.layers.{0-2}.self_attn: every K and V scale is 0" in printed
    assert row(printed, "model.layers.1.self_attn")[-1] == "all-zero"


def test_what_engines_would_find(check: Any) -> None:
    _, printed = check(checkpoint("hunyuan", {0: (0.1, 0.2), 1: (0.1, 0.3)}, name=HUNYUAN))
    assert row(printed, "model.layers.1.self_attn")[4:6] == ["yes", "dropped"]
    mixed = {
        "model.layers.0.self_attn.k_scale": 0.1,
        "model.layers.0.self_attn.v_cache.scale": 0.2,
    }
    write(Path("mixed"), {**attention_weights(1), **mixed}, config(1))
    assert row(check("mixed")[1], "model.layers.0.self_attn")[5] == "K yes, V dropped"


def test_what_is_served_has_columns_where_it_is_not_what_is_stored(check: Any) -> None:
    status, printed = check("Llama-FP8", "--device", "gfx942")
    assert status == cli.FINE
    assert "K on gfx942  V on gfx942" in printed
    assert row(printed, "model.layers.0.self_attn")[1:5] == ["0.0312", "0.0117", "0.0624", "0.0234"]


def test_sources_shapes_and_dtypes(check: Any) -> None:
    pairs = {
        0: (0.1, None),
        1: (-1.0, None),
        2: (torch.tensor([1]), 0.1),
        3: (torch.ones(5000), 0.1),
    }
    _, printed = check(checkpoint("odd", pairs))
    assert row(printed, "model.layers.0.self_attn")[1:4] == [
        *("0.1", "-", "K checkpoint, V duplicated")
    ]
    assert row(printed, "model.layers.1.self_attn")[1:4] == ["-1", "-", "default 1.0"]
    assert row(printed, "model.layers.2.self_attn")[1] == "I64 [1]"
    assert row(printed, "model.layers.3.self_attn")[1] == "F32 [5000]"


def test_scales_by_head_show_their_reach(check: Any) -> None:
    heads = {0: (torch.tensor([0.1, 0.4]), torch.tensor([0.2, -0.3]))}
    _, printed = check(checkpoint("heads", heads, config(1, quantization_config=PER_HEAD)))
    assert row(printed, "model.layers.0.self_attn")[1:3] == ["0.1 to 0.4 (2)", "-0.3 to 0.2 (2)"]


def test_without_a_declaration(check: Any) -> None:
    settings = config(1, quantization_config=None)
    _, printed = check(checkpoint("bare", {0: (0.1, 0.2)}, settings))
    assert "\ndeclared: no quantized KV cache\n" in printed
    settings = config(1, quantization_config={**MODELOPT, "ignore": ["lm_head"]})
    _, printed = check(checkpoint("theirs", {0: (0.1, 0.2)}, settings))
    assert re.search(r"^declared: .*, by modelopt 0.43.0, 1 ignore entries$", printed, re.MULTILINE)


def test_names_of_strangers_do_not_reach_the_terminal_as_they_are(check: Any) -> None:
    evil = "model.layers.0.\x1b[31m\n.self_attn"
    write(Path("evil"), {f"{evil}.k_scale": NAN, f"{evil}.v_scale": 0.1}, config(1))
    _, printed = check("evil")
    assert "\x1b" not in printed
    assert "model.layers.0.\\x1b[31m\\n.self_attn" in printed


# Names and sparklines


@pytest.mark.parametrize(
    ("names", "short"),
    [
        ([], ""),
        (["a.3.b"], "a.3.b"),
        (["a.3.b"] * 2, "a.3.b"),
        ([f"a.{i}.b" for i in (0, 1, 2, 3, 7)], "a.{0-3,7}.b"),
        (["a.1", "a.0"], "a.{0,1}"),
        (["a.0.b", "a.0.c", "x"], "a.0.b, a.0.c, x"),
        (["a.00.b", "a.1.b"], "a.00.b, a.1.b"),
        (["v.0.l.0", "v.0.l.1", "v.1.l.0"], "v.0.l.{0,1}, v.1.l.0"),
        (list("abcdef"), "a, b, c, d and 2 more"),
    ],
)
def test_names_are_shortened(names: list[str], short: str) -> None:
    assert layer_names.shorten(names) == short


@pytest.mark.parametrize(
    ("values", "blocks", "digits"),
    [
        ([], "", ""),
        ([2.0**i for i in range(8)], "▁▂▃▄▅▆▇█", "12345678"),
        ([0.5, 0.5], "▅▅", "55"),
        ([1.0, 128.0, None, NAN, 0.0, -2.0, INF], "▁█·××××", "18.xxxx"),
        ([NAN, None], "×·", "x."),
        ([5e-324, 1.0, 1.7e308], "▁▅█", "158"),
    ],
)
def test_a_sparkline(values: list[float | None], blocks: str, digits: str) -> None:
    assert sparkline(values, BLOCKS) == blocks
    assert sparkline(values, ASCII) == digits


def test_characters_are_those_that_the_output_can_show() -> None:
    assert characters_for("utf-8") is BLOCKS
    assert all(characters_for(name) is ASCII for name in ("ascii", "latin-1", "nonsense", None))


def test_spark_lines_of_the_broken_example() -> None:
    rows = rows_of(scan_checkpoint("Llama-FP8-broken"))
    assert [found.number for found in rows] == list(range(8))
    assert spark_lines(rows, BLOCKS) == [
        "stored scales by layer, log2, × no scale, · not stored, ! has a problem",
        "K     0 ▁▄·▆▇×█▅  0.0312 to 0.0655",
        "V     0 ▁▁·▂▂▂▂█  0.0117 to 0.9653",
        "          !  !",
    ]


def test_long_sparklines_are_folded() -> None:
    path = checkpoint("long", {layer: (0.5, 0.25 + layer) for layer in range(100)})
    lines = spark_lines(rows_of(scan_checkpoint(path)), BLOCKS)
    assert lines[1] == f"K     0 {'▅' * 64}  0.5"
    assert lines[3] == f"K    64 {'▅' * 36}"
    assert len(lines) == 5


# JSON


def objects(found: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a report with the name that the page has for it."""
    yield "Report", found
    yield "Declaration", found["declaration"]
    yield "Producer", found["declaration"]["producer"]
    yield "Shape", found["shape"]
    for scheme in ("scheme", "rival"):
        if found["declaration"][scheme] is not None:
            yield "Scheme", found["declaration"][scheme]
    for layer in found["layers"]:
        yield "Layer", layer
    for finding in found["findings"]:
        yield "Finding", finding
    for scale in found["scales"]:
        yield "Scale", scale
        for verdict in scale["engines"]:
            yield "Verdict", verdict
    if found["against"] is not None:
        yield "Against", found["against"]
        for side in "kv":
            yield "Side", found["against"][side]
        for layer in found["against"]["layers"]:
            yield "Pairs of sides", layer
            for side in "kv":
                yield "Pair", layer[side]


REPORTS = [
    ("Llama-FP8",),
    ("Llama-FP8-broken", "--against", "Llama-FP8"),
    ("corrupt", "--device", "gfx942", "--kv-cache-dtype", "fp8", "--against", "Llama-FP8-broken"),
    ("heads", "--against", "Llama-FP8"),
    ("rivals",),
]


@pytest.fixture
def _odd_checkpoints() -> None:
    checkpoint("corrupt", {0: (NAN, INF), 1: (-INF, 0.0), 2: (0.0, -3.0)}, name=HUNYUAN)
    heads = {0: (torch.tensor([0.1, 0.4]), torch.tensor([0.2, 0.3]))}
    checkpoint("heads", heads, config(1, quantization_config=PER_HEAD))
    rivals = config(1, quantization_config={**MODELOPT, "ignore": ["lm_head"]})
    checkpoint("rivals", {0: (0.1, None)}, rivals)
    other = {"quantization": {"kv_cache_quant_algo": "NVFP4"}}
    (Path("rivals") / "hf_quant_config.json").write_text(json.dumps(other))


@pytest.mark.usefixtures("_odd_checkpoints")
@pytest.mark.parametrize("arguments", REPORTS, ids=" ".join)
def test_json_is_what_the_page_says(as_json: Any, arguments: tuple[str, ...]) -> None:
    fields = schema(PAGE, "`--json`")
    for name, found in objects(as_json(*arguments)):
        assert set(found) == set(fields[name]), name
        for field, value in found.items():
            assert is_of(fields[name][field], value), (name, field, value)


@pytest.mark.usefixtures("_odd_checkpoints")
def test_every_object_of_the_page_is_in_some_report(as_json: Any) -> None:
    seen = {name for arguments in REPORTS for name, _ in objects(as_json(*arguments))}
    assert seen == set(schema(PAGE, "`--json`"))


@pytest.mark.usefixtures("_odd_checkpoints")
def test_json_has_what_the_report_has(as_json: Any) -> None:
    found, report = as_json("corrupt", "--device", "cpu"), scan_checkpoint("corrupt")
    assert (found["schema"], found["device_from"]) == (1, "asked")
    assert [finding["kind"] for finding in found["findings"]] == [f.kind for f in report.findings]
    assert len(found["scales"]) == 6
    by_name = {scale["name"]: scale["values"] for scale in found["scales"]}
    assert by_name[found["layers"][0]["stored_k"]] == ["nan"]
    assert by_name[found["layers"][1]["stored_k"]] == ["-inf"]
    assert found["layers"][0]["k_scale"] == []
    assert found["summary"] == report.summary
    assert found["against"] is None


# Two checkpoints


@pytest.mark.parametrize(
    ("convert", "side", "said"),
    [
        (lambda s: s, "8 equal", ""),
        (lambda s: s * 1.002, "all 1.002 ×", "the same scales, rounded differently"),
        (lambda s: 2 * s, "all 2 ×", "this checkpoint has them for FNUZ codes (gfx942), the other"),
        (lambda s: s / 2, "all 0.5 ×", "the other has them for FNUZ codes (gfx942), this"),
        (lambda s: s * 448 / 240, "all 1.867 ×", "this checkpoint has amax/240, for e4m3fnuz"),
        (lambda s: 6 * s, "all 6 ×", "this checkpoint has amax/448, the other amax/2688"),
        (lambda s: 128 * s, "all 128 ×", "the other amax/57344, for e5m2"),
        (lambda s: s / 240, "all 0.004167 ×", "the other has amax, this checkpoint amax/240"),
        (lambda s: 448 * s, "all 448 ×", "this checkpoint has amax, the other amax/448"),
        (lambda s: 2688 * s, "all 2688 ×", "this checkpoint has amax, the other amax/2688"),
        (lambda s: 1 / s, "all 1 /", "one of the two has reciprocals"),
        (lambda s: 6 / s, "all 6 /", "one of the two has 2688/amax, the other amax/448"),
        (lambda s: 1 / s / 6, "all 0.1667 /", "one of the two has 448/amax, the other amax/2688"),
        (lambda s: 448 / s, "all 448 /", "one of the two has 448/amax, the other amax"),
        (lambda s: 2688 / s, "all 2688 /", "one of the two has 2688/amax, the other amax"),
        (lambda s: 3.3 * s, "all 3.3 ×", ""),
        (lambda s: s**2, "0.0312 to 0.0655 ×", ""),
    ],
)
def test_a_constant_ratio_or_product_says_what_it_looks_like(
    convert: Any, side: str, said: str
) -> None:
    pairs = {layer: (convert(k), convert(v)) for layer, (k, v) in SOUND.items()}
    report = scan_checkpoint(checkpoint("converted", pairs))
    found = compare(report, scan_checkpoint("Llama-FP8"))
    assert side in str(found.k)
    assert said in str(found.k)
    assert said in found.v.looks_like
    assert bool(found.k.looks_like) is bool(said)


def test_of_scales_that_are_all_alike_the_known_one_counts() -> None:
    """Both the ratio and the product are constant."""
    reports = {
        number: scan_checkpoint(checkpoint(str(number), dict.fromkeys(range(3), (number,) * 2)))
        for number in (0.05, 20.0, 0.1, 7.0)
    }
    assert "has reciprocals" in str(compare(reports[20.0], reports[0.05]).k)
    assert "FNUZ" in str(compare(reports[0.1], reports[0.05]).k)
    assert str(compare(reports[7.0], reports[0.05]).k) == "K: 3 different, all 140 × the other's"


def test_layers_differ_one_by_one(check: Any, as_json: Any) -> None:
    found = as_json("Llama-FP8-broken", "--against", "Llama-FP8")["against"]
    assert [layer["layer"] for layer in found["layers"]] == [
        f"model.layers.{layer}.self_attn" for layer in range(8)
    ]
    relations = {
        i: (layer["k"]["relation"], layer["v"]["relation"])
        for i, layer in enumerate(found["layers"])
    }
    assert {i: pair for i, pair in relations.items() if set(pair) != {"equal"}} == {
        2: ("only there", "only there"),
        5: ("not comparable", "equal"),
        7: ("equal", "different"),
    }
    assert found["layers"][7]["v"]["ratio"] == [pytest.approx(BROKEN[7][1] / SOUND[7][1])]
    assert found["layers"][5]["k"]["here"] == ["inf"]
    assert (found["k"]["equal"], found["k"]["only_there"], found["k"]["not_comparable"]) == (
        6,
        1,
        1,
    )
    assert found["v"]["largest_ratio"] == pytest.approx(25.6, rel=1e-3)
    assert found["v"]["ratio"] is None
    assert not found["is_equal"]
    _, printed = check("Llama-FP8-broken", "--against", "Llama-FP8")
    assert "against Llama-FP8, layers by name:\nlayer" in printed
    assert "\nV: 6 equal, 1 different, 1 only there, 1 to 25.6 × the other's\n" in printed


def test_a_difference_alone_is_no_problem(check: Any, as_json: Any) -> None:
    assert check("Llama-FP8", "--against", "Llama-FP8-broken")[0] == cli.FINE
    status, printed = check("Llama-FP8", "--against", "Llama-FP8")
    assert status == cli.FINE
    assert "against Llama-FP8, layers by name:\nK: 8 equal\nV: 8 equal\n" in printed
    assert as_json("Llama-FP8", "--against", "Llama-FP8")["against"]["is_equal"]
    assert check("Llama-FP8-broken", "--against", "Llama-FP8")[0] == cli.WRONG


def test_layers_of_other_names_are_matched_by_number() -> None:
    name = "layers.{i}.attention.{side}_fake_quantizer.qscale_act"
    write(Path("mistral"), scales(SOUND, name), config(8))
    found = compare(scan_checkpoint("mistral"), scan_checkpoint("Llama-FP8"))
    assert found.matched_by == "number"
    assert found.is_equal
    assert found.layers[3].layer == "layers.3.attention"


def test_nan_equals_nan_and_other_shapes_are_not_comparable() -> None:
    path = checkpoint("nan", {0: (NAN, None), 1: (torch.tensor([0.1, 0.2]), None)})
    other = checkpoint("other", {0: (NAN, None), 1: (0.1, 0.2)})
    found = compare(scan_checkpoint(path), scan_checkpoint(other))
    assert [layer.k.relation for layer in found.layers] == ["equal", "not comparable"]
    assert [layer.v.relation for layer in found.layers] == ["in neither", "only there"]
    assert found.k.smallest_ratio is None
    assert str(compare(scan_checkpoint(path), scan_checkpoint(path)).v) == "V: in neither"


# Pictures


def test_a_png(check: Any) -> None:
    status, printed = check("Llama-FP8-broken", "--plot", "scales.png")
    assert status == cli.WRONG
    assert "\npicture: scales.png\n" in printed
    data = Path("scales.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000


def test_json_is_alone_on_stdout_beside_a_picture(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "Llama-FP8", "--json", "--plot", "scales.svg"]) == cli.FINE
    printed = capsys.readouterr()
    assert json.loads(printed.out)["is_sound"]
    assert printed.err == "picture: scales.svg\n"


def test_two_checkpoints_of_one_name_are_told_apart_by_their_paths(check: Any) -> None:
    checkpoint("newer/$Llama-FP8$", SOUND)
    checkpoint("$Llama-FP8$", SOUND)
    check("$Llama-FP8$", "--plot", "x.svg", "--against", "newer/$Llama-FP8$")
    assert ">K scale of newer/$Llama-FP8$<" in Path("x.svg").read_text(encoding="utf-8")


def test_a_picture_has_a_mark_for_each_problem(check: Any) -> None:
    check("Llama-FP8-broken", "--plot", "scales.svg", "--against", "Llama-FP8")
    picture = Path("scales.svg").read_text(encoding="utf-8")
    assert set(re.findall(r'id="problem-(\d+)"', picture)) == {"2", "5"}
    assert re.findall(r'id="([kv])-corrupt-(\d+)"', picture) == [("k", "5")]
    for name in ("k-scales", "v-scales", "k-other", "v-other"):
        assert f'id="{name}"' in picture
    for text in (
        "Llama-FP8-broken",
        "K inf",
        "problem: missing-layers, corrupt-scale",
        "model.layers.{0-7}.self_attn",
        "K scale of Llama-FP8<",
        "2 problems, 1 remark",
    ):
        assert text in picture
    legend = [picture.index(f">{side} scale{of}<") for of in ("", " of Llama-FP8") for side in "KV"]
    assert legend == sorted(legend)
    check("Llama-FP8-broken", "--plot", "again.svg", "--against", "Llama-FP8")
    assert Path("again.svg").read_text(encoding="utf-8") == picture


@pytest.mark.parametrize(
    "pairs",
    [
        {0: (NAN, INF), 1: (-INF, 0.0)},
        dict.fromkeys(range(40), (NAN, 0.0)),
        {0: (torch.tensor([1e308], dtype=torch.float64), 1e-45)},
        {0: (torch.tensor([0.1, NAN]), torch.tensor([0.3, 0.2]))},
        {0: (torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.2])), 5: (0.1, 0.1)},
        {0: (None, None)},
    ],
)
@pytest.mark.parametrize("suffix", ["png", "SVG"])
def test_anything_can_be_drawn(check: Any, pairs: Any, suffix: str) -> None:
    check(checkpoint("$any_{x$", pairs), "--plot", f"any.{suffix}")
    assert Path(f"any.{suffix}").stat().st_size > 5_000


def test_layers_without_a_common_number_are_named(check: Any) -> None:
    names = ("a$x$.0.self_attn", "b.0.self_attn", "c.self_attn")
    write(Path("stacks"), {f"{name}.{side}_scale": 0.1 for name in names for side in "kv"})
    check("stacks", "--plot", "stacks.svg")
    picture = Path("stacks.svg").read_text(encoding="utf-8")
    assert all(name in picture for name in names)


# Misuse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "nowhere: there is no such file or folder"),
        (["Llama-FP8", "--against", "nowhere"], "nowhere: there is no such file or folder"),
        (["Llama-FP8", "--device", "toaster"], "unknown device 'toaster'"),
        (["Llama-FP8", "--kv-cache-dtype", "fp9"], "unknown kv_cache_dtype 'fp9'"),
        (["Llama-FP8", "--plot", "x.pdf"], "--plot x.pdf: a picture is a file that ends with .png"),
        (["Llama-FP8", "--plot", "x"], "--plot x: a picture is a file that ends with .png or .svg"),
        (["Llama-FP8", "--plot", "no/x.png"], "no/x.png: it cannot be written: No such file"),
        (["Llama-FP8/config.json"], "Llama-FP8/config.json: it is no .safetensors file"),
    ],
)
def test_what_cannot_be_done_is_2_and_one_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *arguments]) == cli.MISUSED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kvcache-plugin: ")
    assert said in printed.err
    assert printed.err.count("\n") == 1


def test_a_damaged_file_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    (Path("Llama-FP8") / "model.safetensors").write_bytes(b"\xff" * 20)
    assert cli.main(["check", "Llama-FP8", "--json"]) == cli.MISUSED
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no sound safetensors file" in printed.err
    assert printed.err.startswith("kvcache-plugin: Llama-FP8/model.safetensors: ")
    assert cli.main(["check", "Llama-FP8/model.safetensors"]) == cli.MISUSED
    assert capsys.readouterr().err == printed.err
    assert cli.main(["check", "./no/such/place"]) == cli.MISUSED
    assert capsys.readouterr().err == (
        "kvcache-plugin: ./no/such/place: there is no such file or folder "
        "[errors#checkpoint-missing]\n"
    )


def test_without_matplotlib_it_says_how_to_get_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert cli.main(["check", "Llama-FP8", "--plot", "x.png"]) == cli.MISUSED
    assert 'pip install "kvcache-plugin[plot]"' in capsys.readouterr().err
    assert not Path("x.png").exists()


def test_no_path_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["check"])
    assert exit_.value.code == cli.MISUSED
    assert "required: PATH" in capsys.readouterr().err


# Terminals


def in_a_terminal(*command: str, **variables: str) -> tuple[int, str]:
    """Run with stdout and stderr on one; what it printed, colours and all."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=follower,
        stderr=follower,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "COLUMNS": "150",
            "TERM": "xterm-256color",
            **variables,
        },
    )
    os.close(follower)
    printed = b""
    try:
        while chunk := os.read(leader, 4096):
            printed += chunk
    except OSError:  # the terminal's other end is closed
        pass
    os.close(leader)
    return process.wait(), printed.decode()


WITHOUT_RICH = (
    "import sys; sys.modules['rich'] = sys.modules['rich.console'] = None\n"
    "from kvcache_plugin.cli import main; sys.exit(main(sys.argv[1:]))"
)


def write_many_shards() -> None:
    shards = {
        f"model-{layer:05}-of-00012.safetensors": scales({layer: (0.1 + layer, NAN)})
        for layer in range(12)
    }
    write_shards(Path("shards"), shards, config(12))


def test_a_terminal_gets_colours_a_table_and_a_bar() -> None:
    write_many_shards()
    status, printed = in_a_terminal(sys.executable, "-m", "kvcache_plugin", "check", "shards")
    assert status == cli.WRONG
    assert "\x1b[1;31mproblem corrupt-scale" in printed
    assert "reading headers" in printed
    assert "100%" in printed
    assert "K     0 ▁" in printed
    status, printed = in_a_terminal(sys.executable, "-m", "kvcache_plugin", "check", "Llama-FP8")
    assert status == cli.FINE
    assert "reading headers" not in printed


@pytest.mark.parametrize("width", ["80", "120"])
def test_no_name_is_broken_on_a_narrow_terminal(width: str) -> None:
    command = (sys.executable, "-m", "kvcache_plugin", "check", "Llama-FP8-broken")
    _, printed = in_a_terminal(*command, COLUMNS=width)
    assert re.search(
        r"^model\.layers\.2\.self_attn .* default 1\.0 .* missing-layers", printed, re.MULTILINE
    )


def test_a_terminal_without_rich_gets_a_counter() -> None:
    write_many_shards()
    status, printed = in_a_terminal(sys.executable, "-c", WITHOUT_RICH, "check", "shards")
    assert status == cli.WRONG
    assert "reading headers: 12 of 12" in printed
    assert "\x1b" not in printed
    assert "problem corrupt-scale" in printed


def test_a_terminal_without_our_characters_gets_digits() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvcache_plugin", "check", "Llama-FP8-broken"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == cli.WRONG
    assert "K     0 14.67x85  0.0312 to 0.0655" in done.stdout
    assert "\\u" not in done.stdout
    assert done.stderr == ""


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    checkpoint("wide", {layer: (0.5 + layer, 0.25 + layer) for layer in range(2000)})
    done = subprocess.run(
        ["sh", "-c", f"{sys.executable} -m kvcache_plugin check wide | head -1"],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.stdout == "remark reciprocal\n"
    assert done.stderr == ""


# The page


def test_the_page_has_the_cause_and_the_remedy_of_every_kind() -> None:
    page = (ROOT / "docs" / "check.md").read_text(encoding="utf-8")
    section = page.partition("\n## What it finds\n")[2].partition("\n## ")[0]
    _, *parts = section.split("\n### ")
    told = {heading: text for heading, _, text in (part.partition("\n") for part in parts)}
    assert list(told) == list(KINDS)
    for kind, text in told.items():
        assert re.match(r"\n\*\*Cause\.\*\* \S", text), kind
        assert re.search(r"^\*\*Remedy\.\*\* \S", text, re.MULTILINE), kind
