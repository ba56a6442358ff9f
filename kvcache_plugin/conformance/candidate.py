"""An implementation that is examined, alone in a manager of its own, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import calls, formats
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVCacheError, NoImplementationError
from kvcache_plugin.hookspecs import hookimpl
from kvcache_plugin.manager import Manager

if TYPE_CHECKING:
    from collections.abc import Generator

    from kvcache_plugin.arguments import Out, OutPair, Scale
    from kvcache_plugin.description import KVDescription
    from kvcache_plugin.explaining import Explanation
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.quantized import QuantizedKV
    from kvcache_plugin.scales import KVScales

_PROBE: Final = "conformance probe"


class Candidate:
    """An implementation, and the device that it is examined on.

    :param manager: has this one implementation.
    :param name: what the manager knows it by.
    :param torch_device: where tensors live.
    :param device: what the implementation is told.
    """

    def __init__(
        self, manager: Manager, name: str, torch_device: torch.device, device: Device
    ) -> None:
        self.name = name
        self.torch_device = torch_device
        self.device = device
        self._manager = manager

    def __str__(self) -> str:
        return f"{self.name} on {self.device}"

    @classmethod
    def of(
        cls,
        implementation: object,
        *,
        torch_device: torch.device | str = "cpu",
        device: Device | str | None = None,
    ) -> Candidate:
        """An implementation that need not be installed.

        :param implementation: a module, or an instance of a class, with hook functions.
        :param torch_device: where tensors live.
        :param device: by default what ``torch_device`` is. With another one code for hardware that
            is not there is examined with tensors on the CPU. A string is a name, ``"sm_90"``.
        :raises KVCacheError: for a plugin that is broken, a device that is unknown, or a GPU that
            is not there.
        """
        where = _torch_device(torch_device)
        manager, name = Manager(), _name_of(implementation)
        manager.register(implementation, name)
        return cls(manager, name, where, Device.of(where if device is None else device))

    @classmethod
    def installed(cls, name: str, others: frozenset[str], torch_device: torch.device) -> Candidate:
        """An implementation that is installed, loaded as all of them are.

        :param others: the names of all others.
        """
        manager = Manager(others)
        manager.discover()
        return cls(manager, name, torch_device, Device.of(torch_device))

    # What it serves

    @property
    def all_formats(self) -> tuple[KVFormat, ...]:
        """The built-in formats, and those that it adds."""
        found = map(self._manager.kv_format, self._manager.format_names)
        return tuple(dict.fromkeys(kv_format for kv_format in found if kv_format is not None))

    @property
    def served(self) -> tuple[KVFormat, ...]:
        """The formats that it says it serves."""
        return tuple(kv_format for kv_format in self.all_formats if self.hooks(kv_format))

    def kv_format(self, name: str) -> KVFormat | None:
        return self._manager.kv_format(name)

    def hooks(self, kv_format: KVFormat) -> tuple[str, ...]:
        """The hooks that it is called for with a format; empty where it does not serve it."""
        hooks = self._explanation(kv_format).chosen_for
        if formats.on_device(kv_format.name, self.device) == kv_format.name:
            return hooks
        # Another format is stored in its place (FNUZ), but codes of it may still be read.
        return tuple(hook for hook in hooks if hook == "dequantize_kv")

    def why_not(self, kv_format: KVFormat) -> str:
        """Why it does not serve a format, or what it does there."""
        return self._explanation(kv_format).reason

    def unclear(self, kv_format: KVFormat) -> str:
        """How its ``supports_kv`` fails to say whether it serves a format; empty where it says."""
        explanation = self._explanation(kv_format)
        return explanation.reason if explanation.is_broken else ""

    def describe(self, kv_format: KVFormat) -> KVDescription:
        """What it says of itself for a format."""
        return self._manager.describe(self.name, self.device, kv_format.name)

    def description_problem(self, kv_format: KVFormat) -> str:
        """What is wrong with the answer of its ``describe_kv``; empty where nothing is."""
        return self._manager.description_problem(self.name, self.device, kv_format.name)

    def _explanation(self, kv_format: KVFormat) -> Explanation:
        rows = self._manager.explain(self.device, kv_format.name)
        return next(row for row in rows if row.name == self.name)

    # Asking it; each answer is None where it passes

    def quantize(
        self, tensor: torch.Tensor, scale: Scale, kv_format: KVFormat, out: Out | None = None
    ) -> QuantizedKV | None:
        try:
            return calls.quantize(self._manager, self.device, tensor, scale, kv_format.name, out)
        except NoImplementationError:
            return None

    def quantize_pair(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[Scale, Scale],
        kv_format: KVFormat,
        out: OutPair | None = None,
    ) -> tuple[QuantizedKV, QuantizedKV] | None:
        """K and V in one call, or one by one where its ``quantize_kv_pair`` passes."""
        try:
            return calls.quantize_pair(
                self._manager, self.device, *tensors, *scales, kv_format.name, out
            )
        except NoImplementationError:
            return None

    def takes_pair(
        self,
        tensors: tuple[torch.Tensor, torch.Tensor],
        scales: tuple[Scale, Scale],
        kv_format: KVFormat,
    ) -> bool:
        """Whether its ``quantize_kv_pair`` answers, and does not pass."""
        answers = _PairAnswers()
        self._manager.register(answers, _PROBE)
        try:
            self.quantize_pair(tensors, scales, kv_format)
        finally:
            self._manager.unregister(answers)
        return answers.last is not None

    def dequantize(self, quantized: QuantizedKV, dtype: torch.dtype) -> torch.Tensor | None:
        try:
            return calls.dequantize(self._manager, self.device, quantized, dtype)
        except NoImplementationError:
            return None

    def convert(
        self,
        k_scale: Scale | None,
        v_scale: Scale | None,
        kv_format: KVFormat,
        *,
        num_kv_heads: int | None = None,
    ) -> KVScales | None:
        """:param num_kv_heads: how many scales each side has; ``None`` for one per tensor."""
        try:
            return calls.convert_scales(
                self._manager,
                self.device,
                k_scale,
                v_scale,
                kv_cache_dtype=kv_format.name,
                layer="model.layers.0.self_attn",
                granularity="tensor" if num_kv_heads is None else "head",
                num_kv_heads=num_kv_heads,
            )
        except NoImplementationError:
            return None


class _PairAnswers:
    """Sees what comes out of ``quantize_kv_pair``."""

    last: object = None

    @hookimpl(wrapper=True)
    def quantize_kv_pair(self) -> Generator[None, object, object]:
        self.last = yield
        return self.last


def _torch_device(given: torch.device | str) -> torch.device:
    try:
        return torch.device(given)
    except (RuntimeError, TypeError, ValueError) as error:
        raise KVCacheError(
            f"torch_device is what torch.device takes, cpu or cuda:0 for instance, got {given!r}; "
            "an architecture such as sm_90 is a device, and no torch_device",
            name="torch-device-unknown",
        ) from error


def _name_of(implementation: object) -> str:
    name: str = getattr(implementation, "__name__", type(implementation).__name__)
    return name.rpartition(".")[2]
