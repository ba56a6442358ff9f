"""Compiles what the launch code launches: ``python -m tests.targets.compile FILE sm_90 gfx942``.

Triton's own launch does it, up to where a GPU is needed, for it is told of a GPU that is not there:
types, what is known of their alignment, and constants are those of a launch.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from kvcache_plugin import Device
from kvcache_plugin.hardware import triton_kernels, triton_launch
from tests.targets.code import Code
from tests.targets.variants import FAULTY, NVFP4, STEPS, variants_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.targets.variants import Variant

KERNELS = ("quantize_fp8", "dequantize_fp8", "quantize_nvfp4", "dequantize_nvfp4")
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class AbsentGPU:
    """Triton's driver, as far as a launch asks it before there is machine code."""

    def __init__(self, name: str) -> None:
        self.name = name

    def get_current_device(self) -> str:
        return self.name

    def get_current_stream(self, device: str) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        device = Device.parse(self.name)
        if device.capability is not None:
            major, minor = device.capability
            return GPUTarget("cuda", 10 * major + minor, 32)
        return GPUTarget("hip", device.arch, 64 if device.arch.startswith("gfx9") else 32)


class Compiling:
    """Stands where a kernel stood, and compiles it where that would be launched."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.last: tuple[Any, dict[str, Any]] | None = None

    def __getitem__(self, grid: tuple[int, int]) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            compiled = self.kernel.warmup(*args, grid=grid, **options)
            named = dict(zip(self.kernel.arg_names, args, strict=False))
            self.last = compiled, named | options

        return launch


def compile_variant(variant: Variant, target: str) -> tuple[Any, dict[str, Any]]:
    """What Triton compiled, and the arguments that the kernel was launched with."""
    kernels = {name: Compiling(getattr(triton_kernels, name)) for name in KERNELS}
    with (
        patch.multiple(triton_kernels, **kernels),
        patch.dict(triton_launch._OPTIONS, variant.options),
    ):
        variant.launch(triton_launch, Device.parse(target))
    (found,) = [kernel.last for kernel in kernels.values() if kernel.last is not None]
    return found


def code_of(variant: Variant, target: str, disassemble: bool = False) -> Code:
    compiled, arguments = compile_variant(variant, target)
    threads = arguments["num_warps"] * compiled.metadata.target.warp_size
    elements = arguments["BLOCK"] // threads
    values = arguments["values" if "values" in arguments else "key"].element_size() * elements
    codes = elements // 2 if variant.form == NVFP4 else elements
    loads, stores = (codes, values) if "values" in arguments else (values, codes)
    cubin = compiled.asm.get("cubin")
    return Code(
        target=target,
        variant=str(variant),
        form=variant.form,
        kernel=compiled.metadata.name,
        elements=elements,
        loads=loads,
        stores=stores,
        wide=arguments["WIDE"],
        block_scales=elements // 16 if variant.form == NVFP4 else 0,
        assembly=compiled.asm.get("ptx") or compiled.asm["amdgcn"],
        resources=_dumped(cubin, "-res-usage") if cubin else "",
        machine=_dumped(cubin, "-sass") if cubin and disassemble else "",
    )


def _dumped(cubin: bytes, what: str) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [_CUOBJDUMP, what, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def kernels_of_steps(target: str) -> dict[str, int]:
    """How many times each kernel is compiled for ``STEPS``."""
    compiled = {id(found): found for found in (compile_variant(v, target)[0] for v in STEPS)}
    names = [found.metadata.name for found in compiled.values()]
    return {name: names.count(name) for name in KERNELS}


def codes_of(target: str) -> dict[str, Any]:
    codes: dict[tuple[type[Variant], bool], list[Code]] = {}
    for variant in variants_for(target):
        of_kernel = codes.setdefault((type(variant), variant.form == NVFP4), [])
        # To disassemble takes as long as to compile: one of each kernel is enough.
        of_kernel.append(code_of(variant, target, disassemble=not of_kernel))
    return {
        "codes": [asdict(code) for of_kernel in codes.values() for code in of_kernel],
        "faulty": {
            name: asdict(code_of(variant, target))
            for name, variant in FAULTY.get(target, {}).items()
        },
        "steps": kernels_of_steps(target) if target in FAULTY else {},
    }


def main(file: str, *targets: str) -> None:
    answers = {}
    for target in targets:
        driver.set_active(AbsentGPU(target))
        answers[target] = codes_of(target)
    Path(file).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
