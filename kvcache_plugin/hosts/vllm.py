"""vLLM: K/V scales are checked after loading and before vLLM makes its own copies of them.

``register()`` imports nothing of vLLM: each seam is fitted when vLLM itself imports its module.
"""

from __future__ import annotations

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any, Final

from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.gate import LoadedScales, LoadGate, unless_marked
from kvcache_plugin.hosts.late import when_imported
from kvcache_plugin.settings import read_settings, report_problems

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    import torch

    from kvcache_plugin.hosts.seams import Seam
    from kvcache_plugin.scales import KVScales

logger = logging.getLogger(__name__)

_SIDES: Final = ("k", "v")
_UNSET: Final = -1.0
#: vLLM's names for KV caches whose scales follow our rules. Those that are not here are
#: unquantized, or quantized with scales that no checkpoint brings.
_FORMATS: Final = {
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "nvfp4": "nvfp4",
    "nvfp4_4over6": "nvfp4",
}

_registered = False


def register() -> None:
    """vLLM's entry point; called in every process, perhaps more than once. It never raises."""
    global _registered
    if _registered:
        return
    _registered = True
    try:
        _register()
    except Exception:
        logger.exception("kvcache_plugin could not register itself; vLLM goes on without it")


def _register() -> None:
    settings = read_settings()
    # vLLM shows the records of its own loggers alone: ours take its handlers and its level.
    logging.getLogger("kvcache_plugin").parent = logging.getLogger("vllm")
    report_problems(settings)
    if settings.mode == "off":
        return
    adapter = _Adapter(LoadGate("vLLM", settings.mode))
    for seam, fit in (
        (seams.VLLM_CONFIG, adapter.fit_config),
        (seams.VLLM_LAYER, adapter.fit_layers),
        (seams.VLLM_MODEL, adapter.fit_model),
        (seams.VLLM_MARKER, adapter.fit_marker),
    ):
        if seams.source_file(seam) is None:
            _leave_out(seam, f"there is no module {seam.module}")
        else:
            when_imported(seam.module, functools.partial(_fit_if_it_fits, seam, fit))


def _leave_out(seam: Seam, problem: str) -> None:
    logger.warning("kvcache_plugin leaves out a step of vLLM (it %s): %s", seam.purpose, problem)


def _fit_if_it_fits(seam: Seam, fit: Callable[[ModuleType], None], module: ModuleType) -> None:
    try:
        problem = seams.check_module(seam, module)
        if problem:
            _leave_out(seam, problem)
        else:
            fit(module)
    except Exception:
        logger.exception("kvcache_plugin could not fit %s; vLLM goes on without it", seam.path)


class _Adapter:
    """The functions that are put around vLLM's own."""

    def __init__(self, gate: LoadGate) -> None:
        self._gate = gate
        self._base_method: type | None = None
        self._current_config: Callable[[], Any] | None = None
        self._processing: set[int] = set()

    # Fitting

    def fit_config(self, module: ModuleType) -> None:
        self._current_config = module.get_current_vllm_config_or_none

    def fit_layers(self, module: ModuleType) -> None:
        """Wrap the method in every class that defines it, also in classes that come later."""
        base: Any = module.BaseKVCacheMethod
        self._base_method = base
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

        cls.process_weights_after_loading = process_weights_after_loading

    def fit_model(self, module: ModuleType) -> None:
        """Wrap the function, also where other modules have imported it by name."""
        original = module.process_weights_after_loading

        @functools.wraps(original)
        def process_weights_after_loading(
            model: Any, model_config: Any, target_device: Any, *args: Any, **kwargs: Any
        ) -> Any:
            with self._gate.model(self._loaded_layers(model, target_device)):
                return original(model, model_config, target_device, *args, **kwargs)

        for other in list(sys.modules.values()):
            if getattr(other, "__name__", "").startswith("vllm."):
                for name, value in list(vars(other).items()):
                    if value is original:
                        setattr(other, name, process_weights_after_loading)

    def fit_marker(self, module: ModuleType) -> None:
        """Mark scales as not loaded where vLLM starts from 1.0, which a checkpoint may bring."""
        if self._base_method is None:
            return  # nobody would turn the marker into 1.0 again
        cls: Any = module.CompressedTensorsKVCacheMethod
        original = cls.create_weights

        @functools.wraps(original)
        def create_weights(method: Any, layer: Any, *args: Any, **kwargs: Any) -> None:
            original(method, layer, *args, **kwargs)
            for side in _SIDES:
                getattr(layer, f"{side}_scale").data.fill_(_UNSET)

        cls.create_weights = create_weights

    # Loading

    def _loaded_layers(
        self, model: Any, target_device: Any
    ) -> list[tuple[torch.nn.Module, LoadedScales]]:
        layers = []
        try:
            for module in model.modules():
                method = getattr(module, "quant_method", None)
                if self._base_method is not None and isinstance(method, self._base_method):
                    found = self._find(method, module, target_device)
                    if found is not None:
                        layers.append((module, found))
        except Exception:
            self._gate.failed("looking for K/V scales in the model")
        return layers

    def _process(self, method: Any, layer: Any, run: Callable[[], Any]) -> Any:
        """Check one layer, let vLLM process it, and see that each of its copies has the result."""
        if id(layer) in self._processing:
            return run()
        self._processing.add(id(layer))
        try:
            scales = self._scales(method, layer)
            result = run()
            if scales is not None:
                self._write(layer, scales)
            return result
        finally:
            self._processing.discard(id(layer))

    def _scales(self, method: Any, layer: Any) -> KVScales | None:
        """The final scales, with the layer's raw ones made such that vLLM takes them."""
        scales = None
        try:
            found = self._find(method, layer, None)
        except Exception:
            found = None
            self._gate.failed("looking for the K/V scales of a layer")
        if found is not None:
            scales = self._gate.layer(layer, found)
        try:
            _present(layer, scales)
        except Exception:
            self._gate.failed("preparing the K/V scales of a layer")
        return scales

    def _find(self, method: Any, layer: Any, target_device: Any) -> LoadedScales | None:
        """The raw scales of a layer; ``None`` where there is nothing to check."""
        kv_format = _FORMATS.get(getattr(layer, "kv_cache_dtype", ""))
        if kv_format is None or not hasattr(layer, "k_scale") or not self._from_checkpoint():
            return None
        scheme = getattr(method.quant_config, "kv_cache_scheme", None) or {}
        per_head = scheme.get("strategy") == "attn_head"
        return LoadedScales(
            layer=layer.layer_name,
            k=unless_marked(layer.k_scale.detach()),
            v=unless_marked(layer.v_scale.detach()),
            kv_cache_dtype=kv_format,
            device=target_device or layer.k_scale.device,
            granularity="head" if per_head else "tensor",
            num_kv_heads=layer.num_kv_heads if per_head else None,
        )

    def _from_checkpoint(self) -> bool:
        """Whether the weights are a checkpoint's, and not the random ones of a dummy load."""
        if self._current_config is None:
            return False  # it cannot be told, and a random scale must not stop a load
        config = self._current_config()
        return config is None or config.load_config.load_format != "dummy"

    def _write(self, layer: Any, scales: KVScales) -> None:
        try:
            _write(layer, scales)
        except Exception:
            self._gate.failed("writing the K/V scales of a layer")


def _present(layer: Any, scales: KVScales | None) -> None:
    """Leave raw scales on the layer that vLLM's own processing understands.

    It reads a pair of which one is unset, or both are not positive, in ways of its own. A marker
    of ours that no checkpoint has overwritten becomes vLLM's own default again.
    """
    if not hasattr(layer, "k_scale"):
        return
    k, v = layer.k_scale.data, layer.v_scale.data
    if scales is not None and scales.k_source == "default":
        k.fill_(_UNSET)
        v.fill_(_UNSET)
    elif scales is not None and scales.k_source == "duplicated":
        k.copy_(v)
    elif scales is not None and scales.v_source == "duplicated":
        v.copy_(k)
    if _starts_from_one(layer):
        for side in (k, v):
            side[side == _UNSET] = 1.0


def _starts_from_one(layer: Any) -> bool:
    """Whether vLLM's default for this layer's raw scales is 1.0 and not a marker."""
    return hasattr(layer, "k_zero_point")


def _write(layer: Any, scales: KVScales) -> None:
    """Every copy that vLLM keeps: the buffer, the host's float and the host's tensor."""
    if scales.k_source == "default":
        return  # vLLM has written 1.0 itself
    for side in _SIDES:
        scale = getattr(scales, side)
        getattr(layer, f"_{side}_scale").copy_(scale)
        # Of per-head scales vLLM keeps the largest on the host.
        number = scale if isinstance(scale, float) else float(scale.max())
        setattr(layer, f"_{side}_scale_float", number)
        getattr(layer, f"_{side}_scale_cpu").fill_(number)
