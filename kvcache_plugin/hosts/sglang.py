"""SGLang: K/V scales are checked in the files, and on the layers each time they are processed."""

from __future__ import annotations

import importlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, ref

import torch

from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVScaleError
from kvcache_plugin.hosts import fitting, seams, sglang_nvfp4, sglang_updates, sglang_writes
from kvcache_plugin.hosts.gate import LoadGate, start
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.loaded import LoadedScales, present
from kvcache_plugin.hosts.processed import name_of, raw_scales, remember, restore_raw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from weakref import ReferenceType

    from kvcache_plugin.hosts.seams import Seam
    from kvcache_plugin.scales import KVScales
    from kvcache_plugin.settings import Settings

#: SGLang's names for KV caches whose scales follow our rules; see ``_kv_format``.
_FORMATS: Final = ("fp8_e4m3", "fp8_e5m2", "nvfp4")
_SIDES: Final = ("k", "v")


def register() -> None:
    """SGLang's entry point; called in every process. It never raises."""
    start("SGLang", _hook)


def _hook(gate: LoadGate, _: Settings) -> None:
    # Without these the others have nothing to stand on.
    if not (_fits(gate, seams.SGLANG_HOOKS) and _fits(gate, seams.SGLANG_CONFIG)):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def problem_of(seam: Seam) -> str:
        # SGLang ignores a hook on a target that it has patched already, and does not say so.
        if seam.path in getattr(HookRegistry, "_patched", ()):
            return f"another plugin's hooks on {seam.path} are in place"
        return _problem(seam)

    if _fits(gate, seams.SGLANG_RANK):
        gate.log.speaks = _is_first_rank
    adapter = _Adapter(gate)
    wrappers = (
        *adapter.wrappers(),
        *sglang_updates.wrappers(gate.log, adapter, problem_of),
        *sglang_writes.wrappers(gate.log),
        *sglang_nvfp4.wrappers(gate.log, problem_of),
    )
    for seam, wrapper in wrappers:
        problem = problem_of(seam)
        if problem:
            gate.log.leave_out(seam, problem)
        else:
            HookRegistry.register(seam.path, wrapper, HookType.AROUND)


def _fits(gate: LoadGate, seam: Seam) -> bool:
    problem = _problem(seam)
    if problem:
        gate.log.leave_out(seam, problem)
    return not problem


def _problem(seam: Seam) -> str:
    """Why a seam cannot be used, empty where it can."""
    try:
        return fitting.check_module(seam, importlib.import_module(seam.module))
    except Exception as error:
        return f"{seam.module} cannot be imported: {type(error).__name__}: {error}"


def _is_first_rank() -> bool:
    from sglang.srt.runtime_context import get_parallel

    return not torch.distributed.is_initialized() or get_parallel().tp_rank == 0


class _Adapter:
    """The functions that are put around SGLang's own."""

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        self._log = gate.log
        self._names: WeakKeyDictionary[torch.nn.Module, str] = WeakKeyDictionary()
        self._loading: tuple[ReferenceType[torch.nn.Module], Load] | None = None
        #: Told of each refusal before it is raised.
        self.when_refused: Callable[[KVScaleError], None] = lambda error: None

    def known_layers(self) -> tuple[torch.nn.Module, ...]:
        """All layers with scales that were seen in this process."""
        return tuple(self._names)

    def expect(self, loading: tuple[torch.nn.Module, Load] | None) -> None:
        """Say which model is about to be loaded from which files, ``None`` for none."""
        self._loading = (ref(loading[0]), loading[1]) if loading is not None else None

    def wrappers(self) -> tuple[tuple[Seam, Callable[..., Any]], ...]:
        return (
            (seams.SGLANG_LAYER, self.process_layer),
            (seams.SGLANG_MODEL, self.process_model),
            (seams.SGLANG_RESTORE, self.restore_model),
            (seams.SGLANG_FILE, self.load_file),
            (seams.SGLANG_LOADER, self.choose_loader),
            (seams.SGLANG_LOAD, self.load_model),
            (seams.SGLANG_FILES, self.prepare_files),
        )

    def choose_loader(
        self, original: Callable[..., Any], load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Say which loaders are left alone: they bring processed weights, or none of a file."""
        loader = original(load_config, *args, **kwargs)
        self._log.guarded("looking at the loader", self._say_left_alone, loader)
        return loader

    def _say_left_alone(self, loader: Any) -> None:
        from sglang.srt.model_loader.loader import DefaultModelLoader
        from sglang.srt.runtime_context import get_model

        is_quantized = get_model().kv_cache_dtype in _FORMATS
        if is_quantized and not isinstance(loader, DefaultModelLoader):
            self._gate.leaves_alone(f"what {type(loader).__name__} loads")

    def load_model(
        self,
        original: Callable[..., Any],
        loader: Any,
        model_config: Any,
        model: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Know the model while its weights are loaded."""
        is_draft = bool(getattr(model_config, "is_draft_model", False))
        load = Load(str(getattr(model_config, "model_path", "")), is_draft)
        self.expect((model, load))
        return original(loader, model_config, model, *args, **kwargs)

    def prepare_files(
        self, original: Callable[..., Any], loader: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Check the files as soon as SGLang knows which they are, and before it reads one."""
        prepared = original(loader, *args, **kwargs)
        model = self._loading[0]() if self._loading is not None else None
        if self._loading is not None and model is not None:
            guarded, find = self._log.guarded, self._quantized_layers
            layers = guarded("looking for quantized caches", find, model)
            with self._refusals_told():
                self._gate.before_weights(self._loading[1], layers or [], prepared)
        return prepared

    def process_model(
        self,
        original: Callable[..., Any],
        model: Any,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        guarded, find = self._log.guarded, self._loaded_layers
        layers = guarded("looking for K/V scales", find, model, target_device) or []
        load = self._take_load(model)
        bare = guarded("looking for quantized caches", self._bare_layers, model) if load else []
        with self._refusals_told(), self._gate.model(layers, bare=bare or [], load=load):
            return original(model, target_device, *args, **kwargs)

    @contextmanager
    def _refusals_told(self) -> Iterator[None]:
        try:
            yield
        except KVScaleError as error:
            self.when_refused(error)
            raise

    def _take_load(self, model: Any) -> Load | None:
        """What is known of the files that the model was loaded from, once for each load."""
        loading, self._loading = self._loading, None
        return loading[1] if loading is not None and loading[0]() is model else None

    def _quantized_layers(self, model: Any) -> list[LoadedScales]:
        return [found for _, found in self._loaded_layers(model, None)] + self._bare_layers(model)

    def _bare_layers(self, model: Any) -> list[LoadedScales]:
        """Attention with a quantized cache for which the checkpoint declares no scales."""
        from sglang.srt.runtime_context import get_model

        dtype = get_model().kv_cache_dtype
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kv_format = _kv_format(dtype, getattr(model, "quant_config", None), Device.of(device))
        if kv_format is None or dtype == "auto":
            return []
        return [
            LoadedScales(name, None, None, kv_format, device, has_place=False)
            for name, module in model.named_modules()
            if hasattr(module, "layer_id") and getattr(module, "k_scale", module) is None
        ]

    def process_layer(
        self, original: Callable[..., Any], method: Any, layer: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Check one layer, let SGLang process it, and see that each copy has the result."""
        guarded = self._log.guarded
        scales = None
        found = guarded("looking for the K/V scales of a layer", self._find, method, layer)
        if found is not None:
            with self._refusals_told():
                scales = self._gate.layer(layer, found)
            if scales is not None:
                guarded("preparing the K/V scales of a layer", present, layer, found, scales)
        result = original(method, layer, *args, **kwargs)
        if found is not None and scales is not None:
            guarded("writing the K/V scales of a layer", _write, layer, found, scales)
        if found is None:
            guarded("remembering the K/V scales of a layer", self._remember_random, method, layer)
        self._gate.mark_processed(layer)
        return result

    def restore_model(
        self,
        original: Callable[..., Any],
        model: Any,
        target_device: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Put raw scales back before new ones are loaded over them, as SGLang does with weights."""
        self._log.guarded("restoring K/V scales", lambda: restore_raw(model.modules()))
        return original(model, target_device, *args, **kwargs)

    def load_file(
        self, original: Callable[..., Any], *, model: Any, kv_cache_dtype: str, **kwargs: Any
    ) -> Any:
        """Check scales that came from a JSON file instead of the checkpoint, one for K and V."""
        result = original(model=model, kv_cache_dtype=kv_cache_dtype, **kwargs)
        find = self._file_layers
        layers = self._log.guarded("looking for K/V scales", find, model, kv_cache_dtype)
        if layers:
            with self._gate.model(layers):
                for module, found in layers:
                    scales = self._gate.layer(module, found)
                    if scales is not None:
                        for side in _SIDES:
                            setattr(module, f"{side}_scale", getattr(scales, side))
        return result

    def _file_layers(
        self, model: Any, kv_cache_dtype: str
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        from sglang.srt.runtime_context import get_model

        if get_model().quantization_param_path is None:
            return []
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        kv_format = _kv_format(kv_cache_dtype, None, Device.of(device))
        if kv_format is None:
            return []
        return [
            (module, LoadedScales(name, module.k_scale, module.v_scale, kv_format, device))
            for name, module in model.named_modules()
            if isinstance(getattr(module, "k_scale", None), float)
        ]

    def _loaded_layers(
        self, model: Any, target_device: Any
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        from sglang.srt.layers.quantization.kv_cache import BaseKVCacheMethod

        layers = []
        for name, module in model.named_modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, BaseKVCacheMethod):
                self._names[module] = name
                find = (self._find, method, module, target_device)
                found = self._log.guarded("looking for the K/V scales of a layer", *find)
                if found is not None:
                    layers.append((module, found))
        return layers

    def _find(self, method: Any, layer: Any, target_device: Any = None) -> LoadedScales | None:
        """The raw scales of a layer; ``None`` where there is nothing to check."""
        from sglang.srt.runtime_context import get_model

        config = get_model()
        device = target_device or layer.k_scale.device
        kv_format = _kv_format(config.kv_cache_dtype, method.quant_config, Device.of(device))
        if kv_format is None or self._is_random(layer) or layer.k_scale.is_meta:
            return None
        k, v = raw_scales(layer)
        return LoadedScales(
            layer=self._name(layer),
            k=k,
            v=v,
            kv_cache_dtype=kv_format,
            device=device,
            dtype=layer.k_scale.dtype,
        )

    def _name(self, layer: Any) -> str:
        return self._names.get(layer, "") or name_of(layer) or f"layer {layer.layer_id}"

    def _is_random(self, layer: Any) -> bool:
        """The random weights that a dummy load begins with are no checkpoint's."""
        from sglang.srt.runtime_context import get_model

        return bool(get_model().load_format == "dummy" and self._gate.is_first_time(layer))

    def _remember_random(self, method: Any, layer: Any) -> None:
        """Know what to go back to where the first update after a dummy load is refused."""
        from sglang.srt.runtime_context import get_model

        device = Device.of(layer.k_scale.device)
        kv_format = _kv_format(get_model().kv_cache_dtype, method.quant_config, device)
        if kv_format is not None and self._is_random(layer) and not layer.k_scale.is_meta:
            remember(layer, self._name(layer))


def _write(layer: Any, found: LoadedScales, scales: KVScales) -> None:
    """Every copy that SGLang keeps: the parameter and the host's float."""
    for side in _SIDES:
        scale = getattr(scales, side)
        getattr(layer, f"{side}_scale").data.fill_(scale)
        setattr(layer, f"{side}_scale_float", scale)
    remember(layer, found.layer, found.k, found.v)


def _kv_format(kv_cache_dtype: str, quant_config: Any, device: Device) -> str | None:
    """The format that the KV cache will have, ``None`` for one that we leave alone.

    ``auto`` follows the checkpoint where it declares FP8, and is unquantized elsewhere. On ROCm
    SGLang stores e5m2 as e4m3 too. (sglang 0.5.23, ``configure_kv_cache_dtype``)
    """
    if kv_cache_dtype == "auto":
        declared = getattr(quant_config, "kv_cache_quant_algo", None)
        return "fp8_e4m3" if str(declared).upper() == "FP8" else None
    if kv_cache_dtype == "fp8_e5m2" and device.kind == "rocm":
        return "fp8_e4m3"
    return kv_cache_dtype if kv_cache_dtype in _FORMATS else None
