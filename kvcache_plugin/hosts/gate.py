"""What both engines' adapters share: every layer is checked before a load is refused.

An adapter says what it found on a layer and writes what it gets back; everything that is decided
in between is decided here.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TypeAlias
from weakref import WeakKeyDictionary

from kvcache_plugin import __version__
from kvcache_plugin.api import validate_kv_scales
from kvcache_plugin.errors import KVScaleError
from kvcache_plugin.settings import MODE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import torch

    from kvcache_plugin.scales import Granularity, KVScales

logger = logging.getLogger(__name__)

_MOST_LAYERS_LISTED: Final = 20
_NOT_LOADED: Final = -1.0


@dataclass(frozen=True)
class LoadedScales:
    """The raw scales that a checkpoint left on one layer, ``None`` for a side that it has not.

    :param layer: the layer's name in the model.
    :param device: where the layer is served.
    """

    layer: str
    k: torch.Tensor | float | None
    v: torch.Tensor | float | None
    kv_cache_dtype: str
    device: torch.device
    granularity: Granularity = "tensor"
    num_kv_heads: int | None = None


def unless_marked(scale: torch.Tensor) -> torch.Tensor | None:
    """``None`` for the engines' marker of a scale that was not loaded: -1.0 in every element."""
    return None if scale.numel() and bool((scale == _NOT_LOADED).all()) else scale


class LoadGate:
    """Checks the layers of the models that one engine process loads.

    :param engine: the engine's name, for the log.
    :param mode: ``"strict"`` or ``"warn"``, see ``settings.MODE``.
    """

    def __init__(self, engine: str, mode: str) -> None:
        self._engine = engine
        self._mode = mode
        self._announced = False
        self._failed = False
        # What the pass over the whole model found, until each layer is processed.
        self._verdicts: WeakKeyDictionary[torch.nn.Module, _Verdict] = WeakKeyDictionary()

    @contextmanager
    def model(self, layers: Sequence[tuple[torch.nn.Module, LoadedScales]]) -> Iterator[None]:
        """Check all layers at once, then let the engine process each of them.

        :raises KVScaleError: in strict mode, listing every corrupt layer.
        """
        try:
            for module, found in layers:
                self._verdicts[module] = self._check(found)
            self._announce(f"checked the K/V scales of {_count(layers)}{_format_of(layers)}")
            errors = [v for v in self._verdicts.values() if isinstance(v, KVScaleError)]
            if errors:
                self._refuse(_one_error(errors, len(layers)))
            yield
        finally:
            self._verdicts.clear()

    def layer(self, module: torch.nn.Module, found: LoadedScales) -> KVScales | None:
        """The final scales of one layer, or ``None`` to leave the layer to the engine.

        :raises KVScaleError: in strict mode, for a layer that came without its whole model.
        """
        if module in self._verdicts:
            verdict = self._verdicts.pop(module)
            return None if isinstance(verdict, KVScaleError) else verdict
        self._announce("checks K/V scales layer by layer, as this loader processes them")
        verdict = self._check(found)
        if isinstance(verdict, KVScaleError):
            self._refuse(_one_error([verdict], 1))
            return None
        return verdict

    def failed(self, doing: str) -> None:
        """Log an exception of ours that must not stop the engine; call it while handling it."""
        if not self._failed:
            logger.exception(
                "kvcache_plugin %s failed while %s. %s goes on as it would without the plugin, and "
                "K/V scales may be unchecked; please report this",
                __version__,
                doing,
                self._engine,
            )
        self._failed = True

    def _check(self, found: LoadedScales) -> _Verdict:
        try:
            return validate_kv_scales(
                found.k,
                found.v,
                kv_cache_dtype=found.kv_cache_dtype,
                device=found.device,
                layer=found.layer,
                granularity=found.granularity,
                num_kv_heads=found.num_kv_heads,
            )
        except KVScaleError as error:
            return error
        except Exception:
            self.failed(f"checking the K/V scales of {found.layer}")
            return None

    def _refuse(self, error: KVScaleError) -> None:
        if self._mode == "strict":
            raise error
        logger.error("%s=%s, so the load goes on. %s", MODE.name, self._mode, error)

    def _announce(self, what: str) -> None:
        if not self._announced:
            logger.info(
                "kvcache_plugin %s is active in %s, mode %s: %s",
                __version__,
                self._engine,
                self._mode,
                what,
            )
        self._announced = True


if TYPE_CHECKING:
    _Verdict: TypeAlias = KVScales | KVScaleError | None


def _one_error(errors: Sequence[KVScaleError], checked: int) -> KVScaleError:
    """All corrupt layers in one error, the first twenty by name."""
    lines = [f"  {error.layer}: {_with_notes(error)}" for error in errors[:_MOST_LAYERS_LISTED]]
    if len(errors) > _MOST_LAYERS_LISTED:
        lines.append(f"  and {len(errors) - _MOST_LAYERS_LISTED} more layers")
    of_all = f" in {len(errors)} of {checked} layers" if checked > 1 else ""
    header = f"kvcache_plugin refuses this checkpoint: corrupt K/V scales{of_all}"
    return KVScaleError(
        "\n".join([header, *lines]),
        remedy=f"{errors[0].remedy}. {MODE.name}=warn loads the checkpoint as it is",
    )


def _with_notes(error: KVScaleError) -> str:
    return "; ".join([error.problem, *getattr(error, "__notes__", ())])


def _count(layers: Sequence[object]) -> str:
    return f"{len(layers)} layer{'s' * (len(layers) != 1)}"


def _format_of(layers: Sequence[tuple[torch.nn.Module, LoadedScales]]) -> str:
    if not layers:
        return ", since none has scales for a quantized KV cache"
    first = layers[0][1]
    return f" ({first.kv_cache_dtype} on {first.device})"
