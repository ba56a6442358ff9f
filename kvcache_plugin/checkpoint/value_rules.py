"""Rules about the values of a checkpoint's scales.

What is a rule of thumb gives a remark. Versions in the remedies are those of public reports, named
``project#number``.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Final

from kvcache_plugin.checkpoint.conventions import COMPRESSED_TENSORS, MODELOPT
from kvcache_plugin.checkpoint.evidence import CALIBRATE_MODELOPT, names, stacks
from kvcache_plugin.checkpoint.report import Finding
from kvcache_plugin.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvcache_plugin.checkpoint.evidence import Evidence
    from kvcache_plugin.checkpoint.report import LayerScales

#: A layer is compared with so many on each side, if there are as many in all.
_NEIGHBOURS: Final = 4
_OUTLIER: Final = 20.0
#: A multiplier of 8 says that K or V reach 8 · 448 = 3584 in the median layer, which they do not;
#: a reciprocal of 8 says that they reach 56, which is ordinary.
_SUSPICIOUS: Final = 8.0
_LARGEST_CODE: Final = 448.0
_FLOAT32_MAX: Final = 3.4028234663852886e38


def refused(evidence: Evidence) -> Iterator[Finding]:
    for layer in evidence.layers:
        if layer.refusal:
            side, value = _culprit(layer)
            yield Finding(
                layer.refused_as,
                "problem",
                layer.refusal,
                _remedy_of_refusal(layer, evidence),
                (layer.layer,),
                side,
                value,
            )


def all_zero(evidence: Evidence) -> Iterator[Finding]:
    if evidence.all_are(0.0):
        yield Finding(
            "all-zero",
            "problem",
            "every K and V scale is 0, so they count as absent and 1.0 is used",
            _remedy_of_zeros(evidence),
            names(evidence.layers),
            value=0.0,
        )


def not_positive(evidence: Evidence) -> Iterator[Finding]:
    layers = [layer for layer in evidence.layers if layer.stored and layer.k_source == "default"]
    if layers and not evidence.all_are(0.0):
        values = " and ".join(
            repr(scale.values[0]) if scale is not None else "unset"
            for scale in (layers[0].stored_k, layers[0].stored_v)
        )
        yield Finding(
            "not-positive",
            "problem",
            f"K and V scale are {values}: a pair that is not positive counts as absent and 1.0 is "
            "used",
            _remedy_of_zeros(evidence),
            names(layers),
            value=layers[0].stored[0].values[0],
        )


def all_one(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.all_are(1.0):
        return
    if evidence.is_cast_on_purpose:
        yield Finding(
            "all-one",
            "remark",
            "every K and V scale is exactly 1.0, as ModelOpt's cast modes mean it",
            CALIBRATE_MODELOPT,
            names(evidence.layers),
            value=1.0,
        )
        return
    clamped = (
        "ModelOpt before 0.43 raises K/V scales below 1.0 to 1.0 (Model-Optimizer#20): export "
        "again with a newer one, hf_ptq.py --kv_cache_qformat fp8"
    )
    yield Finding(
        "all-one",
        "problem",
        "every K and V scale is exactly 1.0, which no calibration gives",
        clamped if evidence.declaration.producer.name == MODELOPT else evidence.calibrate,
        names(evidence.layers),
        value=1.0,
    )


def zero_points(evidence: Evidence) -> Iterator[Finding]:
    scales = [
        scale
        for scale in evidence.scales
        if scale.role == "zero point" and any(value != 0 for value in scale.values)
    ]
    if scales:
        value = next(value for value in scales[0].values if value != 0)
        yield Finding(
            "zero-point",
            "problem",
            f"zero points are not 0 ({shown(scales[0].name)} has {value!r}), and no engine applies "
            "them",
            "Export again with symmetric scales: kv_cache_scheme with symmetric true",
            tuple(dict.fromkeys(scale.module for scale in scales)),
            value=value,
        )


def affine(evidence: Evidence) -> Iterator[Finding]:
    modules = dict.fromkeys(scale.module for scale in evidence.scales if scale.role == "bias")
    if modules:
        yield Finding(
            "affine",
            "problem",
            "K or V is shifted by a bias before it is quantized, and no engine shifts it back",
            "Export again without: ModelOpt's --kv_cache_qformat fp8 or nvfp4",
            tuple(modules),
        )


def one_side(evidence: Evidence) -> Iterator[Finding]:
    if evidence.shape.is_mla:
        return
    for side, other in (("v", "k"), ("k", "v")):
        layers = [
            layer
            for layer in evidence.layers
            if _source(layer, side) == "duplicated"
            and all(scale.side != "kv" for scale in layer.stored)
        ]
        if layers:
            yield Finding(
                "one-side",
                "remark",
                f"there is no {side.upper()} scale, and {other.upper()}'s is used for both",
                "Check the export: one scale for both is named kv_scale",
                names(layers),
                side,
            )


def k_equals_v(evidence: Evidence) -> Iterator[Finding]:
    pairs = [
        (layer.stored_k.values, layer.stored_v.values)
        for layer in evidence.layers
        if layer.stored_k is not None and layer.stored_v is not None
    ]
    trivial = any(map(evidence.all_are, (0.0, 1.0, -1.0)))
    if trivial or evidence.shape.is_mla or len(pairs) < 2:
        return
    if all(k and k == v for k, v in pairs):
        yield Finding(
            "k-equals-v",
            "remark",
            "K and V have the same scale in every layer",
            "Check the export: calibration gives each side its own",
        )


def reciprocals(evidence: Evidence) -> Iterator[Finding]:
    known = [
        layer for layer in evidence.layers if any(s.meaning == "reciprocal" for s in layer.stored)
    ]
    if known:
        yield Finding(
            "reciprocal",
            "remark",
            "the stored numbers are 2688/amax, the reciprocal of what engines take, and were "
            "checked as 1/number",
            "Whoever renames them to k_scale and v_scale has to invert them",
            names(known),
        )
        return
    for side in ("k", "v"):
        values = [value for _, value in _multipliers(evidence.layers, side)]
        if values and (median := statistics.median(values)) > _SUSPICIOUS:
            reach, inverse = median * _LARGEST_CODE, _LARGEST_CODE / median
            yield Finding(
                "reciprocal",
                "remark",
                f"the median {side}_scale is {median:.4g}: as the multiplier that engines take it "
                f"to be, {side.upper()} reaches {reach:.4g}; as a reciprocal, {inverse:.4g}",
                "If the producer stores 448/amax, invert the scales: engines take amax/448",
                side=side,
                value=median,
            )


def conventions(evidence: Evidence) -> Iterator[Finding]:
    producer = evidence.declaration.producer
    if any(scale.meaning == "unknown" for scale in evidence.used):
        yield Finding(
            "convention",
            "remark",
            "k_global_scale is 2688/amax from llm-compressor and amax/2688 from auto-round, and "
            "the checkpoint does not say who wrote it; the numbers were checked as they stand",
            "Ask who wrote it",
        )
    elif evidence.kv_format == "nvfp4" and any(s.role == "scale" for s in evidence.used):
        yield Finding(
            "convention",
            "remark",
            "an NVFP4 K/V scale is amax/448 from ModelOpt since January 2026, amax/2688 from older "
            f"ones and others; those of {producer or 'an unnamed producer'} were checked as they "
            "stand",
        )


def outliers(evidence: Evidence) -> Iterator[Finding]:
    for stack in stacks(evidence.layers):
        for side in ("k", "v"):
            yield from _outliers(list(_multipliers(stack, side)), side)


RULES: Final[tuple[Callable[[Evidence], Iterable[Finding]], ...]] = (
    refused,
    all_zero,
    not_positive,
    all_one,
    zero_points,
    affine,
    conventions,
    reciprocals,
    one_side,
    k_equals_v,
    outliers,
)


def _outliers(values: list[tuple[LayerScales, float]], side: str) -> Iterator[Finding]:
    for i, (layer, value) in enumerate(values):
        near = values[max(0, i - _NEIGHBOURS) : i] + values[i + 1 : i + 1 + _NEIGHBOURS]
        if len(near) < _NEIGHBOURS:
            continue
        median = statistics.median(other for _, other in near)
        if not median / _OUTLIER <= value <= median * _OUTLIER:
            yield Finding(
                "outlier",
                "remark",
                f"{side}_scale is {value:.4g}, and its neighbours' median is {median:.4g}",
                "Some models are so in their first and last layers; elsewhere calibrate with more "
                "data",
                (layer.layer,),
                side,
                value,
            )


def _multipliers(layers: Iterable[LayerScales], side: str) -> Iterator[tuple[LayerScales, float]]:
    """The served scale of each layer that has one of its own, of scales by head the largest."""
    for layer in layers:
        if _source(layer, side) == "checkpoint":
            yield layer, max(layer.k_scale if side == "k" else layer.v_scale)


def _source(layer: LayerScales, side: str) -> str:
    return layer.k_source if side == "k" else layer.v_source


def _culprit(layer: LayerScales) -> tuple[str, float | None]:
    """The side and the value that a refusal is about, where it is one side alone."""
    bad = [
        (side, value)
        for side, scale in (("k", layer.stored_k), ("v", layer.stored_v))
        if scale is not None and not scale.is_marker
        for value in scale.values
        if not 1 / _FLOAT32_MAX <= value <= _FLOAT32_MAX
    ]
    return bad[0] if len({side for side, _ in bad}) == 1 else ("", None)


def _remedy_of_refusal(layer: LayerScales, evidence: Evidence) -> str:
    if layer.refused_as == "wrong-dtype":
        return "Store the scales as float32"
    if layer.refused_as != "wrong-shape":
        return evidence.calibrate
    scheme, heads = evidence.declaration.scheme, evidence.shape.kv_heads
    if scheme is not None and scheme.per_head:
        known = " or ".join(map(str, heads)) or "each"
        return f"Export one scale for each layer, or one for each of {known} KV heads"
    if any(scale.shape[:1] == (head,) for scale in layer.stored for head in heads):
        return (
            "One scale for each KV head has to be declared, as strategy attn_head in "
            "kv_cache_scheme, and vLLM alone serves it; else export one scale for each layer"
        )
    return "Export one scale for each layer"


def _remedy_of_zeros(evidence: Evidence) -> str:
    producer = evidence.declaration.producer
    if producer.name != COMPRESSED_TENSORS:
        return evidence.calibrate
    if producer.version.startswith("0.12."):
        return (
            f"compressed-tensors {producer.version} with llm-compressor 0.8 writes zeros "
            "(llm-compressor#1928, #2117): export again with newer releases of both"
        )
    return (
        f"{evidence.calibrate}. It writes 0 for attention that reads the cache without calling its "
        "update() (llm-compressor#2853)"
    )
