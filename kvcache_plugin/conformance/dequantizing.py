"""What ``dequantize_kv`` must do. No tolerance is allowed here: the map of codes is exact."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.conformance import answers, guards
from kvcache_plugin.conformance.check import check, is_nvfp4, per_head
from kvcache_plugin.quantized import QuantizedKV

if TYPE_CHECKING:
    from kvcache_plugin.conformance.trial import Trial
    from kvcache_plugin.plugins import HookName

_DEQUANTIZE: Final[HookName] = "dequantize_kv"
_EXTREME_SCALES: Final = (2.0**-149, 1e-41, 2.0**-126, 1e-30, 1e30, 1e38)


@check(_DEQUANTIZE, dtypes=(torch.bfloat16,), needs_reference=False)
def dequantize_plain(trial: Trial) -> None:
    """16 tokens of 8 heads to bfloat16: all must take this."""
    quantized = trial.codes_of(trial.values(16, 8, 128))
    if quantized is not None:
        trial.dequantize(quantized, "16 tokens of 8 heads", may_pass=False)


@check(_DEQUANTIZE)
def dequantize_known(trial: Trial) -> None:
    """Known answers."""
    quantized, values = answers.values(trial.kv_format)
    expected = values.to(trial.dtype)
    trial.dequantize(trial.on_device(quantized), "known answers", expected=expected)


@check(_DEQUANTIZE)
def dequantize_every_code(trial: Trial) -> None:
    """Each code, in NVFP4 beside each block scale."""
    for scale in (1.0, 0.1):
        trial.dequantize(_every_code(trial, scale), "every code")


@check(_DEQUANTIZE, only_exact=True)
def dequantize_extreme_scales(trial: Trial) -> None:
    """Scales up to nearly the largest float32 and down to the smallest subnormal one."""
    for scale in _EXTREME_SCALES:
        trial.dequantize(_every_code(trial, scale), "every code")


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_shapes(trial: Trial) -> None:
    """From one to five dimensions, any head_dim that the format takes, and nothing at all."""
    shapes = [(128,), (3, 128), (2, 3, 128), (2, 1, 3, 128), (2, 2, 1, 2, 128), (257, 16)]
    shapes += [(3, 2, head_dim) for head_dim in (16, 64, 80, 256)]
    shapes += [(0, 8, 128), (0,), (2, 0, 64), (2, 3, 0)]
    if trial.kv_format.head_dim_multiple == 1:
        shapes += [(3, 2, head_dim) for head_dim in (1, 7, 100)]
    for shape in shapes:
        quantized = trial.codes_of(trial.values(*shape))
        if quantized is not None:
            trial.dequantize(quantized, f"shape {tuple(quantized.data.shape)}")


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_strides(trial: Trial) -> None:
    """Codes with any strides, as they lie in a cache."""
    quantized = trial.codes_of(trial.values(2, 3, 2, 2, 128))
    if quantized is None:
        return
    *lead, length = quantized.data.shape
    shape = (*lead, length * trial.kv_format.values_per_element)
    for layout in trial.layouts():
        for offset in (0,) if layout.is_mixed else (0, 1):
            data, block_scales = trial.buffers(shape, layout, offset=offset).out
            data.copy_(quantized.data)
            if block_scales is not None and quantized.block_scales is not None:
                block_scales.copy_(quantized.block_scales)
            what = f"codes in a cache: {layout}{', not aligned' * offset}"
            trial.dequantize(replace(quantized, data=data, block_scales=block_scales), what)


@check(_DEQUANTIZE, takes=per_head)
def dequantize_scale_per_head(trial: Trial) -> None:
    """One scale for each head, which goes along the last dimension but one."""
    for shape in ((6, 4, 128), (4, 128), (2, 3, 4, 64), (0, 4, 64), (4, 4, 4)):
        quantized = trial.codes_of(trial.values(*shape))
        if quantized is not None:
            spread = trial.scale(0.005, 9.0, 3.0, 9.0, 0.02, 9.0, 0.4, 9.0)[::2]
            for what, scale in (("", spread.contiguous()), (", every second", spread)):
                what = f"a scale per head{what}, shape {shape}"
                trial.dequantize(replace(quantized, scale=scale), what)


@check(_DEQUANTIZE)
def dequantize_scale_tensor(trial: Trial) -> None:
    """The scale is read anew in each call, and where it lies in its memory."""
    quantized = trial.codes_of(trial.values(6, 4, 128))
    if quantized is None:
        return
    many = [[0.005, 3.0, 0.02, 0.4]] if per_head(trial.kv_format) else []
    for values in ([0.03], *many):
        quantized = replace(quantized, scale=trial.scale_inside(*values))
        trial.dequantize(quantized, "a scale inside a tensor")
        quantized.scale.mul_(3)
        trial.dequantize(quantized, "the same scale, changed in place")


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_new_results(trial: Trial) -> None:
    """Each call gives new memory: earlier values stay as they are."""
    earlier, later = (trial.codes_of(trial.values(8, 4, 128, seed=seed)) for seed in (0, 5))
    if earlier is None or later is None:
        return
    values = trial.dequantize(earlier, "the earlier codes")
    if values is not None:
        with guards.unchanged(trial, "an earlier result", values=values):
            trial.dequantize(later, "the later codes")


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_given_unchanged(trial: Trial) -> None:
    """Codes and scales stay as they are, and what is given back shares no memory with them."""
    quantized = trial.codes_of(trial.values(8, 4, 128))
    if quantized is None:
        return
    data, block_scales, scale = quantized.data, quantized.block_scales, quantized.scale
    with guards.unchanged(trial, "codes", data=data, block_scales=block_scales, scale=scale):
        values = trial.dequantize(quantized, "codes")
        if values is not None:
            values.zero_()


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_any_default_dtype(trial: Trial) -> None:
    """torch's default dtype, which engines change, makes no difference."""
    quantized = trial.codes_of(trial.values(8, 4, 128))
    if quantized is None:
        return
    expected = trial.dequantize(quantized, "float32 by default")
    for dtype in (torch.bfloat16, torch.float64):
        with guards.default_dtype(dtype):
            trial.dequantize(quantized, f"{dtype} by default", expected=expected)


@check(_DEQUANTIZE, needs_reference=False)
def dequantize_no_host_sync(trial: Trial) -> None:
    """No value of a tensor is read on the host, and nothing is copied from there."""
    quantized = trial.codes_of(trial.values(8, 4, 128))
    # Once before: a first call may compile and load what it launches.
    if quantized is not None and trial.dequantize(quantized, "codes") is not None:
        with guards.no_host_sync(trial, "codes"):
            trial.candidate.dequantize(quantized, trial.dtype)


@check("quantize_kv", _DEQUANTIZE)
def round_trip(trial: Trial) -> None:
    """What it quantizes it dequantizes, to what its codes mean."""
    x = trial.values(8, 4, 128)
    quantized = trial.quantize(x, trial.scale_for(x), "values")
    if quantized is not None:
        trial.dequantize(quantized, "its own codes")


def _every_code(trial: Trial, scale: float) -> QuantizedKV:
    """The 256 bytes; in NVFP4 a row for each block scale, with each code in both nibbles."""
    every_byte = torch.arange(256, dtype=torch.uint8, device="cpu")
    if not is_nvfp4(trial.kv_format):
        data, block_scales = every_byte.view(trial.kv_format.torch_dtype).view(1, 2, 128), None
    else:
        row, place = every_byte.int().unsqueeze(1), torch.arange(64, device="cpu")
        low, high = place % 16, (place + place // 16 + 4 * row) % 16
        data = (low | high << 4).to(torch.uint8)
        block_scales = every_byte.view(torch.float8_e4m3fn).unsqueeze(1).repeat(1, 8)
    quantized = QuantizedKV(data, block_scales, answers.floats([scale]), trial.kv_format.name)
    return trial.on_device(quantized)
