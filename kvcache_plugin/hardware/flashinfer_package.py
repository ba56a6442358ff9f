"""FlashInfer as it is installed: whether it serves a GPU, if not why, and its two functions.

It is imported when one of these questions is asked for the first time, and not before.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch

from kvcache_plugin import Device, KVCacheError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

logger = logging.getLogger(__name__)

QUANTIZE: Final = "nvfp4_kv_quantize"
DEQUANTIZE: Final = "nvfp4_kv_dequantize"
#: What each is given, by position.
PARAMETERS: Final = {
    QUANTIZE: ("input", "global_scale"),
    DEQUANTIZE: ("fp4_data", "block_scales", "global_scale", "output_dtype"),
}

_UPGRADE: Final = "pip install --upgrade flashinfer-python"
_BY_POSITION: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_VARIABLE: Final = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Function(Protocol):
    """A function of FlashInfer, which declares the GPUs that it has a kernel for."""

    def __call__(self, *arguments: object) -> Any: ...

    def is_compute_capability_supported(self, capability: int) -> bool: ...


@dataclass(frozen=True)
class FlashInfer:
    """What is installed.

    :param functions: by name; none where there is a problem.
    :param problem: why it cannot be used, with the remedy; empty when it can.
    """

    version: str = ""
    functions: Mapping[str, Function] = field(default_factory=dict)
    problem: str = ""


@cache
def installed() -> FlashInfer:
    """FlashInfer, imported; one that is broken is logged."""
    try:
        module = importlib.import_module("flashinfer")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ModuleNotFoundError) and error.name == "flashinfer":
            remedy = 'pip install "kvcache-plugin[cuda]"'
            return FlashInfer(problem=f"FlashInfer is not installed: {remedy}")
        remedy = "pip install --force-reinstall flashinfer-python"
        found = FlashInfer(problem=f"FlashInfer cannot be imported ({_one_line(error)}): {remedy}")
    else:
        found = _examined(module)
    if found.problem:
        _say(found.problem)
    return found


def _examined(module: object) -> FlashInfer:
    """What was imported. Its functions may be made when they are asked for, and that may fail."""
    version = "of unknown version"
    try:
        version = str(getattr(module, "__version__", version))
        problem = "; ".join(problems(module))
        if not problem:
            return FlashInfer(version, {name: getattr(module, name) for name in PARAMETERS})
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        problem = f"its functions cannot be examined ({_one_line(error)})"
    return FlashInfer(version, problem=f"FlashInfer {version} is left out: {problem}; {_UPGRADE}")


@cache
def why_not_flashinfer(device: Device) -> str:
    """Why FlashInfer does not serve a CUDA device, with the remedy; empty when it does."""
    flashinfer = installed()
    if flashinfer.problem:
        return flashinfer.problem
    assert device.capability is not None
    major, minor = device.capability
    for name, function in flashinfer.functions.items():
        try:
            declared = capabilities(function)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            problem = (
                f"{name} of FlashInfer {flashinfer.version} does not say whether it serves "
                f"{device} ({_one_line(error)}): {_UPGRADE}"
            )
            _say(problem)
            return problem
        if 10 * major + minor not in declared:
            names = ", ".join(f"sm_{capability}" for capability in declared) or "no GPU"
            return f"FlashInfer {flashinfer.version} declares {name} for {names}, and not {device}"
    return ""


def _say(problem: str) -> None:
    logger.warning("NVFP4 is Triton's: %s [errors#flashinfer-left-out]", problem)


def problems(module: object) -> Iterator[str]:
    """What FlashInfer's module lacks for the two functions to be called as they are here."""
    for name, expected in PARAMETERS.items():
        function = getattr(module, name, None)
        if not callable(function):
            yield f"it has no {name}"
        elif not callable(getattr(function, "is_compute_capability_supported", None)):
            yield f"{name} does not declare its compute capabilities"
        elif not _takes(function, expected):
            signature = inspect.signature(function)
            yield f"{name} takes {signature} instead of ({', '.join(expected)})"


def capabilities(function: Function) -> list[int]:
    """The compute capabilities that one of the functions declares, ``10 · major + minor``."""
    declares = function.is_compute_capability_supported
    return [capability for capability in range(70, 130) if declares(capability)]


def call(name: str, device: Device, *arguments: object) -> Any:
    """Call one of the two functions.

    :raises KVCacheError: when its first call fails, with what FlashInfer needs for it.
    """
    flashinfer = installed()
    try:
        result = flashinfer.functions[name](*arguments)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        if name in _proven:
            raise
        assert device.capability is not None
        raise KVCacheError(
            f"the first {name} of FlashInfer {flashinfer.version} on {device} failed with "
            f"{_one_line(error)}. Unless its kernels are installed compiled, it compiles them at "
            "the first call: install nvcc, ninja and a C++ compiler for that, or the kernels by "
            "`flashinfer install-jit-cache-wheel`. Triton serves without FlashInfer: pip uninstall "
            f"flashinfer-python, or set KVCACHE_PLUGIN_BLOCK=cuda_sm{device.capability[0]}0",
            name="flashinfer-first-call",
        ) from error
    _proven.add(name)
    return result


#: Functions that have run once, so that what goes wrong later is not their compilation.
_proven: Final[set[str]] = set()


def _takes(function: Function, expected: tuple[str, ...]) -> bool:
    """Whether these are its first parameters, and the others need not be given."""
    parameters = list(inspect.signature(function).parameters.values())
    first, others = parameters[: len(expected)], parameters[len(expected) :]
    return (
        tuple(parameter.name for parameter in first) == expected
        and all(parameter.kind in _BY_POSITION for parameter in first)
        and all(
            parameter.kind in _VARIABLE or parameter.default is not inspect.Parameter.empty
            for parameter in others
        )
    )


def _one_line(error: BaseException) -> str:
    message = str(error).strip()
    first = message.splitlines()[0].rstrip(".:") if message else ""
    return f"{type(error).__name__}: {first}" if first else repr(error)
