"""The checks of a candidate, one case for each check, format and dtype; running one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin.conformance import dequantizing, pairs, quantizing, scales
from kvcache_plugin.conformance.check import Check
from kvcache_plugin.conformance.comparing import Problem, is_exact
from kvcache_plugin.conformance.trial import Trial, has_reference
from kvcache_plugin.errors import KVCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_plugin.conformance.candidate import Candidate
    from kvcache_plugin.formats import KVFormat

#: Every check, in the order of the modules.
CHECKS: Final = tuple(
    found
    for module in (scales, quantizing, pairs, dequantizing)
    for found in vars(module).values()
    if isinstance(found, Check)
)


@dataclass(frozen=True)
class Verdict:
    """What came of one case.

    :param problems: what is wrong, each with the first codes or values that differ.
    :param compared: how many codes, block scales and values were compared.
    :param skipped: why nothing was looked at; empty where something was.
    """

    problems: tuple[Problem, ...]
    compared: int
    skipped: str


@dataclass(frozen=True)
class Case:
    """One check of an implementation.

    :param check: what is done and looked at.
    :param kv_cache_dtype: the format.
    :param dtype: of K and V; ``None`` where the check is not about a dtype.
    """

    check: Check
    kv_cache_dtype: str
    dtype: torch.dtype | None

    def __str__(self) -> str:
        """Its name in reports, ``strides-fp8_e4m3-bfloat16`` for instance."""
        return "-".join(filter(None, (self.check.name, self.kv_cache_dtype, self.dtype_name)))

    @property
    def dtype_name(self) -> str:
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    def run(self, candidate: Candidate) -> Verdict:
        """Ask the candidate. Its exceptions go up as they are, with a note of the input.

        :param candidate: the one that ``cases`` was asked about.
        """
        kv_format = _format(candidate, self.kv_cache_dtype)
        trial = Trial(candidate, kv_format, self.dtype or torch.float32)
        if self.check.only_exact and not is_exact(trial.tolerance):
            return Verdict((), 0, "only for implementations that declare no tolerance")
        self.check.function(trial)
        if not self.check.close_calls:
            trial.judge_fractions()
        compared = trial.codes.compared + trial.block_scales.compared
        return Verdict(tuple(trial.problems), compared, trial.skipped)


def cases(candidate: Candidate, kv_cache_dtypes: Sequence[str] | None = None) -> tuple[Case, ...]:
    """The cases of a candidate.

    :param candidate: an implementation and its device, from ``Candidate.of``.
    :param kv_cache_dtypes: by default every format that it says it serves on its device.
    :returns: one for each check, format and dtype.
    :raises KVCacheError: for a format that it does not serve, where none is asked for, where it
        serves none, and where it does not say, so that nothing passes because nothing was looked
        at.
    """
    if kv_cache_dtypes is None:
        asked = candidate.served
        unclear = {f.name: why for f in candidate.all_formats if (why := candidate.unclear(f))}
        if unclear or not asked:
            reasons = unclear or {f.name: candidate.why_not(f) for f in candidate.all_formats}
            said = "; ".join(f"{name}: {why}" for name, why in reasons.items())
            raise KVCacheError(
                f"{candidate} has nothing to be checked. {said}", name="conformance-nothing-checked"
            )
    else:
        asked = tuple(_format(candidate, name) for name in kv_cache_dtypes)
        if not asked:
            raise KVCacheError(
                f"{candidate}: no format is asked for, so nothing would be checked; name one, or "
                "say None for all that it serves",
                name="conformance-nothing-checked",
            )
        for kv_format in asked:
            if not candidate.hooks(kv_format):
                why = candidate.why_not(kv_format)
                raise KVCacheError(
                    f"{candidate} does not serve {kv_format.name}: {why}",
                    name="conformance-nothing-checked",
                )
    return tuple(case for kv_format in asked for case in _cases_of(candidate, kv_format))


def _cases_of(candidate: Candidate, kv_format: KVFormat) -> Iterator[Case]:
    hooks = set(candidate.hooks(kv_format))
    is_defined = has_reference(kv_format)
    on_gpu = candidate.torch_device.type == "cuda"
    for check in CHECKS:
        if (
            hooks.issuperset(check.hooks)
            and check.takes(kv_format)
            and (is_defined or not check.needs_reference)
            and (on_gpu or not check.only_gpu)
        ):
            for dtype in check.dtypes or (None,):
                yield Case(check, kv_format.name, dtype)


def _format(candidate: Candidate, name: str) -> KVFormat:
    kv_format = candidate.kv_format(name)
    if kv_format is None:
        known = ", ".join(known.name for known in candidate.all_formats)
        raise KVCacheError(
            f"{candidate} knows no format {name!r}; known names are {known}",
            name="conformance-nothing-checked",
        )
    return kv_format
