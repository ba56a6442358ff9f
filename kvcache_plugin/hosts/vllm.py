"""vLLM: K/V scales are checked in the files, and on the layers before vLLM makes copies of them.

``register()`` imports nothing of vLLM: each seam is fitted when vLLM itself imports its module.
"""

from __future__ import annotations

import functools
import logging
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from kvcache_plugin.errors import KVScaleError
from kvcache_plugin.hosts import fitting, seams, vllm_layer
from kvcache_plugin.hosts.gate import LoadGate, start
from kvcache_plugin.hosts.late import when_imported
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.loaded import LoadedScales
from kvcache_plugin.hosts.vllm_writes import HookWrites

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvcache_plugin.hosts.seams import Seam
    from kvcache_plugin.settings import Settings

#: vLLM's names for the KV caches whose scales follow our rules. The others are left alone.
_FORMATS: Final = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "nvfp4": "nvfp4",
    "nvfp4_4over6": "nvfp4",
}


def register() -> None:
    """vLLM's entry point; called in every process, perhaps more than once. It never raises."""
    # vLLM shows the records of its own loggers alone: ours take its handlers and its level.
    logging.getLogger("kvcache_plugin").parent = logging.getLogger("vllm")
    start("vLLM", _hook)


def _hook(gate: LoadGate, settings: Settings) -> None:
    adapter = _Adapter(gate, HookWrites(gate.log, settings.vllm_writes, _FORMATS))
    for seam, fit in (
        (seams.VLLM_CONFIG, adapter.fit_config),
        (seams.VLLM_LAYER, adapter.fit_layers),
        (seams.VLLM_MODEL, adapter.fit_model),
        (seams.VLLM_MARKER, adapter.fit_marker),
        (seams.VLLM_LOAD, adapter.fit_load),
        (seams.VLLM_FILES, adapter.fit_files),
        (seams.VLLM_RELOAD, adapter.fit_reload),
        (seams.VLLM_RANK, adapter.fit_rank),
    ):
        if fitting.source_file(seam) is None:
            gate.log.leave_out(seam, f"there is no module {seam.module}")
        else:
            fit_it = functools.partial(_fit_if_it_fits, gate, seam, fit)
            when_imported(
                seam.module, functools.partial(gate.log.guarded, f"fitting {seam.path}", fit_it)
            )


def _fit_if_it_fits(
    gate: LoadGate, seam: Seam, fit: Callable[[ModuleType], None], module: ModuleType
) -> None:
    problem = fitting.check_module(seam, module)
    if problem:
        gate.log.leave_out(seam, problem)
    else:
        fit(module)


class _Adapter:
    """The functions that are put around vLLM's own."""

    def __init__(self, gate: LoadGate, writes: HookWrites) -> None:
        self._gate = gate
        self._log = gate.log
        self._writes = writes
        self._base_method: type | None = None
        self._current_config: Callable[[], Any] | None = None
        self._processing: set[int] = set()
        self._loading: tuple[Any, Load] | None = None
        self._loads: WeakKeyDictionary[torch.nn.Module, Load] = WeakKeyDictionary()
        self._seen: WeakSet[torch.nn.Module] = WeakSet()

    # Fitting

    def fit_config(self, module: ModuleType) -> None:
        self._current_config = module.get_current_vllm_config_or_none

    def fit_layers(self, module: ModuleType) -> None:
        """Wrap the method in every class that defines it, also in classes that come later."""
        base: Any = module.BaseKVCacheMethod
        own_init_subclass = vars(base).get("__init_subclass__")

        def init_subclass(cls: Any, /, **kwargs: Any) -> None:
            if own_init_subclass is not None:
                own_init_subclass.__func__(cls, **kwargs)
            else:
                super(base, cls).__init_subclass__(**kwargs)
            self._wrap_process(cls)

        base.__init_subclass__ = classmethod(init_subclass)
        waiting = [base]
        while waiting:
            cls = waiting.pop()
            self._wrap_process(cls)
            waiting += cls.__subclasses__()
        self._base_method = base

    def _wrap_process(self, cls: Any) -> None:
        original = vars(cls).get("process_weights_after_loading")
        if original is None:
            return

        @functools.wraps(original)
        def process_weights_after_loading(
            method: Any, layer: Any, *args: Any, **kwargs: Any
        ) -> Any:
            run = functools.partial(original, method, layer, *args, **kwargs)
            return self._process(method, layer, run)

        process_weights_after_loading.is_ours = True  # type: ignore[attr-defined]
        cls.process_weights_after_loading = process_weights_after_loading

    def fit_model(self, module: ModuleType) -> None:
        """Wrap the function, also where other modules have imported it by name."""
        original = module.process_weights_after_loading

        @functools.wraps(original)
        def process_weights_after_loading(
            model: Any, model_config: Any, target_device: Any, *args: Any, **kwargs: Any
        ) -> Any:
            guarded, find = self._log.guarded, self._loaded_layers
            layers = guarded("looking for K/V scales", find, model, target_device) or []
            bare = guarded("looking for quantized caches", self._bare_layers, model, target_device)
            load = guarded("looking for the load", self._load_of, model, model_config)
            with self._gate.model(layers, bare=bare or [], load=load):
                result = original(model, model_config, target_device, *args, **kwargs)
            guarded("letting the hook write a KV cache", self._writes.fit, model)
            return result

        _replace_everywhere(original, process_weights_after_loading)

    def fit_marker(self, module: ModuleType) -> None:
        """Mark scales as not loaded where vLLM starts from 1.0, which a checkpoint may bring."""
        cls: Any = module.CompressedTensorsKVCacheMethod
        original = cls.create_weights

        @functools.wraps(original)
        def create_weights(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            original(method, layer, *args, **kwargs)
            # Only where we will see the layer again, and turn the marker into 1.0.
            if getattr(method.process_weights_after_loading, "is_ours", False):
                self._log.guarded("marking K/V scales as not loaded", vllm_layer.mark, layer)

        cls.create_weights = create_weights

    def fit_load(self, module: ModuleType) -> None:
        """Know the model while its weights are loaded."""
        cls: Any = module.DefaultModelLoader
        original = cls.load_weights

        @functools.wraps(original)
        def load_weights(
            loader: Any, model: Any, model_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            is_draft = getattr(model_config, "runner_type", "") == "draft"
            load = Load(str(getattr(model_config, "model", "")), is_draft)
            self._loads[model] = load
            self._loading = (model, load)
            try:
                return original(loader, model, model_config, *args, **kwargs)
            finally:
                self._loading = None

        cls.load_weights = load_weights

    def fit_files(self, module: ModuleType) -> None:
        """Check the files as soon as vLLM knows which they are, and before it reads one."""
        cls: Any = module.DefaultModelLoader
        original = cls._prepare_weights

        @functools.wraps(original)
        def _prepare_weights(loader: Any, *args: Any, **kwargs: Any) -> Any:
            prepared = original(loader, *args, **kwargs)
            if self._loading is not None:
                model, load = self._loading
                find = self._quantized_layers
                layers = self._log.guarded("looking for quantized caches", find, model)
                self._gate.before_weights(load, layers or [], prepared)
            return prepared

        cls._prepare_weights = _prepare_weights

    def fit_reload(self, module: ModuleType) -> None:
        """Say what is corrupt once vLLM has put the model together again: it cannot go back."""
        original = module.finalize_layerwise_processing

        @functools.wraps(original)
        def finalize_layerwise_processing(
            model: Any, model_config: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with self._gate.one_by_one():
                return original(model, model_config, *args, **kwargs)

        _replace_everywhere(original, finalize_layerwise_processing)

    def fit_rank(self, module: ModuleType) -> None:
        self._log.speaks = lambda: (
            not torch.distributed.is_initialized() or module.get_tensor_model_parallel_rank() == 0
        )

    # Loading

    def _load_of(self, model: Any, model_config: Any) -> Load | None:
        """What is known of the files that a model was loaded from, once for each load."""
        is_first_time = model not in self._seen
        self._seen.add(model)
        load = self._loads.pop(model, None)
        if load is None and is_first_time and self._current_config is not None:
            config = self._current_config()
            load_format = config.load_config.load_format if config is not None else "unknown"
            name = str(getattr(model_config, "model", ""))
            load = Load(name, not_checked=f"load_format is {load_format}")
        return load

    def _quantized_layers(self, model: Any) -> list[LoadedScales]:
        return [found for _, found in self._loaded_layers(model, None)] + self._bare_layers(model)

    def _bare_layers(self, model: Any, target_device: Any = None) -> list[LoadedScales]:
        """Attention with a quantized cache for which the checkpoint declares no scales."""
        layers = []
        for module in model.modules():
            kv_format = _FORMATS.get(getattr(module, "kv_cache_dtype", ""))
            buffer = getattr(module, "_k_scale", None)
            if kv_format is None or buffer is None or hasattr(module, "k_scale"):
                continue
            device = target_device or buffer.device
            name = module.layer_name
            layers.append(LoadedScales(name, None, None, kv_format, device, has_place=False))
        return layers

    def _loaded_layers(
        self, model: Any, target_device: Any
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        base = self._base_method
        if base is None:
            return []
        layers = []
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            if isinstance(method, base):
                find = (self._find, method, module, target_device)
                found = self._log.guarded("looking for the K/V scales of a layer", *find)
                if found is not None:
                    layers.append((module, found))
        return layers

    def _process(self, method: Any, layer: Any, run: Callable[[], Any]) -> Any:
        """Check one layer, let vLLM process it, and see that each of its copies has the result."""
        if id(layer) in self._processing:
            return run()  # a subclass calls the method that it overrides
        self._processing.add(id(layer))
        try:
            guarded = self._log.guarded
            scales = None
            found = guarded("looking for the K/V scales of a layer", self._find, method, layer)
            if found is not None:
                try:
                    scales = self._gate.layer(layer, found)
                except KVScaleError:
                    if not self._gate.is_collecting:
                        raise
                    return self._keep(layer, run)
            guarded("preparing the K/V scales of a layer", vllm_layer.prepare, layer, found, scales)
            result = run()
            if scales is not None:
                guarded("writing the K/V scales of a layer", vllm_layer.write, layer, scales)
            self._gate.mark_processed(layer)
            return result
        finally:
            self._processing.discard(id(layer))

    def _keep(self, layer: Any, run: Callable[[], Any]) -> Any:
        """Let vLLM process a layer whose new scales are corrupt, and leave those that it served."""
        guarded = self._log.guarded
        kept = guarded("keeping the K/V scales of a layer", vllm_layer.take_away, layer)
        result = run()
        guarded("bringing the K/V scales of a layer back", vllm_layer.bring_back, layer, kept or {})
        return result

    def _find(self, method: Any, layer: Any, target_device: Any = None) -> LoadedScales | None:
        """The raw scales of a layer; ``None`` where there is nothing to check."""
        kv_format = _FORMATS.get(getattr(layer, "kv_cache_dtype", ""))
        if kv_format is None or not hasattr(layer, "k_scale") or self._is_random(layer):
            return None
        if layer.k_scale.is_meta:
            return None  # the weights come processed from another process, which has checked them
        scheme = getattr(method.quant_config, "kv_cache_scheme", None) or {}
        per_head = scheme.get("strategy") == "attn_head"
        return LoadedScales(
            layer=layer.layer_name,
            k=vllm_layer.raw(layer, "k_scale"),
            v=vllm_layer.raw(layer, "v_scale"),
            kv_cache_dtype=kv_format,
            device=target_device or layer.k_scale.device,
            granularity="head" if per_head else "tensor",
            num_kv_heads=layer.num_kv_heads if per_head else None,
            dtype=layer.k_scale.dtype,
            q=vllm_layer.raw(layer, "q_scale"),
            prob=vllm_layer.raw(layer, "prob_scale"),
        )

    def _is_random(self, layer: Any) -> bool:
        """Whether the weights are the random ones that a dummy load begins with.

        Where it cannot be told they count as such: a random scale must not stop a load.
        """
        if self._current_config is None:
            return True
        config = self._current_config()
        is_dummy = config is not None and config.load_config.load_format == "dummy"
        return is_dummy and self._gate.is_first_time(layer)


def _replace_everywhere(original: Callable[..., Any], ours: Callable[..., Any]) -> None:
    """Put a function in another's place, also where modules have imported it by name."""
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    for module in modules:
        for name, value in list(vars(module).items()):
            if value is original:
                setattr(module, name, ours)
