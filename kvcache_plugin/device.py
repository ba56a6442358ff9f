"""What hardware this is: ``Device("cuda", "sm_90", (9, 0))``, ``Device("rocm", "gfx942")``.

An implementation is chosen by what a device can do, so the capability is the identity of a device
here and the index of a card is not. Nothing touches a GPU before ``Device.of`` is asked about one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from kvcache_plugin.errors import KVCacheError

if TYPE_CHECKING:
    import torch

_CUDA_ARCH = re.compile(r"sm_?(?P<major>[0-9]+)(?P<minor>[0-9])[af]?")
_FNUZ_ARCHS = ("gfx940", "gfx941", "gfx942")
_ROCM_ARCH = re.compile(r"(?P<arch>gfx[0-9a-f]{3,})(:.*)?")


@dataclass(frozen=True)
class Device:
    """One kind of hardware.

    :param kind: ``"cpu"``, ``"cuda"``, ``"rocm"``, or another torch device type such as ``"xpu"``.
    :param arch: ``"sm_90"`` for CUDA, ``"gfx942"`` for ROCm, empty for the others.
    :param capability: CUDA's compute capability, ``(major, minor)``; ``None`` for the others.
    """

    kind: str
    arch: str = ""
    capability: tuple[int, int] | None = None

    def __str__(self) -> str:
        return self.arch or self.kind

    @property
    def is_fnuz(self) -> bool:
        """Whether the 8-bit floats of this GPU are the FNUZ ones (gfx940, gfx941 and gfx942).

        gfx950 and gfx12xx use the OCP formats.
        """
        return self.kind == "rocm" and self.arch in _FNUZ_ARCHS

    @classmethod
    def of(cls, x: Device | torch.device | torch.Tensor | str) -> Device:
        """The hardware that a tensor is on, that a ``torch.device`` names, or that a string names.

        :param x: one of these, or a ``Device``, which is given back.
        :raises KVCacheError: for a name that is unknown, or a GPU that this machine does not have.
        """
        if isinstance(x, Device):
            return x
        if isinstance(x, str):
            return cls.parse(x)
        import torch

        if isinstance(x, torch.Tensor):
            return of_existing(x.device)
        device = x
        if not isinstance(device, torch.device):
            raise KVCacheError(
                f"a device is a Device, a torch.device, a tensor or a name, got {x!r}; "
                f"{_KNOWN_NAMES}",
                name="device-unknown",
            )
        if device.type == "cuda":
            return _of_gpu(device.index)
        return cls(device.type)

    @classmethod
    def parse(cls, name: str) -> Device:
        """``"sm_90"``, ``"gfx942"`` and ``"cpu"`` need no hardware; ``"cuda:0"`` asks the card.

        :param name: one of these, or another name that ``torch.device`` takes, in any case.
        :raises KVCacheError: for a name that is unknown, or a GPU that this machine does not have.
        """
        if not isinstance(name, str):
            raise KVCacheError(
                f"a device's name is a string, got {name!r}; {_KNOWN_NAMES}", name="device-unknown"
            )
        text = name.strip().lower()
        if text == "cpu":
            return cls("cpu")
        if match := _CUDA_ARCH.fullmatch(text):
            major, minor = int(match["major"]), int(match["minor"])
            return cls("cuda", f"sm_{major}{minor}", (major, minor))
        if match := _ROCM_ARCH.fullmatch(text):
            return cls("rocm", match["arch"])
        import torch

        try:
            device = torch.device(text)
        except (RuntimeError, ValueError) as error:
            raise KVCacheError(
                f"unknown device {name!r}; {_KNOWN_NAMES}", name="device-unknown"
            ) from error
        return cls.of(device)


_KNOWN_NAMES = (
    "known names are cpu, a CUDA architecture (sm_90), a ROCm architecture (gfx942) "
    "and what torch.device takes (cuda:0). An H100 is sm_90, an MI300X gfx942, and another "
    "accelerator what its own package for torch calls it, or privateuseone without that"
)


@cache
def of_existing(device: torch.device) -> Device:
    """The hardware that a tensor is on, which is there and stays what it is."""
    return _of_card(device.index) if device.type == "cuda" else Device(device.type)


def _of_gpu(index: int | None) -> Device:
    """The GPU that torch calls ``cuda:index``, an NVIDIA or an AMD one."""
    import torch

    if not torch.cuda.is_available():
        raise KVCacheError(
            f"torch {torch.__version__} sees no GPU on this machine, so 'cuda' has no capability; "
            "name the architecture instead, sm_90 or gfx942 for instance",
            name="gpu-not-there",
        )
    count = torch.cuda.device_count()
    if index is not None and index >= count:
        raise KVCacheError(
            f"there is no cuda:{index} on this machine, torch sees {count}: "
            f"cuda:0 to cuda:{count - 1}",
            name="gpu-not-there",
        )
    return _of_card(torch.cuda.current_device() if index is None else index)


@cache
def _of_card(index: int) -> Device:
    import torch

    if torch.version.hip is not None:
        # gcnArchName carries feature flags behind the name: "gfx942:sramecc+:xnack-".
        properties = torch.cuda.get_device_properties(index)
        return Device("rocm", properties.gcnArchName.split(":")[0])
    major, minor = torch.cuda.get_device_capability(index)
    return Device("cuda", f"sm_{major}{minor}", (major, minor))
