"""SGLang serves an NVFP4 cache on a CPU, on a backend that it refuses by itself."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from kvcache_plugin import dequantize_kv, quantize_kv
from tests.engine.serving import run_python
from tests.engine.trained import PERIOD, Trained, sequences, train

if TYPE_CHECKING:
    from collections.abc import Sequence

pytestmark = pytest.mark.engine

_HERE = Path(__file__).resolve().parent
LENGTH = 36
NUM_TOKENS = 24  # as in serve_sglang_nvfp4.py
ROOM = 160
"""Tokens that the cache has place for: less than the prompts come to in the end."""


@dataclass(frozen=True)
class Served:
    """What came of one engine: its log, what it printed, and what the recorder wrote."""

    returncode: int
    log: str
    found: dict[str, Any]
    written: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def model() -> Trained:
    return train()


@pytest.fixture(scope="module")
def scales(model: Trained) -> list[tuple[float, float]]:
    """Calibrated: the largest magnitude over the largest code and block scale."""
    largest = model.largest(sequences(32, LENGTH, torch.Generator().manual_seed(2)))
    return [(k / (6 * 448), v / (6 * 448)) for k, v in largest]


@pytest.fixture(scope="module")
def texts() -> torch.Tensor:
    return sequences(24, LENGTH, torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def stored(scales: list[tuple[float, float]]) -> Any:
    """What becomes of K and V in an NVFP4 cache, by the reference."""

    def round_trip(layer: int, side: str, x: torch.Tensor) -> torch.Tensor:
        scale = scales[layer]["kv".index(side)]
        return dequantize_kv(quantize_kv(x, scale, "nvfp4"), dtype=torch.float32)

    return round_trip


@pytest.fixture(scope="module")
def prompts(model: Trained, stored: Any) -> list[list[int]]:
    """Beginnings that the model goes on with in no doubt, whatever it is batched with."""
    begun = sequences(64, 2 * PERIOD + 2, torch.Generator().manual_seed(4))
    tokens, least = begun, torch.full((len(begun),), float("inf"))
    for _ in range(NUM_TOKENS):
        best = model.logits(tokens, stored)[:, -1].topk(2)
        least = torch.minimum(least, best.values[:, 0] - best.values[:, 1])
        tokens = torch.cat([tokens, best.indices[:, :1]], 1)
    surest = least.topk(8)
    assert surest.values.min() > 0.5
    chosen: list[list[int]] = begun[surest.indices].tolist()
    return chosen


def serve(
    folder: Path,
    model: Trained,
    scales: list[tuple[float, float]],
    *,
    site: Sequence[Path],
    kv_cache_dtype: str,
    texts: torch.Tensor,
    prompts: list[list[int]],
) -> Served:
    folder.mkdir()
    asked = {
        "checkpoint": str(model.write(folder / "checkpoint", scales)),
        "kv_cache_dtype": kv_cache_dtype,
        "max_total_tokens": ROOM,
        "texts": texts.tolist(),
        "prompts": prompts,
    }
    (folder / "asked.json").write_text(json.dumps(asked))
    record = folder / "pool.safetensors"
    arguments = [str(_HERE / "serve_sglang_nvfp4.py"), str(folder / "asked.json")]
    env = {"RECORD_POOL": str(record)}
    returncode, log = run_python("sglang", arguments, site=site, env=env)
    found = re.search(r"^RESULT (.*)$", log, re.MULTILINE)
    return Served(
        returncode,
        log,
        json.loads(found[1]) if found else {},
        load_file(record) if record.exists() else {},
    )


@pytest.fixture(scope="module")
def nvfp4(
    tmp_path_factory: pytest.TempPathFactory,
    model: Trained,
    scales: list[tuple[float, float]],
    plugin_site: Path,
    recorder_site: Path,
    texts: torch.Tensor,
    prompts: list[list[int]],
) -> Served:
    return serve(
        tmp_path_factory.mktemp("served") / "nvfp4",
        model,
        scales,
        site=[plugin_site, recorder_site],
        kv_cache_dtype="nvfp4",
        texts=texts,
        prompts=prompts,
    )


def test_the_engine_by_itself_refuses(
    tmp_path: Path, model: Trained, scales: list[tuple[float, float]], texts: torch.Tensor
) -> None:
    alone = serve(
        tmp_path / "alone", model, scales, site=[], kv_cache_dtype="nvfp4", texts=texts, prompts=[]
    )
    assert alone.returncode != 0
    assert "backend 'torch_native' provides neither" in alone.log


def test_it_serves_and_says_so(nvfp4: Served, scales: list[tuple[float, float]]) -> None:
    assert nvfp4.returncode == 0, nvfp4.log
    lines = [
        x for x in nvfp4.log.splitlines() if "kvcache_plugin" in x and "site-packages" not in x
    ]
    (serves,) = [line for line in lines if "serves --kv-cache-dtype=nvfp4 on torch_native" in line]
    assert "INFO" in serves
    assert "cpu_fast quantizes what is written" in serves
    assert "nvfp4 on cpu, cpu_fast): 2 from the checkpoint" in nvfp4.log
    assert [line for line in lines if "WARNING" in line or "ERROR" in line] == []


def test_the_cache_holds_the_references_codes_and_block_scales(
    nvfp4: Served, scales: list[tuple[float, float]]
) -> None:
    """Of all K and V that attention got, with the scales of the checkpoint."""
    for layer, pair in enumerate(scales):
        for side, scale in zip("kv", pair, strict=True):
            name = f"{layer}.{side}"
            came = nvfp4.written[name]
            assert came.dtype == torch.bfloat16
            assert len(came) > ROOM / 2
            expected = quantize_kv(came, torch.tensor([scale]), "nvfp4")
            assert expected.block_scales is not None
            packed = torch.cat([expected.data, expected.block_scales.view(torch.uint8)], -1)
            assert torch.equal(nvfp4.written[f"{name}_bytes"], packed)
            assert torch.equal(nvfp4.written[f"{name}_read"], dequantize_kv(expected).float())


def test_a_prefix_in_the_cache_changes_no_token(nvfp4: Served, prompts: list[list[int]]) -> None:
    half = NUM_TOKENS // 2
    assert nvfp4.found["cached"]["from_cache"] >= len(prompts[0]) + half - 1
    assert nvfp4.found["cached"]["tokens"] == nvfp4.found["alone"][0][half:]


def test_retraction_changes_no_token(nvfp4: Served, prompts: list[list[int]]) -> None:
    assert len(prompts) * (len(prompts[0]) + NUM_TOKENS) > ROOM
    assert "KV cache pool is full. Retract requests" in nvfp4.log
    assert nvfp4.found["together"] == nvfp4.found["alone"]


def test_tokens_stay_as_close_as_the_references_own_error_allows(
    tmp_path: Path,
    model: Trained,
    scales: list[tuple[float, float]],
    plugin_site: Path,
    texts: torch.Tensor,
    stored: Any,
    nvfp4: Served,
    capsys: pytest.CaptureFixture[str],
) -> None:
    bf16 = serve(
        tmp_path / "bf16",
        model,
        scales,
        site=[plugin_site],
        kv_cache_dtype="bf16",
        texts=texts,
        prompts=[],
    )
    in_engine = _difference(
        *(
            [torch.tensor([x[key] for x in served.found["judged"]]) for served in (bf16, nvfp4)]
            for key in ("likeliest", "logprobs")
        )
    )
    logits = [model.logits(texts)[:, :-1], model.logits(texts, stored)[:, :-1]]
    of_text = [x.log_softmax(-1).gather(-1, texts[:, 1:, None]).squeeze(-1) for x in logits]
    by_reference = _difference([x.argmax(-1) for x in logits], of_text)
    with capsys.disabled():
        print(
            f"\nNVFP4 beside bfloat16, {texts[:, 1:].numel()} tokens: in SGLang "
            f"{in_engine[0]:.1%} of the greedy tokens are equal, and log probabilities differ by "
            f"{in_engine[1]:.3f} on average; by the reference {by_reference[0]:.1%} and "
            f"{by_reference[1]:.3f}"
        )
    assert in_engine[0] > by_reference[0] - 0.02
    assert in_engine[1] < 1.2 * by_reference[1] + 0.01
    assert by_reference[0] > 0.9


def _difference(
    tokens: Sequence[torch.Tensor], logprobs: Sequence[torch.Tensor]
) -> tuple[float, float]:
    """The fraction of equal tokens, and the mean difference of the log probabilities."""
    equal = (tokens[0] == tokens[1]).float().mean()
    return float(equal), float((logprobs[0] - logprobs[1]).abs().mean())
