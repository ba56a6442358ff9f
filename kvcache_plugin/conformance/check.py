"""What a check is: a function that asks a candidate, for each format and dtype that it is about."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias

import torch

from kvcache_plugin.arguments import VALUE_DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvcache_plugin.conformance.trial import Trial
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.plugins import HookName

    Function: TypeAlias = Callable[[Trial], None]

HALF_DTYPES: Final = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Check:
    """One check.

    :param hooks: made of implementations that have all of these.
    :param dtypes: of values that are quantized, or that codes become; none where that is all one.
    :param takes: the formats that it is about.
    :param needs_reference: whether it needs to know which codes are right. The other checks are
        about memory, and are made of the formats that a plugin adds too.
    :param only_exact: whether it is skipped where ``describe_kv`` declares a tolerance.
    :param only_gpu: whether tensors must be on a GPU.
    :param close_calls: whether its inputs are picked to be close to call, so that it does not judge
        the fractions of a tolerance.
    """

    name: str
    summary: str
    function: Function
    hooks: tuple[HookName, ...]
    dtypes: tuple[torch.dtype, ...]
    takes: Callable[[KVFormat], bool]
    needs_reference: bool
    only_exact: bool
    only_gpu: bool
    close_calls: bool

    def __str__(self) -> str:
        return self.name


def check(
    *hooks: HookName,
    dtypes: Iterable[torch.dtype] = VALUE_DTYPES,
    takes: Callable[[KVFormat], bool] = lambda kv_format: True,
    needs_reference: bool = True,
    only_exact: bool = False,
    only_gpu: bool = False,
    close_calls: bool = False,
) -> Callable[[Function], Check]:
    """Make a check of a function, whose name it takes, and the first line of whose docstring."""

    def made(function: Function) -> Check:
        # Without docstrings (python -OO) the name must do.
        summary = function.__doc__ or function.__name__.replace("_", " ")
        return Check(
            function.__name__,
            summary.strip().splitlines()[0].rstrip("."),
            function,
            hooks,
            tuple(dtypes),
            takes,
            needs_reference,
            only_exact,
            only_gpu,
            close_calls,
        )

    return made


def is_nvfp4(kv_format: KVFormat) -> bool:
    return kv_format.family == "nvfp4"


def per_head(kv_format: KVFormat) -> bool:
    return kv_format.per_head
