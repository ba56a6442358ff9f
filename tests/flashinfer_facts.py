"""What this project takes for granted of FlashInfer, and what a module says of itself.

``python -m tests.flashinfer_facts`` prints, as JSON, what the FlashInfer that is on the path says,
and what this project makes of it.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any

import torch

import kvcache_plugin as kv
from kvcache_plugin.hardware import cuda_sm100, cuda_sm120, flashinfer_package
from tests.flashinfer_stand_in import DEQUANTIZES, QUANTIZES, VERSION

NAMES = ("nvfp4_kv_quantize", "nvfp4_kv_dequantize")
DEVICES = ("sm_100", "sm_103", "sm_120", "sm_121")
EXPECTED: dict[str, Any] = {
    "version": VERSION,
    "parameters": {
        "nvfp4_kv_quantize": {"input": "", "global_scale": ""},
        "nvfp4_kv_dequantize": {
            "fp4_data": "",
            "block_scales": "",
            "global_scale": "",
            "output_dtype": "torch.bfloat16",
        },
    },
    "capabilities": {
        "nvfp4_kv_quantize": list(QUANTIZES),
        "nvfp4_kv_dequantize": list(DEQUANTIZES),
    },
    "problems": [],
}


def facts(module: Any) -> dict[str, Any]:
    """To be compared with ``EXPECTED``: parameters with their defaults, declared capabilities."""
    functions = {name: getattr(module, name, None) for name in NAMES}
    found = {name: function for name, function in functions.items() if function is not None}
    return {
        "version": module.__version__,
        "parameters": {name: _parameters(function) for name, function in found.items()},
        "capabilities": {
            name: flashinfer_package.capabilities(function) for name, function in found.items()
        },
        "problems": list(flashinfer_package.problems(module)),
    }


def _parameters(function: Any) -> dict[str, str]:
    parameters = inspect.signature(function).parameters.values()
    return {
        parameter.name: "" if parameter.default is parameter.empty else str(parameter.default)
        for parameter in parameters
    }


def main() -> None:
    devices = [kv.Device.parse(name) for name in DEVICES]
    served = [
        module.supports_kv(device, "nvfp4") is True
        for device in devices
        for module in (cuda_sm100, cuda_sm120)
    ]
    early = "flashinfer" in sys.modules
    why_not = {str(device): flashinfer_package.why_not_flashinfer(device) for device in devices}
    import flashinfer

    x, one = torch.ones(2, 32, dtype=torch.bfloat16), torch.ones(1)
    codes, scales = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 2, dtype=torch.uint8)
    answer = {
        "facts": facts(flashinfer),
        "served": served,
        "imported before it was used": early,
        "why_not": why_not,
        "how": {
            str(device): module.describe_kv(device, "nvfp4").how
            for device, module in zip(
                devices, (cuda_sm100, cuda_sm100, cuda_sm120, cuda_sm120), strict=True
            )
        },
        "on a CPU": [
            _refusal(flashinfer.nvfp4_kv_quantize, x, one),
            _refusal(flashinfer.nvfp4_kv_dequantize, codes, scales, one),
        ],
    }
    print(json.dumps(answer))


def _refusal(function: Any, *arguments: torch.Tensor) -> str:
    try:
        function(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


if __name__ == "__main__":
    main()
