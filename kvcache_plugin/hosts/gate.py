"""What both engines' adapters share: every layer is checked before a load is refused.

An adapter says what it found on a layer and writes what it gets back; everything that is decided
in between is decided here.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

import torch

from kvcache_plugin import __version__
from kvcache_plugin.api import validate_kv_scales
from kvcache_plugin.errors import KVScaleError, add_note
from kvcache_plugin.scales import KVScales
from kvcache_plugin.settings import MODE, read_settings, report_problems

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_plugin.hosts.seams import Seam
    from kvcache_plugin.scales import Granularity

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Verdict: TypeAlias = KVScales | KVScaleError | None

#: What both engines put where a scale will be, until one is loaded.
UNSET: Final = -1.0
_MOST_LAYERS_LISTED: Final = 20

_started: set[str] = set()


def start(engine: str, hook: Callable[[LoadGate], None]) -> None:
    """Read the switches and hook an engine, once in a process. It never raises."""
    if engine in _started:
        return
    _started.add(engine)
    try:
        settings = read_settings()
        report_problems(settings)
        if settings.mode != "off":
            hook(LoadGate(engine, settings.mode))
    except Exception:
        logger.exception("kvcache_plugin cannot hook %s, which goes on without it", engine)


def leave_out(engine: str, seam: Seam, problem: str) -> None:
    """Warn that a seam is not used; those beside it stay."""
    logger.warning(
        "kvcache_plugin leaves out a seam of %s, which %s: %s", engine, seam.purpose, problem
    )


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
    return None if scale.numel() and bool((scale == UNSET).all()) else scale


def present(layer: Any, found: LoadedScales, scales: KVScales) -> None:
    """Leave raw scales on a layer that the engine's own processing understands.

    Each engine has ways of its own with a pair of which one side is unset, or both are not
    positive, so it gets to see a whole pair, or none.
    """
    k, v = found.k, found.v
    if scales.k_source == "default":
        k = v = UNSET
    elif scales.k_source == "duplicated":
        k = v
    elif scales.v_source == "duplicated":
        v = k
    for parameter, raw in ((layer.k_scale, k), (layer.v_scale, v)):
        parameter.data.copy_(torch.as_tensor(raw))


class LoadGate:
    """Checks the layers of the models that one engine process loads.

    :param engine: the engine's name, for the log.
    :param mode: ``"strict"`` or ``"warn"``, see ``settings.MODE``.
    """

    def __init__(self, engine: str, mode: str) -> None:
        self.engine = engine
        self._mode = mode
        self._announced = ""
        self._failures: set[str] = set()
        # What the pass over the whole model found, until each layer is processed.
        self._verdicts: WeakKeyDictionary[torch.nn.Module, _Verdict] = WeakKeyDictionary()
        self._processed: WeakSet[torch.nn.Module] = WeakSet()

    @contextmanager
    def model(self, layers: Sequence[tuple[torch.nn.Module, LoadedScales]]) -> Iterator[None]:
        """Check all layers at once, then let the engine process each of them.

        :raises KVScaleError: in strict mode, listing every corrupt layer.
        """
        try:
            for module, found in layers:
                self._verdicts[module] = self._check(found)
            self._announce_model(layers)
            self._judge(list(self._verdicts.values()))
            yield
        finally:
            self._verdicts.clear()

    def layer(self, module: torch.nn.Module, found: LoadedScales) -> KVScales | None:
        """The final scales of one layer, or ``None`` to leave the layer to the engine.

        :raises KVScaleError: in strict mode, for a layer that came without its whole model.
        """
        if module in self._verdicts:
            verdict = self._verdicts.pop(module)
        else:
            if not self._announced:
                self._announce("checks K/V scales layer by layer, as this loader processes them")
            verdict = self._check(found)
            self._judge([verdict])
        return verdict if isinstance(verdict, KVScales) else None

    def guarded(self, doing: str, step: Callable[..., T], *arguments: Any) -> T | None:
        """Take a step of ours that must not stop the engine: what it raises is logged, once."""
        try:
            return step(*arguments)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:  # also a plugin that calls sys.exit()
            if doing not in self._failures:
                logger.exception(
                    "kvcache_plugin %s failed while %s. %s goes on as it would without the plugin, "
                    "and K/V scales may be unchecked",
                    __version__,
                    doing,
                    self.engine,
                )
            self._failures.add(doing)
            return None

    def is_first_time(self, module: torch.nn.Module) -> bool:
        """Whether this layer has not been processed yet."""
        return module not in self._processed

    def mark_processed(self, module: torch.nn.Module) -> None:
        self._processed.add(module)

    def _check(self, found: LoadedScales) -> _Verdict:
        def check() -> KVScales | KVScaleError:
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
            except BaseException as error:
                add_note(error, f"the layer was {found.layer}")
                raise

        return self.guarded("checking K/V scales", check)

    def _judge(self, verdicts: Sequence[_Verdict]) -> None:
        errors = [verdict for verdict in verdicts if isinstance(verdict, KVScaleError)]
        if not errors:
            return
        problem, remedy = _summary(errors, len(verdicts))
        if self._mode == "strict":
            way_around = f"{MODE.name}=warn loads the checkpoint as it is"
            raise KVScaleError(
                f"kvcache_plugin refuses this checkpoint: {problem}",
                remedy=". ".join(filter(None, [remedy, way_around])),
            )
        logger.error(
            "%s=%s, so %s goes on as it would without the plugin: %s",
            MODE.name,
            self._mode,
            self.engine,
            KVScaleError(problem, remedy=remedy),
        )

    def _announce_model(self, layers: Sequence[tuple[torch.nn.Module, LoadedScales]]) -> None:
        checked = sum(verdict is not None for verdict in self._verdicts.values())
        if layers:
            found = layers[0][1]
            self._announce(
                f"checked the K/V scales of {checked} layer{'s' * (checked != 1)} "
                f"({found.kv_cache_dtype} on {found.device})"
            )
        elif not self._announced and not self._failures:
            self._announce("found no layer with K/V scales for a quantized KV cache")

    def _announce(self, what: str) -> None:
        """Say, in the engine's log, that the plugin is at work; the same thing once."""
        if what != self._announced:
            logger.info(
                "kvcache_plugin %s is active in %s, mode %s: %s",
                __version__,
                self.engine,
                self._mode,
                what,
            )
        self._announced = what


def _summary(errors: Sequence[KVScaleError], checked: int) -> tuple[str, str]:
    """The problem and the remedy of all corrupt layers, the first twenty by name."""
    of_all = f" in {len(errors)} of {checked} layers" if checked > 1 else ""
    lines = [f"  {error.layer}: {_with_notes(error)}" for error in errors[:_MOST_LAYERS_LISTED]]
    if len(errors) > _MOST_LAYERS_LISTED:
        lines.append(f"  and {len(errors) - _MOST_LAYERS_LISTED} more layers")
    remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
    return "\n".join([f"corrupt K/V scales{of_all}", *lines]), ". ".join(remedies)


def _with_notes(error: KVScaleError) -> str:
    return "; ".join([error.problem, *getattr(error, "__notes__", ())])
