"""What the rules say of the scales of one layer, and of those of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kvcache_plugin.api import validate_kv_scales
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVScaleError, add_note, anchored, sentences
from kvcache_plugin.formats import FP8_E4M3, FP8_E4M3FNUZ
from kvcache_plugin.scales import KVScales, ScaleSite, check_attention_scales

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from kvcache_plugin.hosts.loaded import LoadedScales

#: The final scales of a layer, what is wrong with it, or ``None`` where looking failed.
Verdict: TypeAlias = KVScales | KVScaleError | None

T = TypeVar("T")


def judge(found: LoadedScales) -> KVScales | KVScaleError:
    """The final scales of one layer, or one error for all that is wrong with it."""
    try:
        scales = _or_error(_validate, found)
        attention = _or_error(_check_attention, found)
    except BaseException as error:
        add_note(error, f"the layer was {found.layer}")
        raise
    errors = errors_among((scales, attention))
    return scales if isinstance(scales, KVScales) and not errors else _as_one(errors)


def errors_among(verdicts: Iterable[object]) -> list[KVScaleError]:
    return [verdict for verdict in verdicts if isinstance(verdict, KVScaleError)]


def with_notes(error: KVScaleError) -> str:
    """What is wrong, without the layer and the remedy, and what plugins added to it."""
    return "; ".join([error.problem, *getattr(error, "__notes__", ())])


def _or_error(check: Callable[[LoadedScales], T], found: LoadedScales) -> T | KVScaleError:
    try:
        return check(found)
    except KVScaleError as error:
        return error


def _validate(found: LoadedScales) -> KVScales:
    return validate_kv_scales(
        found.k,
        found.v,
        kv_cache_dtype=found.kv_cache_dtype,
        device=found.device,
        layer=found.layer,
        granularity=found.granularity,
        num_kv_heads=found.num_kv_heads,
    )


def _check_attention(found: LoadedScales) -> None:
    """Check the scales that go with those of K and V; they are of FP8, whatever the cache is of."""
    if found.q is None and found.prob is None:
        return
    fp8 = FP8_E4M3FNUZ if Device.of(found.device).is_fnuz else FP8_E4M3
    site = ScaleSite(fp8, found.layer, found.granularity, found.num_kv_heads)
    check_attention_scales(found.q, found.prob, site)


def _as_one(errors: Sequence[KVScaleError]) -> KVScaleError:
    """What is wrong with one layer. Each part but the last, whose name it gets, says its own."""
    *others, last = errors
    if not others:
        return last
    problems = [*(anchored(with_notes(error), error.name) for error in others), with_notes(last)]
    remedies = dict.fromkeys(error.remedy for error in errors)
    return KVScaleError(
        "; ".join(problems), layer=last.layer, remedy=sentences(*remedies), name=last.name
    )
