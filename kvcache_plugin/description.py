"""What an implementation says of itself: how it works, and how close it comes to the reference."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache_plugin.errors import anchored


@dataclass(frozen=True)
class KVTolerance:
    """How far an implementation may be from the CPU reference; by default its codes are the same.

    :param codes: fraction of the codes that may be one step off, from 0 to 1.
    :param block_scales: fraction of the NVFP4 block scales that may be one step off, from 0 to 1.
    :param nan: whether a NaN, and with NVFP4 the block that it is in, may become any code.
    :raises ValueError: for a fraction that is none.
    :raises TypeError: for a ``nan`` that is neither ``True`` nor ``False``.
    """

    codes: float = 0.0
    block_scales: float = 0.0
    nan: bool = False

    def __post_init__(self) -> None:
        for name, fraction in (("codes", self.codes), ("block_scales", self.block_scales)):
            is_number = isinstance(fraction, (int, float)) and not isinstance(fraction, bool)
            if not is_number or not 0 <= fraction <= 1:
                raise ValueError(
                    anchored(
                        f"{name} of a KVTolerance is a fraction from 0 to 1, got {fraction!r}",
                        "invalid-description",
                    )
                )
        if not isinstance(self.nan, bool):
            raise TypeError(
                anchored(
                    f"nan of a KVTolerance is True or False, got {self.nan!r}",
                    "invalid-description",
                )
            )


@dataclass(frozen=True)
class KVDescription:
    """What an implementation says of itself for one device and format.

    :param how: a sentence that ``explain`` shows where it is chosen; empty for the first line of
        its docstring.
    :param tolerance: how close it comes to the CPU reference.
    :raises TypeError: for parameters of other types.
    """

    how: str = ""
    tolerance: KVTolerance = KVTolerance()

    def __post_init__(self) -> None:
        if not isinstance(self.how, str):
            raise TypeError(
                anchored(
                    f"how of a KVDescription is a sentence, got {self.how!r}",
                    "invalid-description",
                )
            )
        if not isinstance(self.tolerance, KVTolerance):
            raise TypeError(
                anchored(
                    f"tolerance of a KVDescription is a KVTolerance, got {self.tolerance!r}",
                    "invalid-description",
                )
            )
