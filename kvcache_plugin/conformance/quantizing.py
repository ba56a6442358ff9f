"""What ``quantize_kv`` must do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.conformance import answers, guards, inputs, tables
from kvcache_plugin.conformance.check import HALF_DTYPES, check, is_nvfp4, per_head

if TYPE_CHECKING:
    from kvcache_plugin.conformance.trial import Trial
    from kvcache_plugin.plugins import HookName

_QUANTIZE: Final[HookName] = "quantize_kv"
_FLOAT32_MAX: Final = torch.finfo(torch.float32).max
_SMALLEST: Final = 2.0**-149
#: Such that codes become subnormal or saturate, and the reciprocal overflows.
_EXTREME_SCALES: Final = (_SMALLEST, 1e-40, 2.0**-126, 1e-30, 1e30, 2.0**127, _FLOAT32_MAX)
#: Such that 448·g and 6·g overflow, and such that sf·g underflows.
_EXTREME_GLOBAL_SCALES: Final = (
    *(_SMALLEST, 3 * _SMALLEST, 1e-41, 1e-38, 1e-30, 1e30, 1e36, 1e38),
    _FLOAT32_MAX,
)
_FAR: Final = 2**31 + 16


@check(_QUANTIZE, dtypes=(torch.bfloat16,), needs_reference=False)
def plain(trial: Trial) -> None:
    """16 tokens of 8 heads, bfloat16 and packed, with a scale tensor: all must take this."""
    x = trial.values(16, 8, 128)
    trial.quantize(x, trial.scale_for(x), "16 tokens of 8 heads", may_pass=False)


# Known answers


@check(_QUANTIZE, close_calls=True)
def ties(trial: Trial) -> None:
    """Halfway between two codes the even one is taken, beside halfway the nearest."""
    _known(trial, tables.TIES)


@check(_QUANTIZE)
def subnormals(trial: Trial) -> None:
    """Values, codes and block scales that are subnormal are rounded like all others."""
    _known(trial, tables.SUBNORMALS)


@check(_QUANTIZE)
def zeros(trial: Trial) -> None:
    """0 and -0 keep their signs where the format has both."""
    _known(trial, tables.ZEROS)


@check(_QUANTIZE)
def saturation(trial: Trial) -> None:
    """Beyond the largest value there is the largest value."""
    _known(trial, tables.SATURATION)


@check(_QUANTIZE)
def infinity(trial: Trial) -> None:
    """An infinity becomes the largest value, and the block scale of its block the largest."""
    _known(trial, tables.INFINITY)


@check(_QUANTIZE)
def nan(trial: Trial) -> None:
    """NaN becomes a code of NaN, and in NVFP4 a zero with its sign."""
    _known(trial, tables.NAN)


@check(_QUANTIZE, takes=is_nvfp4)
def worked_block(trial: Trial) -> None:
    """A block that is worked out by hand."""
    _answer(trial, answers.worked_block(trial.kv_format))


def _known(trial: Trial, section: str) -> None:
    for answer in answers.answers(trial.kv_format, section, trial.dtype):
        _answer(trial, answer)


def _answer(trial: Trial, answer: answers.Answer) -> None:
    scale = trial.scale(answer.expected.scale.item())
    trial.quantize(trial.put(answer.x), scale, answer.what, expected=answer.expected)


# Codes


@check(_QUANTIZE, dtypes=HALF_DTYPES)
def every_pattern(trial: Trial) -> None:
    """Each of the 65,536 values of bfloat16 and float16."""
    x = inputs.every_pattern(trial.dtype)
    if trial.kv_format.block_size is None:
        for scale in (1.0, 0.0123):
            what = f"every {trial.dtype}"
            trial.quantize(trial.put(x.view(-1, 8, 128)), trial.scale(scale), what)
        return
    # Beside an infinity values are multiplied by 1; neighbours share a block scale that fits them
    # all; shuffled, most of a block is far below its largest.
    fifteen = torch.cat([x, x[:104]]).view(-1, 15)
    infinities = torch.full((len(fifteen), 1), float("inf"), dtype=x.dtype, device="cpu")
    for kind, values, g in (
        ("beside an infinity", torch.cat([fifteen, infinities], 1), answers.UNIT_GLOBAL_SCALE),
        ("beside its neighbours", x, 0.00123),
        ("shuffled", inputs.shuffled(x), 0.05),
    ):
        what = f"every {trial.dtype} {kind}"
        trial.quantize(trial.put(values.reshape(-1, 128)), trial.scale(g), what)


@check(_QUANTIZE, dtypes=(torch.float32,))
def random_patterns(trial: Trial) -> None:
    """float32 of random bits: any exponent, infinities and NaN among them."""
    x = inputs.random_patterns(1 << 14, trial.dtype)
    # Random exponents put one value of a block far above the others: keep some blocks narrow.
    x.view(-1, 128)[::2] *= 2.0**-100
    for scale in (1.0, 0.0123):
        trial.quantize(trial.put(x.view(-1, 128)), trial.scale(scale), "random bits")


@check(_QUANTIZE)
def random_values(trial: Trial) -> None:
    """Values as K and V have them, normal and heavy-tailed."""
    for what, values, factor in (
        ("normal values", inputs.normal(64, 4, 64), 1.0),
        ("heavy-tailed values", inputs.heavy_tailed(64, 4, 64), 0.7310585),
    ):
        scale = trial.scale(factor * inputs.calibrated_scale(values, trial.kv_format))
        trial.quantize(trial.put(values), scale, what)


@check(_QUANTIZE, close_calls=True)
def scaled_ties(trial: Trial) -> None:
    """Values that their scale brings to halfway between two codes: a reciprocal is not enough."""
    for kind, x, scales in inputs.scaled_ties(trial.kv_format):
        trial.quantize(trial.put(x), trial.scale(*scales.tolist()), kind)


@check(_QUANTIZE)
def rare_values(trial: Trial) -> None:
    """Zeros, infinities, NaN, subnormals, huge values, and magnitudes of any power of ten."""
    for kind, values in inputs.hard(16, 64).items():
        scale = trial.scale(0.03)
        trial.quantize(trial.put(values), scale, kind)


@check(_QUANTIZE, only_exact=True)
def extreme_scales(trial: Trial) -> None:
    """Scales up to the largest float32 and down to the smallest subnormal one."""
    has_blocks = trial.kv_format.block_size is not None
    patterns = inputs.random_patterns(1024, trial.dtype)
    for scale in _EXTREME_GLOBAL_SCALES if has_blocks else _EXTREME_SCALES:
        around = inputs.log_uniform(-4, 3, 1024).double() * scale * trial.kv_format.largest
        x = torch.cat([around.to(trial.dtype), patterns]).view(-1, 128)
        trial.quantize(trial.put(x), trial.scale(scale), "values around the scale, random bits")


# Shapes and memory


@check(_QUANTIZE, needs_reference=False)
def shapes(trial: Trial) -> None:
    """From one to five dimensions, and head_dim from 16 to 256; FP8 takes others too."""
    cases = [(128,), (3, 128), (2, 3, 128), (2, 1, 3, 128), (2, 2, 1, 2, 128), (1, 1, 1, 128)]
    cases += [(3, 2, head_dim) for head_dim in (16, 64, 80, 256)]
    if trial.kv_format.head_dim_multiple == 1:
        cases += [(3, 2, head_dim) for head_dim in (1, 7, 100)]
    for case in cases:
        x = trial.values(*case)
        trial.quantize(x, trial.scale_for(x), f"shape {tuple(x.shape)}")


@check(_QUANTIZE, needs_reference=False)
def empty(trial: Trial) -> None:
    """No tokens, no heads, or no head_dim: an empty result."""
    for shape in ((0, 8, 128), (0,), (2, 0, 64), (2, 3, 0), (0, 128)):
        x = trial.put(torch.empty(shape, dtype=torch.float32, device="cpu"))
        trial.quantize(x, trial.scale(0.5), f"shape {shape}")
        out = trial.buffers(shape).out
        trial.quantize(x, trial.scale(0.5), f"shape {shape} into buffers", out=out)


@check(_QUANTIZE, needs_reference=False)
def counts(trial: Trial) -> None:
    """Numbers of elements just below, at and above those that kernels cut the work at."""
    multiple = trial.kv_format.head_dim_multiple
    for edge in (2048, 4096):
        for rows in (edge // multiple + more for more in (-1, 0, 1)):
            x = trial.values(rows, multiple)
            trial.quantize(x, trial.scale_for(x), f"shape {tuple(x.shape)}")


@check(_QUANTIZE, needs_reference=False)
def strides(trial: Trial) -> None:
    """Any strides: other orders in memory, gaps, expanded and overlapping, no alignment."""
    x = trial.put(inputs.normal(8, 4, 128))
    views = {what: view(x) for what, view in inputs.VIEWS.items()}
    if trial.dtype == torch.float32:
        views["lazily negated"] = torch.complex(torch.zeros_like(x), x).conj().imag
    for what, view in views.items():
        if view.shape[-1] % trial.kv_format.head_dim_multiple == 0:
            trial.quantize(view, trial.scale_for(x), what)


@check(_QUANTIZE, dtypes=(torch.bfloat16,), needs_reference=False)
def far_rows(trial: Trial) -> None:
    """Rows more than 2^31 elements apart, in K or V and in the buffers."""
    near = trial.values(2, 128)
    device = trial.candidate.torch_device
    far = guards.far_apart(near.shape, trial.dtype, _FAR, device)
    if far is None:
        trial.not_possible = "there is no memory for rows that are far apart"
        return
    trial.quantize(far.copy_(near), trial.scale_for(near), "rows far apart")
    del far
    buffers = trial.buffers(near.shape).out
    data = guards.far_apart(buffers.data.shape, buffers.data.dtype, _FAR, device)
    if data is not None:
        out = (data, buffers.block_scales)
        trial.quantize(near, trial.scale_for(near), "into rows far apart", out=out)


@check(_QUANTIZE, needs_reference=False)
def out_buffers(trial: Trial) -> None:
    """Buffers of the caller, of any strides: all of them is written, and nothing beside them."""
    x = trial.values(2, 3, 2, 2, 128)
    scale = trial.scale_for(x)
    for layout in trial.layouts():
        for offset in (0,) if layout.is_mixed else (0, 1):
            what = f"into buffers: {layout}{', not aligned' * offset}"
            buffers = trial.buffers(x.shape, layout, offset=offset)
            if trial.quantize(x, scale, what, out=buffers.out) is not None:
                count = buffers.overwritten()
                if count:
                    trial.wrong(f"{what}: it writes {count} bytes beside the buffers")


@check(_QUANTIZE, needs_reference=False)
def out_reused(trial: Trial) -> None:
    """An earlier result is written over."""
    x = trial.values(8, 4, 128)
    first = trial.quantize(x, trial.scale_for(x), "the earlier values")
    if first is not None:
        x = trial.values(8, 4, 128, seed=5)
        trial.quantize(x, trial.scale_for(x), "into an earlier result", out=first)


@check(_QUANTIZE, needs_reference=False)
def new_results(trial: Trial) -> None:
    """Without buffers each call gives new memory: an earlier result stays as it is."""
    x, other = trial.values(8, 4, 128), trial.values(8, 4, 128, seed=5)
    first = trial.quantize(x, trial.scale_for(x), "the earlier values")
    if first is not None:
        with guards.unchanged(
            trial, "an earlier result", data=first.data, block_scales=first.block_scales
        ):
            trial.quantize(other, trial.scale_for(other), "the later values")


# Scales


@check(_QUANTIZE, takes=per_head)
def scale_per_head(trial: Trial) -> None:
    """One scale for each head, which goes along the last dimension but one."""
    for shape in ((6, 4, 128), (4, 128), (2, 3, 4, 64), (0, 4, 64), (4, 4, 4)):
        x = trial.values(*shape)
        trial.quantize(x, trial.scale(0.005, 3.0, 0.02, 0.4), f"a scale per head, shape {shape}")
    x = trial.values(6, 4, 128)
    spread = trial.scale(0.005, 9.0, 3.0, 9.0, 0.02, 9.0, 0.4, 9.0)[::2]
    trial.quantize(x, spread, "a scale per head, every second of a tensor")
    trial.quantize(x, trial.scale(0.02).expand(4), "a scale per head, expanded from one")
    trial.quantize(x.transpose(0, 1), trial.scale(*(0.01 * i for i in range(1, 7))), "transposed")


@check(_QUANTIZE)
def scale_tensor(trial: Trial) -> None:
    """The scale is read anew in each call, and where it lies in its memory."""
    x = trial.values(6, 4, 128)
    many = [[0.005, 3.0, 0.02, 0.4]] if per_head(trial.kv_format) else []
    for values in ([0.03], *many):
        scale = trial.scale_inside(*values)
        trial.quantize(x, scale, "a scale inside a tensor")
        scale.mul_(3)
        trial.quantize(x, scale, "the same scale, changed in place")


# What surrounds the call


@check(_QUANTIZE, needs_reference=False)
def given_unchanged(trial: Trial) -> None:
    """K or V and the scale stay as they are, and the memory around them."""
    x = trial.values(8, 4, 128)
    x[0, 0, :3] = trial.put(answers.floats([float("nan"), float("inf"), -0.0]))
    scale = trial.scale(0.03)
    for what, view in (("packed values", x), ("strided values", x.transpose(0, 1)[1:3])):
        for out in (None, trial.buffers(view.shape).out):
            with guards.unchanged(trial, what, tensor=x, scale=scale):
                trial.quantize(view, scale, what, out=out)


@check(_QUANTIZE, needs_reference=False)
def any_default_dtype(trial: Trial) -> None:
    """torch's default dtype, which engines change, makes no difference."""
    x = trial.values(8, 4, 128)
    scale = trial.scale_for(x)
    expected = trial.expected(x, scale, "float32 by default")
    for dtype in (torch.bfloat16, torch.float64):
        with guards.default_dtype(dtype):
            trial.quantize(x, scale, f"{dtype} by default", expected=expected)


@check(_QUANTIZE, needs_reference=False)
def no_host_sync(trial: Trial) -> None:
    """No value of a tensor is read on the host, and nothing is copied from there."""
    x = trial.values(8, 4, 128)
    scale = trial.scale_for(x)
    for what, view, out in (
        ("packed values", x, None),
        ("strided values into buffers", x.transpose(0, 1), trial.buffers((4, 8, 128)).out),
    ):
        # Once before: a first call may compile and load what it launches.
        if trial.quantize(view, scale, what, out=out) is not None:
            with guards.no_host_sync(trial, what):
                trial.candidate.quantize(view, scale, trial.kv_format, out)


@check(_QUANTIZE, needs_reference=False, only_gpu=True)
def graph(trial: Trial) -> None:
    """Captured in a CUDA graph, it uses the values that K or V and the scale have at replay."""
    x, later = trial.values(8, 4, 128), trial.values(8, 4, 128, seed=5) * 3
    scale = trial.scale_for(x)
    out = trial.buffers(x.shape).out
    result = trial.quantize(x, scale, "before the capture", out=out)
    if result is None:
        return
    replay = guards.captured(
        x.device, lambda: trial.candidate.quantize(x, scale, trial.kv_format, out)
    )
    x.copy_(later)
    scale.mul_(3)
    replay()
    expected = trial.expected(x, scale, "the values at replay")
    if expected is not None:
        trial.judge(x, result, expected, "replayed with other values and another scale")
