"""What ``validate_kv_scales``, and ``describe_kv`` beside it, must do before the first token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.conformance import answers
from kvcache_plugin.conformance.check import check, per_head

if TYPE_CHECKING:
    from kvcache_plugin.arguments import Scale
    from kvcache_plugin.conformance.trial import Trial
    from kvcache_plugin.plugins import HookName

_CONVERT: Final[HookName] = "validate_kv_scales"
_FNUZ: Final = "fp8_e4m3fnuz"
#: Neither has a float32 of its own, and twice them is no number of the other.
_K, _V = 0.05, 0.0123


@check(dtypes=(), needs_reference=False)
def description(trial: Trial) -> None:
    """What describe_kv answers is a KVDescription, where it is there."""
    problem = trial.candidate.description_problem(trial.kv_format)
    if problem:
        trial.wrong(problem)


@check(_CONVERT, dtypes=())
def scale_conversion(trial: Trial) -> None:
    """A checkpoint's scales are converted once: doubled for FNUZ, else left as they are."""
    factor = _factor(trial)
    _convert(trial, "both scales", (_K, _V), (_K * factor, _V * factor))
    _convert(trial, "a K scale alone", (_K, None), (_K * factor, _K * factor))


@check(_CONVERT, dtypes=())
def default_scales(trial: Trial) -> None:
    """1.0 by default is not a checkpoint's and stays."""
    _convert(trial, "no scales", (None, None), (1.0, 1.0))


@check(_CONVERT, dtypes=())
def scale_conversion_repeated(trial: Trial) -> None:
    """The same scales give the same again, whatever was converted between."""
    factor = _factor(trial)
    for scales in ((_K, _V), (_V, _K), (_K, _V), (None, None), (_K, _V)):
        k, v = (1.0 if scale is None else scale * factor for scale in scales)
        _convert(trial, "scales that came before", scales, (k, v))


@check(_CONVERT, dtypes=(), takes=per_head)
def scale_conversion_per_head(trial: Trial) -> None:
    """Scales of heads are converted like any, also when they come again."""
    k, v = (answers.floats(side) for side in ([0.05, 0.5, 4.0], [0.0123, 0.7, 1.0]))
    expected = k.double() * _factor(trial), v.double() * _factor(trial)
    for what in ("scales per head", "scales per head that came before"):
        _convert(trial, what, (k, v), expected)


def _factor(trial: Trial) -> float:
    return 2.0 if trial.kv_format.name == _FNUZ else 1.0


def _convert(
    trial: Trial,
    what: str,
    given: tuple[Scale | None, Scale | None],
    expected: tuple[Scale, Scale],
) -> None:
    converted = trial.convert(given, what)
    if converted is None:
        return
    for side, got, right in zip("kv", (converted.k, converted.v), expected, strict=True):
        if _listed(got) != _listed(right):
            trial.wrong(f"{what}: {side} becomes {_listed(got)} instead of {_listed(right)}")


def _listed(scale: Scale) -> list[float]:
    return scale.tolist() if isinstance(scale, torch.Tensor) else [float(scale)]
