"""``kvcache-plugin demo``: a corrupt scale refused, and K in every format."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import TYPE_CHECKING

from kvcache_plugin import demo
from kvcache_plugin.commands.common import FINE, WRONG, output_aside, print_json
from kvcache_plugin.terminal import print_table

if TYPE_CHECKING:
    import argparse

    from kvcache_plugin.demo import Demo


def run(arguments: argparse.Namespace) -> int:
    with output_aside():
        result = demo.run()
    if arguments.json:
        print_json(_as_json(result))
    else:
        _print(result)
    return FINE if result.succeeded else WRONG


def _as_json(result: Demo) -> object:
    # NaN is what the demo is about, and JSON has none: it becomes null.
    layers = [
        {**asdict(layer), "k_scale": _finite(layer.k_scale), "v_scale": _finite(layer.v_scale)}
        for layer in result.layers
    ]
    return {**asdict(result), "layers": layers, "succeeded": result.succeeded}


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def _print(result: Demo) -> None:
    print("A checkpoint with one corrupt scale:\n")
    print_table(
        ("layer", "k_scale", "v_scale", ""),
        [
            (
                layer.layer,
                f"{layer.k_scale:.4g}",
                f"{layer.v_scale:.4g}",
                "refused" if layer.refusal else "sound",
            )
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
    print("Next: install this where vLLM or SGLang is installed, and run `kvcache-plugin doctor`.")
