"""What both engines' adapters share: every layer is checked before a load is refused.

An adapter says what it found on a layer and writes what it gets back; everything that is decided
in between is decided here.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from kvcache_plugin import __version__
from kvcache_plugin.api import validate_kv_scales
from kvcache_plugin.device import Device
from kvcache_plugin.errors import CheckpointError, KVScaleError, add_note, shown
from kvcache_plugin.formats import FP8_E4M3, FP8_E4M3FNUZ
from kvcache_plugin.hosts.coverage import (
    StoredScales,
    as_loaded,
    assign,
    describe,
    files_of,
    lost_scales,
    read_stored,
)
from kvcache_plugin.hosts.load_report import LoadFacts, ReportFile, gather
from kvcache_plugin.scales import KVScales, ScaleSite, check_attention_scales
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
    from kvcache_plugin.hosts.seams import Seam

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Verdict: TypeAlias = KVScales | KVScaleError | None

_MOST_LAYERS_LISTED: Final = 20
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
        logger.exception("kvcache_plugin cannot hook %s, which goes on without it", engine)


def leave_out(engine: str, seam: Seam, problem: str) -> None:
    """Warn that a seam is not used; those beside it stay."""
    logger.warning(
        "kvcache_plugin leaves out a seam of %s, which %s: %s", engine, seam.purpose, problem
    )


@dataclass
class Load:
    """One load of one model from files: what is known of it until the model is processed.

    :param model: the path or name that the engine was given.
    :param is_draft: whether the model predicts further tokens and is not the model itself.
    :param stored: what the files hold, one item for each place that the model is loaded from.
    :param not_checked: why the files were not compared with the layers, empty when they were.
    :param said: layers that have been logged as corrupt.
    """

    model: str = ""
    is_draft: bool = False
    stored: list[StoredScales] = field(default_factory=list)
    not_checked: str = ""
    said: set[str] = field(default_factory=set)


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
        self.engine = engine
        #: Whether this process says what others with the same layers would say too.
        self.speaks: Callable[[], bool] = lambda: True
        self._mode = mode
        self._coverage = coverage
        self._report = ReportFile(report, engine, mode, coverage)
        self._announced = ""
        self._failures: set[str] = set()
        # What the pass over the whole model found, until each layer is processed.
        self._verdicts: WeakKeyDictionary[torch.nn.Module, _Verdict] = WeakKeyDictionary()
        # What was found on layers one by one, while they belong together.
        self._together: list[_Verdict] | None = None
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
        stored = self.guarded(reading, self._read, load, layers[0], prepared)
        if stored is None:
            load.not_checked = load.not_checked or "reading the files failed"
            return
        load.stored.append(stored)
        checking = "checking the K/V scales of the files"
        errors = self.guarded(checking, self._check_files, load, stored, layers)
        if not errors:
            return
        if self._mode != "strict":
            load.said.update(error.layer for error in errors)
            self._say_corrupt(errors, len(layers))
            return
        refusal = self._refusal(errors, len(layers), "no weight has been read yet")
        facts = self.guarded(_GATHERING, self._facts, load, layers, errors, ())
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
            looking = "comparing the K/V scales of the files with those of the layers"
            lost = self.guarded(looking, self._lost, load, all_layers) or ()
            facts = self.guarded(_GATHERING, self._facts, load, all_layers, verdicts, lost)
            known, facts = load or Load(), facts or LoadFacts()
            summing_up = "summing a load up"
            self.guarded(summing_up, self._announce_model, facts, known, len(layers), len(bare))
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
                    raise self._refusal([verdict], 1)
                self._say_corrupt([verdict], 1)
        return verdict if isinstance(verdict, KVScales) else None

    @property
    def goes_on(self) -> bool:
        """Whether a corrupt layer is told later, with all others."""
        return self._together is not None

    @contextmanager
    def one_by_one(self) -> Iterator[None]:
        """Layers that the engine processes by themselves, and that belong together.

        :raises KVScaleError: in strict mode, at the end, listing every corrupt layer.
        """
        verdicts = self._together = []
        try:
            yield
        finally:
            self._together = None
        errors = [verdict for verdict in verdicts if isinstance(verdict, KVScaleError)]
        if errors and self._mode == "strict":
            raise self._refusal(errors, len(verdicts))

    def leaves_alone(self, what: str) -> None:
        """Say in one line that a kind of load is left alone."""
        self._announce(f"leaves alone {what}")

    def say(self, level: int, message: str, *arguments: object) -> None:
        """Log what others with the same layers would say too: only one of them is heard."""
        if self.guarded("asking for the rank of this process", self.speaks) is False:
            level = logging.DEBUG
        logger.log(level, message, *arguments)

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
            self.say(
                logging.WARNING,
                "kvcache_plugin cannot check the K/V scales in the files before %s loads them, and "
                "checks them afterwards: %s",
                self.engine,
                error,
            )
            return None

    def _check_files(
        self, load: Load, stored: StoredScales, layers: Sequence[LoadedScales]
    ) -> list[KVScaleError]:
        from kvcache_plugin.checkpoint.judge import quiet  # there by now, with the scanner

        assigned = assign(stored.layers, layers, is_draft=load.is_draft)
        errors = []
        for module, of_module in assigned.items():
            found = as_loaded(module, of_module[0], self.engine)
            if found is not None:
                with quiet():  # what is no error is said after loading
                    verdict = self._check(found)
                if isinstance(verdict, KVScaleError):
                    errors.append(verdict)
        return errors

    def _lost(self, load: Load | None, layers: Sequence[LoadedScales]) -> tuple[LostScale, ...]:
        if load is None or not layers:
            return ()
        found: list[LostScale] = []
        for stored in load.stored:
            assigned = assign(stored.layers, layers, is_draft=load.is_draft)
            found += lost_scales(assigned, self.engine)
            if stored.layers and not assigned and not load.is_draft and not load.not_checked:
                load.not_checked = "no layer of the model has a name that the files' scales have"
        return tuple(found)

    # Verdicts

    def _check(self, found: LoadedScales) -> _Verdict:
        def check() -> _Verdict:
            try:
                scales = _or_error(_validate, found)
                attention = _or_error(_check_attention, found)
            except BaseException as error:
                add_note(error, f"the layer was {found.layer}")
                raise
            errors = [one for one in (scales, attention) if isinstance(one, KVScaleError)]
            return _as_one(errors) if errors else scales

        return self.guarded("checking K/V scales", check)

    def _judge_model(self, verdicts: Sequence[_Verdict], facts: LoadFacts, load: Load) -> None:
        """Stop the load where it is to be stopped, and log what is wrong where it is not.

        :raises KVScaleError: see ``model``.
        """
        errors = [verdict for verdict in verdicts if isinstance(verdict, KVScaleError)]
        lost = _lost_error(facts) if facts.lost else None
        refusal = None
        if errors and self._mode == "strict":
            refusal = self._refusal(errors, len(verdicts))
        elif not load.said.issuperset(error.layer for error in errors):
            self._say_corrupt(errors, len(verdicts))
        if lost is not None and self._coverage == "error":
            way_around = f"{COVERAGE.name}=warn loads it as it is"
            refusal = refusal or _refused(lost, way_around)
        elif lost is not None:
            self.say(logging.WARNING, "kvcache_plugin: %s", lost)
        self._record(facts, errors, refusal)
        if refusal is not None:
            raise refusal

    def _refusal(self, errors: Sequence[KVScaleError], of: int, note: str = "") -> KVScaleError:
        problem, remedy = _summary(errors, of)
        way_around = f"{MODE.name}=warn loads the checkpoint as it is"
        return _refused(KVScaleError(problem, remedy=remedy), way_around, note)

    def _say_corrupt(self, errors: Sequence[KVScaleError], of: int) -> None:
        """Log what is corrupt and does not stop the load."""
        problem, remedy = _summary(errors, of)
        self.say(
            logging.ERROR,
            "%s=%s, so %s goes on as it would without the plugin: %s",
            MODE.name,
            self._mode,
            self.engine,
            KVScaleError(problem, remedy=remedy),
        )

    # What is said

    def _facts(
        self,
        load: Load | None,
        layers: Sequence[LoadedScales],
        verdicts: Sequence[_Verdict],
        lost: tuple[LostScale, ...],
    ) -> LoadFacts:
        facts = gather(
            layers,
            [verdict for verdict in verdicts if isinstance(verdict, KVScales)],
            checked=sum(verdict is not None for verdict in verdicts),
            model=load.model if load else "",
        )
        return replace(facts, coverage=_coverage(load, layers, lost), lost=lost)

    def _announce_model(self, facts: LoadFacts, load: Load, layers: int, bare: int) -> None:
        if layers:
            self._announce(facts.summary)
        elif bare:
            all_of_them = f"{bare} layer{'s' * (bare != 1)} with {facts.kv_cache_dtype} caches"
            self._announce(
                "found no layer with K/V scales for a quantized KV cache: the engine makes no "
                f"place for scales in {all_of_them}, which run with 1.0; {facts.coverage}"
            )
        elif not self._announced and not self._failures:
            why = f"; {load.not_checked}" if load.not_checked else ""
            self._announce(f"found no layer with K/V scales for a quantized KV cache{why}")

    def _announce(self, what: str) -> None:
        """Say, in the engine's log, that the plugin is at work; the same thing once."""
        if what != self._announced:
            self.say(
                logging.INFO,
                "kvcache_plugin %s is active in %s, mode %s: %s",
                __version__,
                self.engine,
                self._mode,
                what,
            )
        self._announced = what

    def _record(
        self, facts: LoadFacts, errors: Sequence[KVScaleError], refusal: KVScaleError | None
    ) -> None:
        """Put a load into the report."""
        problems = tuple(f"{error.layer}: {_with_notes(error)}" for error in errors)
        refused = str(refusal) if refusal is not None else ""
        whole = replace(facts, problems=problems, refused=refused)
        self.guarded("writing the report", self._report.add, whole)


def _or_error(check: Callable[[LoadedScales], T], found: LoadedScales) -> T | KVScaleError:
    try:
        return check(found)
    except KVScaleError as error:
        return error


def _validate(found: LoadedScales) -> KVScales:
    return validate_kv_scales(
        found.k,
        found.v,
        kv_cache_dtype=found.kv_cache_dtype,
        device=found.device,
        layer=found.layer,
        granularity=found.granularity,
        num_kv_heads=found.num_kv_heads,
    )


def _check_attention(found: LoadedScales) -> None:
    """Check the scales that go with those of K and V; they are of FP8, whatever the cache is of."""
    if found.q is None and found.prob is None:
        return
    fp8 = FP8_E4M3FNUZ if Device.of(found.device).is_fnuz else FP8_E4M3
    site = ScaleSite(fp8, found.layer, found.granularity, found.num_kv_heads)
    check_attention_scales(found.q, found.prob, site)


def _as_one(errors: Sequence[KVScaleError]) -> KVScaleError:
    """What is wrong with one layer."""
    first, *others = errors
    if not others:
        return first
    remedies = dict.fromkeys(error.remedy for error in errors)
    return KVScaleError(
        "; ".join(map(_with_notes, errors)), layer=first.layer, remedy=". ".join(remedies)
    )


def _lost_error(facts: LoadFacts) -> KVScaleError:
    return KVScaleError(
        describe(facts.lost),
        remedy="A scale that does not arrive counts as absent. kvcache-plugin check "
        f"{shown(facts.model)} says what each engine makes of its scales, and what to do",
    )


def _refused(error: KVScaleError, way_around: str, note: str = "") -> KVScaleError:
    why = f" ({note})" if note else ""
    return KVScaleError(
        f"kvcache_plugin refuses this checkpoint{why}: {error.problem}",
        remedy=". ".join(filter(None, [error.remedy, way_around])),
    )


def _summary(errors: Sequence[KVScaleError], of: int) -> tuple[str, str]:
    """The problem and the remedy of all corrupt layers, the first twenty by name."""
    of_all = f" in {len(errors)} of {of} layers" if of > 1 else ""
    lines = [f"  {error.layer}: {_with_notes(error)}" for error in errors[:_MOST_LAYERS_LISTED]]
    if len(errors) > _MOST_LAYERS_LISTED:
        lines.append(f"  and {len(errors) - _MOST_LAYERS_LISTED} more layers")
    remedies = dict.fromkeys(error.remedy for error in errors if error.remedy)
    return "\n".join([f"corrupt K/V scales{of_all}", *lines]), ". ".join(remedies)


def _coverage(load: Load | None, layers: Sequence[LoadedScales], lost: Sequence[LostScale]) -> str:
    """What came of the comparison with the files, in words."""
    if load is None or not layers:
        return ""
    if lost:
        return f"scales in the files did not arrive on {len(lost)} layer{'s' * (len(lost) != 1)}"
    if load.not_checked:
        return f"the files were not compared with them: {load.not_checked}"
    if not load.stored:
        return "the files were not compared with them"
    unread = [file for stored in load.stored for file in stored.unread]
    if unread:
        return f"the files were not compared with them: {shown(unread[0])} was not read"
    if any(stored.layers for stored in load.stored):
        return "every scale in the files arrived"
    unknown = [name for stored in load.stored for name in stored.unknown]
    alike = f" by a known name ({shown(unknown[0])} looks like one)" if unknown else ""
    return f"the files hold no K/V scale{alike}, and every layer runs with 1.0"


def _with_notes(error: KVScaleError) -> str:
    return "; ".join([error.problem, *getattr(error, "__notes__", ())])
