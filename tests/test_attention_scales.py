"""The scales of the query and of the probabilities: the rules of K and V, each for itself."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch

from kvcache_plugin import KVScaleError
from kvcache_plugin.formats import FP8_E4M3, FP8_E4M3FNUZ
from kvcache_plugin.hosts.gate import LoadGate
from kvcache_plugin.hosts.loaded import LoadedScales
from kvcache_plugin.scales import ScaleSite, check_attention_scales

LAYER = "model.layers.3.self_attn.attn"
SITE = ScaleSite(FP8_E4M3, LAYER)
FNUZ = ScaleSite(FP8_E4M3FNUZ, LAYER)
HEADS = ScaleSite(FP8_E4M3, LAYER, "head", 2)
LARGEST = torch.finfo(torch.float32).max


@pytest.mark.parametrize("site", [SITE, FNUZ])
@pytest.mark.parametrize(
    ("q", "prob"),
    [(None, None), (0.05, None), (None, torch.tensor(0.05)), (torch.tensor([2.0]), 1.0)],
)
def test_sound_ones_pass_without_a_word(
    q: Any, prob: Any, site: ScaleSite, caplog: pytest.LogCaptureFixture
) -> None:
    check_attention_scales(q, prob, site)
    assert not caplog.records


@pytest.mark.parametrize(
    ("q", "prob", "says"),
    [
        (math.nan, None, "must be finite, got q_scale=nan prob_scale=unset (corrupt: q_scale)"),
        (0.05, -math.inf, "must be finite, got q_scale=0.05 prob_scale=-inf (corrupt: prob_scale)"),
        (math.inf, math.nan, "(corrupt: q_scale and prob_scale)"),
        (1e39, None, "fit in torch.float32, got q_scale=1e+39 (corrupt: q_scale)"),
        (None, 1e-42, "(corrupt: prob_scale, whose reciprocal is not finite in torch.float32)"),
        (
            torch.ones(2),
            None,
            "per-tensor scaling factor for fp8 attention, got q_scale shape=(2,)",
        ),
        ("1.0", None, "q_scale must be a number"),
    ],
)
def test_corrupt_ones_are_refused(q: Any, prob: Any, says: str) -> None:
    with pytest.raises(KVScaleError) as refused:
        check_attention_scales(q, prob, SITE)
    assert refused.value.layer == LAYER
    assert says in refused.value.problem
    assert "export q_scale and prob_scale again" in refused.value.remedy


@pytest.mark.parametrize(("q", "prob"), [(0.0, None), (None, -0.5), (0.05, 0.0)])
def test_one_that_is_not_positive_counts_as_absent(
    q: Any, prob: Any, caplog: pytest.LogCaptureFixture
) -> None:
    check_attention_scales(q, prob, SITE)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{LAYER}: fp8 attention scales that are not positive" in record.getMessage()


def test_fnuz_doubles_and_the_result_must_fit() -> None:
    check_attention_scales(LARGEST / 2, None, FNUZ)
    check_attention_scales(LARGEST, None, SITE)
    with pytest.raises(KVScaleError, match=r"fit in torch\.float32, got q_scale=6\.8"):
        check_attention_scales(LARGEST, None, FNUZ)


def test_per_head() -> None:
    check_attention_scales(torch.tensor([0.5, 0.25]), None, HEADS)
    with pytest.raises(KVScaleError, match="corrupt: q_scale of head 1"):
        check_attention_scales(torch.tensor([0.5, math.nan]), None, HEADS)
    with pytest.raises(KVScaleError, match=r"must be positive.*q_scale of head 0"):
        check_attention_scales(torch.tensor([0.0, 0.5]), None, HEADS)
    with pytest.raises(KVScaleError, match=r"for fp8 attention have shape \(2,\)"):
        check_attention_scales(torch.tensor(0.5), None, HEADS)


def loaded(number: int, k: float, q: float | None) -> tuple[torch.nn.Module, LoadedScales]:
    scale = None if q is None else torch.tensor(q)
    name = f"model.layers.{number}.attn"
    cpu = torch.device("cpu")
    return torch.nn.Module(), LoadedScales(name, k, 0.06, "fp8_e4m3", cpu, q=scale)


def test_the_gate_lists_them_with_those_of_k_and_v() -> None:
    layers = [loaded(0, 0.05, 0.1), loaded(1, math.nan, 0.1), loaded(2, 0.05, math.nan)]
    layers.append(loaded(3, math.inf, math.inf))
    with (
        pytest.raises(KVScaleError, match="in 3 of 4 layers") as refused,
        LoadGate("Engine", "strict").model(layers),
    ):
        pytest.fail("nothing may be processed")
    _, first, second, third = refused.value.problem.splitlines()
    assert "model.layers.1.attn" in first
    assert "q_scale" not in first
    assert "model.layers.2.attn: fp8 attention scales must be finite, got q_scale=nan" in second
    name = "[errors#scale-not-finite]"
    assert f"k_scale=inf v_scale=0.06 (corrupt: k_scale) {name}; fp8 attention" in third
    assert third.endswith(f"(corrupt: q_scale) {name}")
    assert "remove both scales of the layer" in refused.value.remedy
    assert "export q_scale and prob_scale again" in refused.value.remedy


def test_a_corrupt_one_leaves_the_layer_to_the_engine_where_that_is_wanted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    module, found = loaded(0, 0.05, math.nan)
    gate = LoadGate("Engine", "warn")
    with gate.model([(module, found)]):
        assert gate.layer(module, found) is None
    assert "q_scale=nan" in caplog.text
