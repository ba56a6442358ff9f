"""Whole checkpoints: what the scan finds in them, written down by hand."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import CheckpointError, CheckpointReport, KVCacheError, scan_checkpoint
from kvcache_plugin.checkpoint.report import KINDS, Finding
from tests.checkpoints_on_disk import (
    COMPRESSED_TENSORS,
    FP8_SCHEME,
    MODELOPT,
    attention_weights,
    config,
    encode_tensors,
    scales,
    write,
    write_shards,
)

if TYPE_CHECKING:
    from tests.conftest import Register

NAN, INF = float("nan"), float("inf")
SOUND = {0: (0.05, 0.04), 1: (0.06, 0.03)}
PER_HEAD = {**COMPRESSED_TENSORS, "kv_cache_scheme": {**FP8_SCHEME, "strategy": "attn_head"}}


def scan(folder: Path, pairs: Any, settings: Any = None, **options: Any) -> CheckpointReport:
    """A checkpoint with weights for its layers and these scales, scanned."""
    settings = config(layers=max(pairs) + 1) if settings is None else settings
    layers = settings.get("num_hidden_layers", len(pairs))
    return scan_checkpoint(
        write(folder, {**attention_weights(layers), **scales(pairs)}, settings), **options
    )


def kinds(report: CheckpointReport) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in report.findings]


def only(report: CheckpointReport, kind: str) -> Finding:
    (found,) = (finding for finding in report.findings if finding.kind == kind)
    return found


def test_a_sound_checkpoint(tmp_path: Path) -> None:
    report = scan(tmp_path, SOUND)
    assert report.is_sound
    assert report.findings == ()
    assert report.files == ("model.safetensors",)
    assert report.num_tensors == 12
    assert (report.kv_cache_dtype, report.kv_cache_dtype_from) == ("fp8_e4m3", "declared")
    assert report.device == "cpu"
    first, second = report.layers
    assert (first.layer, first.stack, first.index) == (
        "model.layers.0.self_attn",
        "model.layers",
        0,
    )
    assert first.k_scale == pytest.approx((0.05,))
    assert second.v_scale == pytest.approx((0.03,))
    assert (first.k_source, first.v_source) == ("checkpoint", "checkpoint")
    assert first.stored_k is not None
    assert first.stored_k.name == "model.layers.0.self_attn.k_scale"
    assert (first.stored_k.file, first.stored_k.dtype) == ("model.safetensors", "F32")
    assert first.stored_k.shape == (1,)
    assert [str(verdict) for verdict in first.stored_k.engines] == ["vLLM: yes", "SGLang: yes"]
    assert report.summary == (
        "2 layers with K/V scales in 1 file, checked for fp8_e4m3 (declared) on cpu: 0 problems, "
        "0 remarks"
    )


def test_a_report_becomes_json(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, NAN), 1: (0.06, None)})
    as_json = json.loads(json.dumps(asdict(report)))
    assert as_json["layers"][1]["k_scale"] == pytest.approx([0.06])
    assert as_json["findings"][0]["kind"] == "corrupt-scale"


def test_every_kind_has_a_sentence_and_unknown_kinds_are_refused() -> None:
    assert all(KINDS.values())
    with pytest.raises(ValueError, match="unknown kind 'typo'"):
        Finding("typo", "problem", "")
    with pytest.raises(ValueError, match="severity must be"):
        Finding("all-one", "fatal", "")  # type: ignore[arg-type]


# The device and the format


def test_scales_are_checked_for_the_device(tmp_path: Path) -> None:
    report = scan(tmp_path, SOUND, device="gfx942")
    assert report.layers[0].k_scale == pytest.approx((0.1,))
    assert report.kv_cache_dtype == "fp8_e4m3fnuz"
    assert report.device == "gfx942"
    too_large = scan(tmp_path, {0: (3e38, 0.05)}, device="gfx942")
    assert kinds(too_large) == [("problem", "corrupt-scale")]
    assert "fit in torch.float32" in too_large.findings[0].message
    assert scan(tmp_path, {0: (3e38, 3e38)}, device="sm_90").problems == ()


@pytest.mark.parametrize(
    ("settings", "asked", "dtype", "source"),
    [
        (config(1), None, "fp8_e4m3", "declared"),
        (config(1), "auto", "fp8_e4m3", "declared"),
        (config(1), "fp8_e5m2", "fp8_e5m2", "asked"),
        (config(1), "fp8", "fp8_e4m3", "asked"),
        (
            config(1, quantization_config={**MODELOPT, "kv_cache_scheme": "NVFP4"}),
            None,
            "nvfp4",
            "declared",
        ),
        (
            config(1, quantization_config={**MODELOPT, "kv_cache_scheme": "INT8"}),
            None,
            "fp8_e4m3",
            "assumed",
        ),
        (config(1, quantization_config=None), None, "fp8_e4m3", "assumed"),
    ],
)
def test_the_format_is_asked_declared_or_assumed(
    tmp_path: Path, settings: Any, asked: str | None, dtype: str, source: str
) -> None:
    report = scan(tmp_path, {0: (0.05, 0.04)}, settings, kv_cache_dtype=asked)
    assert (report.kv_cache_dtype, report.kv_cache_dtype_from) == (dtype, source)


def test_an_unknown_format_or_device_is_a_fault_of_the_call(tmp_path: Path) -> None:
    folder = write(tmp_path, scales(SOUND), config())
    with pytest.raises(KVCacheError, match="unknown kv_cache_dtype 'fp9'") as refused:
        scan_checkpoint(folder, kv_cache_dtype="fp9")
    assert not isinstance(refused.value, CheckpointError)
    with pytest.raises(KVCacheError, match="unknown device"):
        scan_checkpoint(folder, device="toaster")


def test_layers_go_through_the_hook_that_engines_use(tmp_path: Path, register: Register) -> None:
    class Policy:
        @kv.hookimpl
        def validate_kv_scales(self, scales: kv.KVScales, layer: str) -> None:
            if layer == "model.layers.1.self_attn":
                raise kv.KVScaleError("not on Fridays", layer=layer)

    register(Policy())
    report = scan(tmp_path, SOUND)
    assert only(report, "corrupt-scale").message == "not on Fridays"
    assert only(report, "corrupt-scale").layers == ("model.layers.1.self_attn",)


# Values of one layer


@pytest.mark.parametrize(
    ("k", "v", "side", "says"),
    [
        (NAN, 1.0, "k", "fp8 KV cache scales must be finite, got k_scale=nan"),
        (INF, 1.0, "k", "must be finite"),
        (1.0, -INF, "v", "must be finite"),
        (NAN, INF, "", "must be finite"),
        (0.05, NAN, "v", "must be finite"),
        (0.05, -0.3, "v", "must be positive"),
        (0.05, 0.0, "v", "must be positive"),
        (0.0, 0.05, "k", "must be positive"),
        (1e-39, 0.05, "k", "whose reciprocal is not finite"),
        (torch.tensor([1e300], dtype=torch.float64), 0.05, "k", "fit in torch.float32"),
    ],
)
def test_a_corrupt_pair(tmp_path: Path, k: Any, v: Any, side: str, says: str) -> None:
    report = scan(tmp_path, {0: (0.05, 0.04), 1: (k, v), 2: (0.05, 0.04)})
    assert kinds(report) == [("problem", "corrupt-scale")]
    found = only(report, "corrupt-scale")
    assert found.layers == ("model.layers.1.self_attn",)
    assert found.side == side
    assert (found.value is None) is (side == "")
    assert says in found.message
    assert "llm-compressor" in found.remedy
    bad = report.layers[1]
    assert (bad.k_scale, bad.v_scale, bad.k_source) == ((), (), "")
    assert bad.refusal == found.message


@pytest.mark.parametrize(
    ("k", "v"),
    [
        (torch.tensor([1.0, 2.0]), 1.0),
        (torch.tensor([1.0, NAN]), 1.0),
        (1.0, torch.ones(2, 1, 1)),
        (torch.ones(0), 1.0),
    ],
)
def test_a_scale_of_several_elements(tmp_path: Path, k: Any, v: Any) -> None:
    found = only(scan(tmp_path, {0: (k, v)}), "wrong-shape")
    assert "Only support per-tensor scaling factor for fp8 KV cache" in found.message


def test_scales_per_head_have_to_be_declared(tmp_path: Path) -> None:
    found = only(scan(tmp_path, {0: (torch.ones(2, 1, 1), torch.ones(2, 1, 1))}), "wrong-shape")
    assert "strategy attn_head" in found.remedy
    other = only(scan(tmp_path, {0: (torch.ones(7), torch.ones(7))}), "wrong-shape")
    assert other.remedy == "Export one scale for each layer"


@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (1, 1, 1)])
def test_one_element_is_per_tensor_in_any_shape(tmp_path: Path, shape: Any) -> None:
    report = scan(tmp_path, {0: (torch.full(shape, 0.05), torch.full(shape, 0.04))})
    assert report.findings == ()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_scales_have_any_floating_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    k, v = torch.tensor([0.5], dtype=dtype), torch.tensor([0.25], dtype=dtype)
    report = scan(tmp_path, {0: (k, v)})
    assert report.findings == ()
    assert (report.layers[0].k_scale, report.layers[0].v_scale) == ((0.5,), (0.25,))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_whole_numbers_are_no_scales(tmp_path: Path, dtype: torch.dtype) -> None:
    report = scan(tmp_path, {0: (torch.ones(1, dtype=dtype), 0.05)})
    found = only(report, "wrong-dtype")
    assert f"{dtype}" in found.message
    assert found.remedy == "Store the scales as float32"


def test_a_huge_tensor_under_a_scales_name_is_not_read(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (torch.ones(5000), 0.05)})
    found = only(report, "wrong-shape")
    assert (
        found.message == "model.layers.0.self_attn.k_scale has shape (5000,), too large for a scale"
    )
    assert report.scales[0].values == ()


def test_per_head_scales(tmp_path: Path) -> None:
    k = torch.tensor([0.02, 0.03]).reshape(2, 1, 1)
    v = torch.tensor([0.01, 0.02])
    report = scan(tmp_path, {0: (k, v)}, config(1, quantization_config=PER_HEAD))
    assert report.problems == ()
    assert report.layers[0].k_scale == pytest.approx((0.02, 0.03))
    assert report.layers[0].v_scale == pytest.approx((0.01, 0.02))


@pytest.mark.parametrize("heads", [1, 3])
def test_per_head_scales_fit_the_heads(tmp_path: Path, heads: int) -> None:
    k = torch.ones(heads, 1, 1)
    found = only(
        scan(tmp_path, {0: (k, k)}, config(1, quantization_config=PER_HEAD)), "wrong-shape"
    )
    assert "for 2 KV heads" in found.message
    assert "2 KV heads" in found.remedy


def test_per_head_scales_of_an_unknown_number_of_heads(tmp_path: Path) -> None:
    k = torch.full((3,), 0.5)
    report = scan(tmp_path, {0: (k, k / 2)}, {"quantization_config": PER_HEAD})
    assert report.problems == ()


# Pairs that count as absent, or are completed


def test_a_pair_that_is_not_positive(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, 0.04), 1: (0.0, 0.0), 2: (-0.5, None)})
    found = only(report, "not-positive")
    assert found.severity == "problem"
    assert found.layers == ("model.layers.1.self_attn", "model.layers.2.self_attn")
    assert "0.0 and 0.0" in found.message
    assert report.layers[1].k_source == "default"
    assert report.layers[1].k_scale == (1.0,)


def test_all_zero_names_the_broken_release(tmp_path: Path) -> None:
    quantization = {**COMPRESSED_TENSORS, "version": "0.12.2"}
    report = scan(
        tmp_path, {0: (0.0, 0.0), 1: (0.0, 0.0)}, config(quantization_config=quantization)
    )
    assert kinds(report) == [("problem", "all-zero")]
    assert "llm-compressor#1928, #2117" in report.findings[0].remedy
    newer = {**COMPRESSED_TENSORS, "version": "0.15.0"}
    report = scan(tmp_path, {0: (0.0, 0.0)}, config(1, quantization_config=newer))
    assert "llm-compressor#2853" in report.findings[0].remedy


def test_k_alone_and_v_alone(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, None), 1: (0.06, None)})
    assert kinds(report) == [("remark", "one-side")]
    assert report.findings[0].side == "v"
    assert report.layers[0].v_source == "duplicated"
    report = scan(tmp_path, {0: (None, 0.05), 1: (0.06, 0.05)})
    assert only(report, "one-side").side == "k"
    assert only(report, "one-side").layers == ("model.layers.0.self_attn",)


def test_the_engines_marker_counts_as_not_loaded(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, -1.0), 1: (0.06, 0.05)})
    assert report.problems == ()
    assert report.layers[0].v_source == "duplicated"


def test_one_scale_for_both(tmp_path: Path) -> None:
    tensors = {
        **attention_weights(2),
        **scales({0: (0.05, None), 1: (0.06, None)}, "model.layers.{i}.self_attn.{side}v_scale"),
    }
    quantization = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    report = scan_checkpoint(write(tmp_path, tensors, config(quantization_config=quantization)))
    assert report.findings == ()
    assert report.layers[0].k_source == "checkpoint"
    assert report.layers[0].v_source == "duplicated"


def test_the_scan_keeps_the_log_clean(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scan(tmp_path, {0: (0.0, 0.0), 1: (None, 0.05)})
    assert caplog.records == []
    kv.validate_kv_scales(0.0, 0.0, kv_cache_dtype="fp8")
    assert len(caplog.records) == 1


# The whole


def test_layers_without_scales_among_others(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, 0.04), 3: (0.05, 0.04)}, config(5))
    found = only(report, "missing-layers")
    assert found.severity == "problem"
    assert found.layers == tuple(f"model.layers.{i}.self_attn" for i in (1, 2, 4))


@pytest.mark.parametrize(
    "more",
    [
        {"layer_types": ["full_attention", "linear_attention", "full_attention"]},
        {"num_kv_shared_layers": 0, "layer_types": ["attention", "mamba", "attention"]},
        {"quantization_config": {**COMPRESSED_TENSORS, "ignore": ["re:.*layers.1.self_attn.*"]}},
        {"quantization_config": {**COMPRESSED_TENSORS, "ignore": ["model.layers.1.*"]}},
    ],
)
def test_layers_that_need_no_scales_are_not_missing(tmp_path: Path, more: Any) -> None:
    report = scan(tmp_path, {0: (0.05, 0.04), 2: (0.05, 0.04)}, config(3, **more))
    assert report.findings == ()


def test_layers_without_k_and_v_are_not_missing(tmp_path: Path) -> None:
    tensors = attention_weights(3)
    mamba = {name: value for name, value in tensors.items() if ".1." not in name}
    mamba["model.layers.1.mixer.in_proj.weight"] = 1.0
    tensors = {**mamba, **scales({0: (0.05, 0.04), 2: (0.05, 0.04)})}
    assert scan_checkpoint(write(tmp_path, tensors, config(3))).findings == ()


def test_draft_layers_are_not_missing(tmp_path: Path) -> None:
    tensors = {
        **attention_weights(3),
        **attention_weights(1, "mtp.layers"),
        **scales({0: (0.05, 0.04), 1: (0.05, 0.04)}),
    }
    settings = config(2, num_nextn_predict_layers=1)
    assert scan_checkpoint(write(tmp_path, tensors, settings)).findings == ()
    tensors |= scales({2: (0.05, 0.04)})
    report = scan_checkpoint(write(tmp_path, tensors, settings))
    assert [layer.is_draft for layer in report.layers] == [False, False, True]


def test_each_stack_is_complete_by_itself(tmp_path: Path) -> None:
    tensors = {
        **attention_weights(2, "encoder.layers"),
        **attention_weights(2, "decoder.layers"),
        **attention_weights(4, "vision.blocks"),
        **scales(SOUND, "encoder.layers.{i}.self_attn.{side}_scale"),
        **scales({1: (0.05, 0.04)}, "decoder.layers.{i}.self_attn.{side}_scale"),
    }
    found = only(scan_checkpoint(write(tmp_path, tensors, config())), "missing-layers")
    assert found.layers == ("decoder.layers.0.self_attn",)


def test_one_shard_of_many_is_not_blamed_for_the_others(tmp_path: Path) -> None:
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(encode_tensors({**attention_weights(1), **scales({0: (0.05, 0.04)})}))
    (tmp_path / "config.json").write_text(json.dumps(config(8)))
    assert scan_checkpoint(shard).findings == ()
    shard.write_bytes(encode_tensors(attention_weights(1)))
    assert scan_checkpoint(shard).findings == ()


def test_scales_alone_go_by_the_configuration(tmp_path: Path) -> None:
    folder = write(tmp_path, scales({0: (0.05, 0.04), 2: (0.05, 0.04)}), config(4))
    found = only(scan_checkpoint(folder / "model.safetensors"), "missing-layers")
    assert found.layers == ("model.layers.1.self_attn", "model.layers.3.self_attn")


def test_scales_of_layers_that_are_not_there(tmp_path: Path) -> None:
    tensors = {**attention_weights(2), **scales({**SOUND, 7: (0.05, 0.04)})}
    found = only(scan_checkpoint(write(tmp_path, tensors, config())), "no-such-layer")
    assert found.severity == "problem"
    assert found.layers == ("model.layers.7.self_attn",)


def test_all_one(tmp_path: Path) -> None:
    ones = {0: (1.0, 1.0), 1: (1.0, 1.0)}
    assert kinds(scan(tmp_path, ones)) == [("problem", "all-one")]
    old = {**MODELOPT, "producer": {"name": "modelopt", "version": "0.33.1"}}
    report = scan(tmp_path, ones, config(quantization_config=old))
    assert kinds(report) == [("problem", "all-one")]
    assert "Model-Optimizer#20" in report.findings[0].remedy
    report = scan(tmp_path, ones, config(quantization_config=MODELOPT))
    assert kinds(report) == [("remark", "all-one")]
    assert scan(tmp_path, {0: (1.0, 1.0), 1: (1.0, 0.5)}).findings == ()


def test_declared_and_absent(tmp_path: Path) -> None:
    folder = write(tmp_path, attention_weights(2), config())
    report = scan_checkpoint(folder)
    assert kinds(report) == [("problem", "declared-absent")]
    assert "config.json: kv_cache_scheme declares" in report.findings[0].message
    assert report.layers == ()

    dynamic = {**COMPRESSED_TENSORS, "kv_cache_scheme": {**FP8_SCHEME, "dynamic": True}}
    report = scan_checkpoint(
        write(tmp_path, attention_weights(2), config(quantization_config=dynamic))
    )
    assert ("remark", "declared-absent") in kinds(report)

    report = scan_checkpoint(
        write(tmp_path, attention_weights(2), config(quantization_config=MODELOPT))
    )
    assert kinds(report) == [("remark", "declared-absent")]
    assert "cast modes" in report.findings[0].message


def test_nothing_declared_and_nothing_there_is_sound(tmp_path: Path) -> None:
    report = scan_checkpoint(
        write(tmp_path, attention_weights(2), config(quantization_config=None))
    )
    assert report.findings == ()
    assert report.layers == ()


def test_present_and_undeclared(tmp_path: Path) -> None:
    report = scan(tmp_path, SOUND, config(quantization_config={"quant_method": "fp8"}))
    assert kinds(report) == [("remark", "undeclared")]
    assert "--kv-cache-dtype fp8" in report.findings[0].remedy
    # Without a quantization_config neither engine has a place for them.
    report = scan(tmp_path, SOUND, config(quantization_config=None))
    assert kinds(report) == [("problem", "not-found"), ("remark", "undeclared")]
    assert "vLLM 0.32.0 fails to load" in report.findings[0].message
    assert "SGLang 0.5.23 drops it" in report.findings[0].message


def test_a_scheme_without_quant_method_is_told_what_it_lacks(tmp_path: Path) -> None:
    """It is declared already, so that to declare it would be no remedy."""
    scheme = {"num_bits": 8, "type": "float"}
    declared = {"quantization_config": {"kv_cache_scheme": scheme}}
    report = scan(tmp_path, SOUND, config(**declared))
    assert kinds(report) == [("problem", "not-found")]
    (finding,) = report.findings
    assert "has no quant_method" in finding.message
    assert "quant_method" in finding.remedy
    assert "kv_cache_scheme" not in finding.remedy
    # What the page gives to copy is found by both engines.
    page = (Path(__file__).parents[1] / "docs" / "check.md").read_text(encoding="utf-8")
    found: dict[str, Any] = {}
    exec(re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[0], found)
    report = scan(tmp_path, SOUND, config(quantization_config=found["quantization_config"]))
    assert report.findings == ()
    assert all(verdict.finds for scale in report.scales for verdict in scale.engines)


def test_declarations_that_differ(tmp_path: Path) -> None:
    legacy = {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None}}
    folder = write(
        tmp_path,
        {
            **attention_weights(2),
            **scales(SOUND, "model.layers.{i}.self_attn.{side}_proj.{side}_scale"),
        },
        config(quantization_config=MODELOPT),
        hf_quant_config=legacy,
    )
    assert scan_checkpoint(folder).findings == ()
    legacy["quantization"]["kv_cache_quant_algo"] = "NVFP4"
    (folder / "hf_quant_config.json").write_text(json.dumps(legacy))
    assert kinds(scan_checkpoint(folder)) == [("remark", "declarations-differ")]


def test_a_scheme_that_engines_do_not_serve(tmp_path: Path) -> None:
    k = torch.full((2, 1, 1), 0.5)
    report = scan(tmp_path, {0: (k, k / 2)}, config(1, quantization_config=PER_HEAD))
    assert kinds(report) == [("remark", "unserved-scheme")]
    assert "SGLang 0.5.23: it takes strategy tensor" in report.findings[0].message
    int8 = {**COMPRESSED_TENSORS, "kv_cache_scheme": {**FP8_SCHEME, "type": "int"}}
    report = scan(tmp_path, SOUND, config(quantization_config=int8))
    assert kinds(report) == [("problem", "unserved-scheme")]
    assert "int8" in report.findings[0].message


@pytest.mark.parametrize("method", [COMPRESSED_TENSORS, MODELOPT, {"quant_method": "fp8"}])
def test_e5m2_is_refused_by_vllm_for_a_checkpoint_with_a_place_for_scales(
    tmp_path: Path, method: Any
) -> None:
    folder = write(
        tmp_path, {**attention_weights(2), **scales(SOUND)}, config(quantization_config=method)
    )
    found = only(scan_checkpoint(folder, kv_cache_dtype="fp8_e5m2"), "asked-format")
    assert found.severity == "remark"
    assert "fp8_e5m2 is asked for" in found.message
    assert "vLLM 0.32.0 ends: fp8_e5m2 kv-cache is not supported" in found.message
    for same in ("fp8", "fp8_e4m3", "auto", None):
        report = scan_checkpoint(folder, kv_cache_dtype=same, device="gfx942")
        assert "asked-format" not in {finding.kind for finding in report.findings}


def test_e5m2_for_weights_alone_is_let_through(tmp_path: Path) -> None:
    weights = {"quant_method": "compressed-tensors"}
    folder = write(tmp_path, attention_weights(2), config(quantization_config=weights))
    assert scan_checkpoint(folder, kv_cache_dtype="fp8_e5m2").findings == ()


def test_a_format_that_is_not_the_declared_one(tmp_path: Path) -> None:
    folder = write(tmp_path, {**attention_weights(2), **scales(SOUND)}, config())
    found = only(scan_checkpoint(folder, kv_cache_dtype="nvfp4"), "asked-format")
    assert found.severity == "remark"
    assert "config.json: kv_cache_scheme declares" in found.message
    assert '"num_bits": 8' in found.message
    assert "nvfp4 is asked for" in found.message


def test_nvfp4_of_modelopt_is_told_as_the_engines_columns_have_it(tmp_path: Path) -> None:
    nvfp4 = {**MODELOPT, "quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}
    report = scan(tmp_path, SOUND, config(quantization_config=nvfp4))
    found = only(report, "unserved-scheme")
    assert all(verdict.finds for scale in report.scales for verdict in scale.engines)
    assert "SGLang 0.5.23: it loads the scales, and serves an unquantized" in found.message
    assert found.remedy.startswith("Serve it with vLLM, or export again")


def test_a_marker_is_told_from_what_is_not_stored(tmp_path: Path) -> None:
    found = only(scan(tmp_path, {0: (-1.0, float("inf"))}), "corrupt-scale")
    assert "k_scale=-1.0 (which engines take for unset) v_scale=inf" in found.message
    assert (found.side, found.value) == ("v", float("inf"))


@pytest.mark.parametrize(("number", "kind"), [(0.0, "all-zero"), (1.0, "all-one")])
def test_what_all_layers_have_is_told_of_each(tmp_path: Path, number: float, kind: str) -> None:
    report = scan(tmp_path, dict.fromkeys(range(3), (number, number)))
    assert only(report, kind).layers == tuple(layer.layer for layer in report.layers)


def test_zero_points(tmp_path: Path) -> None:
    zeros = scales({0: (0.0, 0.0)}, "model.layers.{i}.self_attn.{side}_zero_point")
    tensors = {**attention_weights(1), **scales({0: (0.05, 0.04)})}
    assert scan_checkpoint(write(tmp_path, {**tensors, **zeros}, config(1))).findings == ()
    zeros["model.layers.0.self_attn.v_zero_point"] = 3.0
    found = only(scan_checkpoint(write(tmp_path, {**tensors, **zeros}, config(1))), "zero-point")
    assert found.severity == "problem"
    assert found.value == 3.0
    assert found.layers == ("model.layers.0.self_attn",)


def test_an_affine_kv_cache(tmp_path: Path) -> None:
    tensors = {
        **attention_weights(1),
        **scales({0: (0.05, 0.04)}),
        **scales({0: (0.5, 0.5)}, "model.layers.{i}.self_attn.{side}_proj.{side}_bias"),
    }
    found = only(scan_checkpoint(write(tmp_path, tensors, config(1))), "affine")
    assert found.severity == "problem"


def test_an_outlier_among_its_neighbours(tmp_path: Path) -> None:
    pairs: dict[int, tuple[float, float]] = {i: (0.05 + i / 1000, 0.04) for i in range(12)}
    assert scan(tmp_path, pairs).findings == ()
    pairs[6] = (1.5, 0.04)
    found = only(scan(tmp_path, pairs), "outlier")
    assert (found.severity, found.side) == ("remark", "k")
    assert found.layers == ("model.layers.6.self_attn",)
    assert found.value == pytest.approx(1.5)
    pairs[6] = (0.05, 0.04 / 30)
    assert only(scan(tmp_path, pairs), "outlier").side == "v"
    # A slow change over many layers is none.
    slow = {i: (0.001 * 1.5**i, 0.04) for i in range(20)}
    assert scan(tmp_path, slow).findings == ()
    # Three layers tell nothing of a fourth.
    assert scan(tmp_path, {0: (0.05, 0.04), 1: (5.0, 0.04), 2: (0.05, 0.04)}).findings == ()


def test_k_and_v_always_equal(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (0.05, 0.05), 1: (0.06, 0.06)})
    assert kinds(report) == [("remark", "k-equals-v")]
    assert scan(tmp_path, {0: (0.05, 0.05), 1: (0.06, 0.05)}).findings == ()
    assert scan(tmp_path, {0: (0.05, 0.05)}).findings == ()
    assert scan(tmp_path, {0: (0.05, 0.05), 1: (0.06, 0.06)}, config(kv_lora_rank=512)).problems


def test_values_that_look_like_reciprocals(tmp_path: Path) -> None:
    report = scan(tmp_path, {0: (9.0, 90.0), 1: (12.0, 120.0)})
    assert kinds(report) == [("remark", "reciprocal")] * 2
    assert "as a reciprocal, 42.67" in report.findings[0].message
    assert scan(tmp_path, {0: (1.2, 0.02), 1: (3.0, 0.03)}).findings == ()


# Names


@pytest.mark.parametrize(
    ("name", "engines", "severity"),
    [
        ("model.layers.{i}.self_attn.qkv_proj.{side}_scale", "SGLang", "remark"),
        ("model.layers.{i}.self_attn.attn.{side}_scale", "SGLang", "remark"),
        ("model.layers.{i}.self_attn.{side}_cache.scale", "SGLang", "remark"),
        ("model.layers.{i}.self_attn.{side}_proj.output_scale", "vLLM", "remark"),
        ("model.layers.{i}.self_attn.attn_mqa.{side}_scale", "vLLM and SGLang", "problem"),
    ],
)
def test_a_name_that_an_engine_loses(
    tmp_path: Path, name: str, engines: str, severity: str
) -> None:
    tensors = {**attention_weights(2), **scales(SOUND, name)}
    report = scan_checkpoint(write(tmp_path, tensors, config()))
    assert kinds(report) == [(severity, "not-found")]
    found = report.findings[0]
    for engine in engines.split(" and "):
        assert engine in found.message
    assert found.layers == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    assert found.remedy == "Rename the scales to model.layers.0.self_attn.k_scale and .v_scale"


def test_reciprocals_by_name_and_producer(tmp_path: Path) -> None:
    name = "model.layers.{i}.self_attn.{side}_global_scale"
    tensors = {**attention_weights(2), **scales({0: (20.0, 50.0), 1: (25.0, 40.0)}, name)}
    report = scan_checkpoint(write(tmp_path, tensors, config()))
    assert ("remark", "reciprocal") in kinds(report)
    assert report.layers[0].k_scale == (1 / 20,)
    assert report.layers[0].stored_k is not None
    assert report.layers[0].stored_k.values == (20.0,)
    assert report.layers[0].stored_k.meaning == "reciprocal"

    auto_round = {**COMPRESSED_TENSORS, "provider": "auto-round"}
    small = {**attention_weights(2), **scales({0: (0.05, 0.02), 1: (0.04, 0.03)}, name)}
    report = scan_checkpoint(write(tmp_path, small, config(quantization_config=auto_round)))
    assert ("remark", "reciprocal") not in kinds(report)
    assert report.layers[0].k_scale == pytest.approx((0.05,))

    unnamed = {"quant_method": "fp8", "kv_cache_scheme": "static"}
    report = scan_checkpoint(write(tmp_path, small, config(quantization_config=unnamed)))
    assert "does not say who wrote it" in only(report, "convention").message
    assert report.layers[0].k_scale == pytest.approx((0.05,))


def test_the_assumed_meaning_of_an_nvfp4_scale_is_said(tmp_path: Path) -> None:
    nvfp4 = {**MODELOPT, "quant_algo": "NVFP4", "kv_cache_scheme": "NVFP4"}
    report = scan(tmp_path, SOUND, config(quantization_config=nvfp4))
    assert report.kv_cache_dtype == "nvfp4"
    assert (
        "those of modelopt 0.43.0 were checked as they stand" in only(report, "convention").message
    )


def test_strange_names_are_listed(tmp_path: Path) -> None:
    tensors = {**attention_weights(1), "model.layers.0.self_attn.key_scale": 0.05}
    report = scan_checkpoint(write(tmp_path, tensors, config(1, quantization_config=None)))
    assert report.unknown == ("model.layers.0.self_attn.key_scale",)
    assert kinds(report) == [("remark", "unknown-name")]
    assert "model.layers.0.self_attn.key_scale" in report.findings[0].message


def test_one_scale_under_two_names(tmp_path: Path) -> None:
    pairs = {0: (0.05, 0.04), 1: (0.06, 0.03)}
    modelopt = "model.layers.{i}.self_attn.{side}_proj.{side}_scale"
    tensors = {**attention_weights(2), **scales(pairs), **scales(pairs, modelopt)}
    report = scan_checkpoint(write(tmp_path, tensors, config()))
    assert kinds(report) == [("remark", "two-names")] * 4
    tensors["model.layers.1.self_attn.v_proj.v_scale"] = 0.5
    report = scan_checkpoint(write(tmp_path, tensors, config()))
    assert [finding.side for finding in report.problems] == ["v"]
    assert report.problems[0].layers == ("model.layers.1.self_attn",)


def test_names_of_latent_attention(tmp_path: Path) -> None:
    weights = {f"model.layers.{i}.self_attn.kv_b_proj.weight": 1.0 for i in range(2)}
    name = "model.layers.{i}.self_attn.{side}_proj.{side}_scale"
    tensors = {**weights, **scales({0: (0.05, 0.05), 1: (0.06, 0.06)}, name)}
    settings = config(kv_lora_rank=512, quantization_config=MODELOPT)
    report = scan_checkpoint(write(tmp_path, tensors, settings))
    assert kinds(report) == [("remark", "not-found")]
    assert "vLLM 0.32.0 drops it: in MLA models it renames twice" in report.findings[0].message


# Files


def test_shards_and_their_index(tmp_path: Path) -> None:
    pair = scales(SOUND)
    first = {**attention_weights(2), "model.layers.0.self_attn.k_scale": 0.05}
    second = {name: value for name, value in pair.items() if name not in first}
    seen: list[tuple[int, int]] = []
    report = scan_checkpoint(
        write_shards(
            tmp_path,
            {"model-00001-of-00002.safetensors": first, "model-00002-of-00002.safetensors": second},
            config(),
        ),
        progress=lambda done, of: seen.append((done, of)),
    )
    assert report.findings == ()
    assert len(report.files) == 2
    assert seen == [(1, 2), (2, 2)]


def test_files_without_an_index(tmp_path: Path) -> None:
    write(tmp_path, attention_weights(2), config())
    (tmp_path / "scales.safetensors").write_bytes(encode_tensors(scales(SOUND)))
    report = scan_checkpoint(tmp_path)
    assert report.files == ("model.safetensors", "scales.safetensors")
    assert report.findings == ()


def test_what_the_index_leaves_out(tmp_path: Path) -> None:
    weights = attention_weights(2)
    shards = {"model-00001-of-00001.safetensors": {**weights, **scales(SOUND)}}
    placed = dict.fromkeys(weights, "model-00001-of-00001.safetensors")
    report = scan_checkpoint(write_shards(tmp_path, shards, config(), placed))
    assert kinds(report) == [("remark", "not-in-index")]

    shards = {"model-00001-of-00001.safetensors": weights}
    promised = {**placed, **dict.fromkeys(scales(SOUND), "model-00001-of-00001.safetensors")}
    report = scan_checkpoint(write_shards(tmp_path, shards, config(), promised))
    assert only(report, "missing-tensor").severity == "problem"
    assert "4 scales that no file holds" in only(report, "missing-tensor").message

    (tmp_path / "kv_scales.safetensors").write_bytes(encode_tensors(scales(SOUND)))
    report = scan_checkpoint(write_shards(tmp_path, shards, config(), placed))
    assert only(report, "skipped-file").severity == "problem"
    assert "kv_scales.safetensors" in only(report, "skipped-file").message


def test_mistrals_own_format(tmp_path: Path) -> None:
    weights = {f"layers.{i}.attention.w{side}.weight": 1.0 for i in range(2) for side in "qkvo"}
    name = "layers.{i}.attention.{side}_fake_quantizer.qscale_act"
    tensors = {**weights, **scales(SOUND, name)}
    (tmp_path / "consolidated.safetensors").write_bytes(encode_tensors(tensors))
    (tmp_path / "params.json").write_text(json.dumps({"n_layers": 2, "n_kv_heads": 8}))
    report = scan_checkpoint(tmp_path)
    assert report.files == ("consolidated.safetensors",)
    assert report.shape.num_layers == 2
    assert [layer.layer for layer in report.layers] == ["layers.0.attention", "layers.1.attention"]
    # Beside Hugging Face's format it is another copy.
    write(tmp_path, {**attention_weights(2), **scales(SOUND)}, config())
    report = scan_checkpoint(tmp_path)
    assert report.files == ("model.safetensors",)
    assert report.findings == ()


@pytest.mark.parametrize("name", ["str", "Path", "file"])
def test_a_path_can_be_given_in_each_way(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {**attention_weights(2), **scales(SOUND)}, config())
    path = {"str": str(folder), "Path": folder, "file": folder / "model.safetensors"}[name]
    report = scan_checkpoint(path)
    assert report.findings == ()
    assert report.path == str(path)


def test_a_relative_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, {**attention_weights(2), **scales(SOUND)}, config())
    monkeypatch.chdir(tmp_path)
    assert scan_checkpoint(".").findings == ()
    assert scan_checkpoint("model.safetensors").findings == ()


def cache_model(cache: Path, commit: str = "0123abc", **references: str) -> Path:
    """A model as ``huggingface_hub`` keeps it: names are links into ``blobs``."""
    repository = cache / "models--org--model"
    made = write(repository / "blobs", {**attention_weights(2), **scales(SOUND)}, config())
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    for file in sorted(made.iterdir()):
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    for name, target in {"main": commit, **references}.items():
        reference = repository / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        reference.write_text(target)
    return snapshot


@pytest.mark.parametrize(
    ("variable", "inner"),
    [
        ("HF_HUB_CACHE", ""),
        ("HUGGINGFACE_HUB_CACHE", ""),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_a_name_in_the_local_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, inner: str
) -> None:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, str(tmp_path))
    snapshot = cache_model(tmp_path / inner, **{"refs/pr/1": "0123abc"})
    assert scan_checkpoint("org/model").findings == ()
    assert scan_checkpoint("org/model", revision="0123abc").findings == ()
    assert scan_checkpoint("org/model", revision="refs/pr/1").findings == ()
    assert scan_checkpoint(snapshot).findings == ()
    assert scan_checkpoint(snapshot / "model.safetensors").layers
    with pytest.raises(CheckpointError, match=r"no revision v2 of it, it has 0123abc; nothing is"):
        scan_checkpoint("org/model", revision="v2")


def test_a_local_folder_comes_before_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    cache_model(tmp_path / "cache")
    write(tmp_path / "org" / "model", attention_weights(1), config(1, quantization_config=None))
    monkeypatch.chdir(tmp_path)
    assert scan_checkpoint("org/model").layers == ()


# Lightness


def test_reading_names_and_files_needs_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, kvcache_plugin.checkpoint.tensors, kvcache_plugin.checkpoint.coverage_rules, "
        "kvcache_plugin.checkpoint.value_rules, kvcache_plugin.checkpoint.files\n"
        "print({'torch', 'numpy'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
