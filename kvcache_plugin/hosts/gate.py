"""What both engines' adapters share: every layer is checked before a load is refused.

An adapter says what it found on a layer and writes what it gets back; everything that is decided
in between is decided here.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary, WeakSet

from kvcache_plugin import __version__
from kvcache_plugin.errors import (
    CheckpointError,
    KVScaleError,
    add_note,
    anchored,
    counted,
    sentences,
    without_place,
)
from kvcache_plugin.hosts import refusals
from kvcache_plugin.hosts.coverage import StoredScales, as_loaded, assign, files_of, read_stored
from kvcache_plugin.hosts.engine_log import EngineLog
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.load_report import LoadFacts, ReportFile, gather
from kvcache_plugin.hosts.verdicts import Verdict, errors_among, judge
from kvcache_plugin.scales import KVScales
from kvcache_plugin.settings import (
    COVERAGE,
    MODE,
    REPORT,
    Settings,
    read_settings,
    report_problems,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch

    from kvcache_plugin.hosts.coverage import LostScale
    from kvcache_plugin.hosts.loaded import LoadedScales

logger = logging.getLogger(__name__)

_GATHERING: Final = "putting a report together"

_started: set[str] = set()


def start(engine: str, hook: Callable[[LoadGate, Settings], None]) -> None:
    """Read the switches and hook an engine, once in a process. It never raises."""
    if engine in _started:
        return
    _started.add(engine)
    try:
        settings = read_settings()
        report_problems(settings)
        if settings.mode != "off":
            gate = LoadGate(engine, settings.mode, settings.coverage, settings.report)
            hook(gate, settings)
    except Exception:
        logger.exception(
            anchored("kvcache_plugin cannot hook %s, which goes on without it", "not-hooked"),
            engine,
        )


class LoadGate:
    """Checks the layers of the models that one engine process loads.

    :param engine: the engine's name, for the log.
    :param mode: ``"strict"`` or ``"warn"``, see ``settings.MODE``.
    :param coverage: ``"warn"`` or ``"error"``, see ``settings.COVERAGE``.
    :param report: see ``settings.REPORT``.
    """

    def __init__(
        self,
        engine: str,
        mode: str,
        coverage: str = COVERAGE.default,
        report: str = REPORT.default,
    ) -> None:
        self.log = EngineLog(engine)
        self._mode = mode
        self._coverage = coverage
        self._report = ReportFile(report, mode, coverage, self.log)
        self._announced = ""
        # What the pass over the whole model found, until each layer is processed.
        self._verdicts: WeakKeyDictionary[torch.nn.Module, Verdict] = WeakKeyDictionary()
        # What was found on layers one by one, while they belong together.
        self._together: list[Verdict] | None = None
        self._processed: WeakSet[torch.nn.Module] = WeakSet()

    def before_weights(
        self, load: Load, layers: Sequence[LoadedScales], prepared: Sequence[Any]
    ) -> None:
        """Check the scales in the files before the engine reads the first weight.

        What is not certain from the files alone is left to the check after loading.

        :param layers: all layers with a quantized cache.
        :param prepared: what the engine's loader is about to read, see ``files_of``.
        :raises KVScaleError: in strict mode, listing every corrupt layer.
        """
        if not layers:
            return
        reading = "reading the K/V scales of the files"
        stored = self.log.guarded(reading, self._read, load, layers[0], prepared)
        if stored is None:
            load.not_checked = load.not_checked or "reading the files failed"
            return
        load.stored.append(stored)
        checking = "checking the K/V scales of the files"
        errors = self.log.guarded(checking, self._check_files, load, stored, layers)
        if not errors:
            return
        if self._mode != "strict":
            load.said.update(error.layer for error in errors)
            self._say_corrupt(errors, len(layers))
            return
        refusal = refusals.refusal(errors, len(layers), "no weight has been read yet")
        facts = self.log.guarded(_GATHERING, self._facts, load, layers, errors, ())
        self._record(facts or LoadFacts(), errors, refusal)
        raise refusal

    @contextmanager
    def model(
        self,
        layers: Sequence[tuple[torch.nn.Module, LoadedScales]],
        *,
        bare: Sequence[LoadedScales] = (),
        load: Load | None = None,
    ) -> Iterator[None]:
        """Check all layers at once, then let the engine process each of them.

        :param bare: layers with a quantized cache and no place for scales.
        :param load: what is known of the files, ``None`` where the engine loads from none.
        :raises KVScaleError: in strict mode, listing every corrupt layer; where
            ``KVCACHE_PLUGIN_COVERAGE`` says so, listing every layer that a scale did not reach.
        """
        try:
            for module, found in layers:
                self._verdicts[module] = self._check(found)
            verdicts = list(self._verdicts.values())
            all_layers = [*(found for _, found in layers), *bare]
            lost = self._lost(load, all_layers)
            facts = self.log.guarded(_GATHERING, self._facts, load, all_layers, verdicts, lost)
            known, facts = load or Load(), facts or LoadFacts()
            summing_up = "summing a load up"
            self.log.guarded(summing_up, self._announce_model, facts, known, len(layers), len(bare))
            self._judge_model(verdicts, facts, known)
            yield
        finally:
            self._verdicts.clear()

    def layer(self, module: torch.nn.Module, found: LoadedScales) -> KVScales | None:
        """The final scales of one layer, or ``None`` to leave the layer to the engine.

        :raises KVScaleError: in strict mode, for a layer that came without its whole model. Inside
            ``one_by_one`` the engine may go on with the next one.
        """
        if module in self._verdicts:
            verdict = self._verdicts.pop(module)
        else:
            if not self._announced:
                self._announce("checks K/V scales layer by layer, as this loader processes them")
            verdict = self._check(found)
            if self._together is not None:
                self._together.append(verdict)
            if isinstance(verdict, KVScaleError):
                if self._mode == "strict":
                    raise refusals.refusal([verdict], 1)
                self._say_corrupt([verdict], 1)
        return verdict if isinstance(verdict, KVScales) else None

    @property
    def is_collecting(self) -> bool:
        """Whether a corrupt layer is told later, with all others."""
        return self._together is not None

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Layers that the engine processes by themselves, and that belong together.

        :raises KVScaleError: in strict mode, at the end, listing every corrupt layer.
        """
        verdicts: list[Verdict] = []
        self._together = verdicts
        try:
            yield
        except Exception as error:  # the engine's own; what we have found may be its cause
            for corrupt in errors_among(verdicts):
                add_note(error, str(corrupt))
            raise
        finally:
            self._together = None
        errors = errors_among(verdicts)
        if errors and self._mode == "strict":
            raise refusals.refusal(errors, len(verdicts))

    def leaves_alone(self, what: str) -> None:
        """Say in one line that a kind of load is left alone."""
        self._announce(f"leaves alone {what}")

    def is_first_time(self, module: torch.nn.Module) -> bool:
        """Whether this layer has not been processed yet."""
        return module not in self._processed

    def mark_processed(self, module: torch.nn.Module) -> None:
        self._processed.add(module)

    # The files

    def _read(
        self, load: Load, layer: LoadedScales, prepared: Sequence[Any]
    ) -> StoredScales | None:
        folder, files = files_of(prepared)
        if files is None:
            load.not_checked = "the weights are no safetensors files"
            return None
        try:
            return read_stored(
                folder, files, kv_cache_dtype=layer.kv_cache_dtype, device=layer.device
            )
        except CheckpointError as error:
            load.not_checked = "the files could not be read"
            self.log.say(
                logging.WARNING,
                anchored(
                    "kvcache_plugin cannot check the K/V scales in the files before %s loads them, "
                    "and checks them afterwards: %s",
                    "files-not-checked",
                ),
                self.log.engine,
                without_place(str(error)),
            )
            return None

    def _check_files(
        self, load: Load, stored: StoredScales, layers: Sequence[LoadedScales]
    ) -> list[KVScaleError]:
        from kvcache_plugin.checkpoint.judge import quiet  # there by now, with the scanner

        assigned = assign(stored.layers, layers, is_draft=load.is_draft)
        errors = []
        for module, of_module in assigned.items():
            found = as_loaded(module, of_module[0], self.log.engine)
            if found is not None:
                with quiet():  # what is no error is said after loading
                    verdict = self._check(found)
                if isinstance(verdict, KVScaleError):
                    errors.append(verdict)
        return errors

    def _lost(self, load: Load | None, layers: Sequence[LoadedScales]) -> tuple[LostScale, ...]:
        if load is None or not layers:
            return ()
        comparing = "comparing the K/V scales of the files with those of the layers"
        return self.log.guarded(comparing, load.compare, layers, self.log.engine) or ()

    # Verdicts

    def _check(self, found: LoadedScales) -> Verdict:
        return self.log.guarded("checking K/V scales", judge, found)

    def _judge_model(self, verdicts: Sequence[Verdict], facts: LoadFacts, load: Load) -> None:
        """Stop the load where it is to be stopped, and log what is wrong where it is not.

        :raises KVScaleError: see ``model``.
        """
        errors = errors_among(verdicts)
        lost = refusals.lost_error(facts.lost, facts.model) if facts.lost else None
        refusal = None
        if errors and self._mode == "strict":
            refusal = refusals.refusal(errors, len(verdicts))
        elif not load.said.issuperset(error.layer for error in errors):
            self._say_corrupt(errors, len(verdicts))
        if lost is not None and self._coverage == "error":
            refusal = refusal or refusals.lost_refusal(lost)
        elif lost is not None:
            self.log.say(logging.WARNING, "%s", f"kvcache_plugin: {lost}")
        self._record(facts, errors, refusal)
        if refusal is not None:
            raise refusal

    def _say_corrupt(self, errors: Sequence[KVScaleError], of: int) -> None:
        """Log what is corrupt and does not stop the load."""
        self.log.say(
            logging.ERROR,
            anchored(
                "%s=%s, so %s goes on as it would without the plugin: %s", "corrupt-scales-served"
            ),
            MODE.name,
            self._mode,
            self.log.engine,
            sentences(*refusals.corrupt(errors, of)),
        )

    # What is said

    def _facts(
        self,
        load: Load | None,
        layers: Sequence[LoadedScales],
        verdicts: Sequence[Verdict],
        lost: tuple[LostScale, ...],
    ) -> LoadFacts:
        facts = gather(
            layers,
            [verdict for verdict in verdicts if isinstance(verdict, KVScales)],
            checked=sum(verdict is not None for verdict in verdicts),
            model=load.model if load else "",
        )
        coverage = load.coverage(lost) if load and layers else ""
        return replace(facts, coverage=coverage, lost=lost)

    def _announce_model(self, facts: LoadFacts, load: Load, layers: int, bare: int) -> None:
        if layers:
            self._announce(facts.summary)
        elif bare:
            all_of_them = f"{counted(bare, 'layer')} with {facts.kv_cache_dtype} caches"
            self._announce(
                "found no layer with K/V scales for a quantized KV cache: the engine makes no "
                f"place for scales in {all_of_them}, which run with 1.0; {facts.coverage}"
            )
        elif not self._announced and not self.log.has_failed:
            why = f"; {load.not_checked}" if load.not_checked else ""
            self._announce(f"found no layer with K/V scales for a quantized KV cache{why}")

    def _announce(self, what: str) -> None:
        """Say, in the engine's log, that the plugin is at work; the same thing once."""
        if what != self._announced:
            self.log.say(
                logging.INFO,
                anchored("kvcache_plugin %s is active in %s, mode %s: %s", "active"),
                __version__,
                self.log.engine,
                self._mode,
                what,
            )
        self._announced = what

    def _record(
        self, facts: LoadFacts, errors: Sequence[KVScaleError], refusal: KVScaleError | None
    ) -> None:
        """Put a load into the report.

        :param errors: what is corrupt, an error for each layer.
        :param refusal: what stops the load, ``None`` where nothing does.
        """
        problems = tuple(map(refusals.line, errors))
        refused = str(refusal) if refusal is not None else ""
        whole = replace(facts, problems=problems, refused=refused)
        self.log.guarded("writing the report", self._report.add, whole)
