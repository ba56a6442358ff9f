"""SGLang: K/V scales are checked after loading, each time that SGLang processes them."""

from __future__ import annotations

import importlib
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from kvcache_plugin.device import Device
from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.gate import LoadedScales, LoadGate, unless_marked
from kvcache_plugin.settings import read_settings, report_problems

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from kvcache_plugin.hosts.seams import Seam
    from kvcache_plugin.scales import KVScales

logger = logging.getLogger(__name__)

_UNSET: Final = -1.0
#: SGLang's names for KV caches whose scales follow our rules; see ``_kv_format``.
_FORMATS: Final = ("fp8_e4m3", "fp8_e5m2", "nvfp4")

_registered = False


def register() -> None:
    """SGLang's entry point; called in every process. It never raises."""
    global _registered
    if _registered:
        return  # a second registration would run everything twice
    _registered = True
    try:
        _register()
    except Exception:
        logger.exception("kvcache_plugin could not register itself; SGLang goes on without it")


def _register() -> None:
    settings = read_settings()
    report_problems(settings)
    if settings.mode == "off":
        return
    adapter = _Adapter(LoadGate("SGLang", settings.mode))
    # Without these the others have nothing to stand on.
    if not (_fits(seams.SGLANG_HOOKS) and _fits(seams.SGLANG_CONFIG)):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrappers: tuple[tuple[Seam, Callable[..., Any]], ...] = (
        (seams.SGLANG_LAYER, adapter.process_layer),
        (seams.SGLANG_MODEL, adapter.process_model),
        (seams.SGLANG_FILE, adapter.load_file),
    )
    for seam, wrapper in wrappers:
        if _fits(seam):
            HookRegistry.register(seam.path, wrapper, HookType.AROUND)


def _fits(seam: Seam) -> bool:
    try:
        problem = seams.check_module(seam, importlib.import_module(seam.module))
    except Exception as error:
        problem = f"{seam.module} cannot be imported: {type(error).__name__}: {error}"
    if problem:
        logger.warning(
            "kvcache_plugin leaves out a step of SGLang (it %s): %s", seam.purpose, problem
        )
    return not problem


@dataclass(frozen=True)
class _Processed:
    """One side of a layer: what the checkpoint brought, and what stands there since."""

    raw: torch.Tensor | None
    written: float


class _Adapter:
    """The functions that are put around SGLang's own."""

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        # SGLang writes its result over the raw scale and processes it again after a capture or a
        # reload. What we wrote ourselves is no new raw value.
        self._processed: WeakKeyDictionary[torch.nn.Module, dict[str, _Processed]] = (
            WeakKeyDictionary()
        )
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()

    def process_model(
        self,
        original: Callable[..., Any],
        model: Any,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with self._gate.model(self._loaded_layers(model, target_device)):
            return original(model, target_device, *args, **kwargs)

    def process_layer(
        self, original: Callable[..., Any], method: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Check one layer, let SGLang process it, and see that each copy has the result."""
        scales, found = None, self._guarded("looking for K/V scales", self._find, method, layer)
        if found is not None:
            scales = self._gate.layer(layer, found)
        if scales is None or found is None:
            return original(method, layer, *args, **kwargs)
        self._guarded("preparing K/V scales", _present, layer, found, scales)
        result = original(method, layer, *args, **kwargs)
        self._guarded("writing K/V scales", self._write, layer, found, scales)
        return result

    def load_file(
        self, original: Callable[..., Any], *, model: Any, kv_cache_dtype: str, **kwargs: Any
    ) -> Any:
        """Check scales that came from a JSON file instead of the checkpoint, one for K and V."""
        result = original(model=model, kv_cache_dtype=kv_cache_dtype, **kwargs)
        layers = self._guarded("looking for K/V scales", self._file_layers, model, kv_cache_dtype)
        if layers:
            with self._gate.model(layers):
                for module, found in layers:
                    scales = self._gate.layer(module, found)
                    if scales is not None:
                        module.k_scale, module.v_scale = scales.k, scales.v
        return result

    def _file_layers(
        self, model: Any, kv_cache_dtype: str
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        from sglang.srt.runtime_context import get_model

        if get_model().quantization_param_path is None:
            return []
        device = next(model.parameters()).device
        kv_format = _kv_format(kv_cache_dtype, None, Device.of(device))
        if kv_format is None:
            return []
        return [
            (module, LoadedScales(name, module.k_scale, module.v_scale, kv_format, device))
            for name, module in model.named_modules()
            if isinstance(getattr(module, "k_scale", None), float)
        ]

    def _guarded(self, doing: str, step: Callable[..., Any], *args: Any) -> Any:
        try:
            return step(*args)
        except Exception:
            self._gate.failed(f"{doing} of a layer")
            return None

    def _loaded_layers(
        self, model: Any, target_device: Any
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        layers = []
        try:
            from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

            for name, module in model.named_modules():
                method = getattr(module, "quant_method", None)
                if isinstance(method, BaseKVCacheMethod):
                    self._names[module] = name
                    found = self._find(method, module, target_device)
                    if found is not None:
                        layers.append((module, found))
        except Exception:
            self._gate.failed("looking for K/V scales in the model")
        return layers

    def _find(self, method: Any, layer: Any, target_device: Any = None) -> LoadedScales | None:
        """The raw scales of a layer; ``None`` where there is nothing to check."""
        from sglang.srt.runtime_context import get_model

        config = get_model()
        device = target_device or layer.k_scale.device
        kv_format = _kv_format(config.kv_cache_dtype, method.quant_config, Device.of(device))
        if kv_format is None or config.load_format == "dummy":
            return None
        return LoadedScales(
            layer=self._names.get(layer, f"layer {layer.layer_id}"),
            k=self._raw(layer, "k_scale"),
            v=self._raw(layer, "v_scale"),
            kv_cache_dtype=kv_format,
            device=device,
        )

    def _raw(self, layer: Any, name: str) -> torch.Tensor | None:
        scale = getattr(layer, name).detach()
        before = self._processed.get(layer, {}).get(name)
        if before is not None and scale.numel() == 1 and scale.item() == before.written:
            return before.raw
        return unless_marked(scale.cpu().clone())

    def _write(self, layer: Any, found: LoadedScales, scales: KVScales) -> None:
        """Every copy that SGLang keeps: the parameter and the host's float."""
        processed = {}
        for side in ("k", "v"):
            scale = getattr(scales, side)
            parameter = getattr(layer, f"{side}_scale")
            parameter.data.fill_(scale)
            setattr(layer, f"{side}_scale_float", scale)
            processed[f"{side}_scale"] = _Processed(getattr(found, side), parameter.item())
        self._processed[layer] = processed


def _kv_format(kv_cache_dtype: str, quant_config: Any, device: Device) -> str | None:
    """The format that the KV cache will have, ``None`` for one that we leave alone.

    ``auto`` follows the checkpoint where it declares FP8, and is unquantized elsewhere. On ROCm
    SGLang stores e5m2 as e4m3 too. (sglang 0.5.23, model_runner_components/kv_cache_dtype.py)
    """
    if kv_cache_dtype == "auto":
        declared = getattr(quant_config, "kv_cache_quant_algo", None)
        return "fp8_e4m3" if str(declared).upper() == "FP8" else None
    if kv_cache_dtype == "fp8_e5m2" and device.kind == "rocm":
        return "fp8_e4m3"
    return kv_cache_dtype if kv_cache_dtype in _FORMATS else None


def _present(layer: Any, found: LoadedScales, scales: KVScales) -> None:
    """Leave raw scales on the layer that SGLang's own processing understands."""
    k, v = found.k, found.v
    if scales.k_source == "default":
        k, v = _UNSET, _UNSET
    elif scales.k_source == "duplicated":
        k = v
    elif scales.v_source == "duplicated":
        v = k
    for parameter, raw in ((layer.k_scale, k), (layer.v_scale, v)):
        assert raw is not None
        parameter.data.fill_(float(raw))
