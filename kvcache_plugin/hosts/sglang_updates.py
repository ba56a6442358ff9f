"""SGLang: weights that are updated, or were away, while a model is being served.

An update with corrupt scales is answered with an error, and the server goes on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kvcache_plugin.errors import KVScaleError, anchored, sentences
from kvcache_plugin.hosts import seams
from kvcache_plugin.hosts.load import Load
from kvcache_plugin.hosts.processed import restore_ours

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Protocol

    import torch

    from kvcache_plugin.hosts.engine_log import EngineLog
    from kvcache_plugin.hosts.seams import Seam

    class Checks(Protocol):
        """What checks the scales of the models in this process."""

        when_refused: Callable[[KVScaleError], None]

        def expect(self, loading: tuple[torch.nn.Module, Load] | None) -> None: ...

        def known_layers(self) -> tuple[torch.nn.Module, ...]: ...


def wrappers(
    log: EngineLog, checks: Checks, problem_of: Callable[[Seam], str]
) -> tuple[tuple[Seam, Callable[..., Any]], ...]:
    """What is put around SGLang's functions.

    :param problem_of: why a seam cannot be used, empty where it can.
    """
    updates = _Updates(log, checks)
    around: list[tuple[Seam, Callable[..., Any]]] = [
        (seams.SGLANG_DISK_UPDATE, updates.update_from_disk),
        (seams.SGLANG_IPC_UPDATE, updates.update_from_ipc),
        (seams.SGLANG_END_ANSWER, updates.answer),
        (seams.SGLANG_RESUME, updates.resume),
    ]
    # Without the answer nobody would hear of the refusal.
    if not problem_of(seams.SGLANG_END_ANSWER):
        around.append((seams.SGLANG_END_UPDATE, updates.end_update))
    return tuple(around)


class _Updates:
    """The functions that are put around SGLang's own."""

    def __init__(self, log: EngineLog, checks: Checks) -> None:
        self._log = log
        self._checks = checks
        # Of the update that is going on: what was refused, and what a refusal undoes at once.
        # In words: an error would keep what was on the stack when it was raised.
        self._refusals: list[str] = []
        self._undo: Callable[[], None] = lambda: None
        checks.when_refused = self._note

    def _note(self, error: KVScaleError) -> None:
        self._refusals.append(sentences(error.problem, error.remedy))
        self._undo()

    def update_from_disk(
        self,
        original: Callable[..., Any],
        updater: Any,
        model_path: str,
        load_format: str,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Check the files before a weight is read, and let SGLang go back to those it had.

        It would read the refused ones again for that, and die of the second refusal.
        """
        before = getattr(updater.model_config, "model_path", "")

        def go_back() -> None:
            updater.model_config.model_path = before

        self._refusals.clear()
        self._log.guarded("looking at an update", self._expect, updater, model_path)
        self._undo = go_back
        try:
            return original(updater, model_path, load_format, *args, **kwargs)
        finally:
            self._undo = lambda: None
            self._checks.expect(None)

    def _expect(self, updater: Any, model_path: str) -> None:
        is_draft = bool(getattr(updater.model_config, "is_draft_model", False))
        self._checks.expect((updater.get_model(), Load(model_path, is_draft)))

    def end_update(
        self, original: Callable[..., Any], updater: Any, *, run_post_load: bool, **kwargs: Any
    ) -> Any:
        """Process an update with the scales from before it, where its own are refused.

        The scheduler would die of the refusal; ``answer`` hands it to the client.
        """
        try:
            return original(updater, run_post_load=run_post_load, **kwargs)
        except KVScaleError:
            restore_ours(updater.get_model().modules())
            # What comes before the processing has been done.
            return original(updater, run_post_load=False, **kwargs)

    def answer(
        self, original: Callable[..., Any], manager: Any, recv_req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        self._refusals.clear()
        answer = original(manager, recv_req, *args, **kwargs)
        if not self._refusals:
            return answer
        message = self._say("the scales from before it stay, beside its other weights")
        return type(answer)(success=False, message=message)

    def update_from_ipc(
        self, original: Callable[..., Any], updater: Any, recv_req: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Say that an update is refused where SGLang only logs what its processing raises."""
        self._refusals.clear()
        answer = original(updater, recv_req, *args, **kwargs)
        if not self._refusals:
            return answer
        layers = updater.get_model().modules()
        self._log.guarded("putting K/V scales back", restore_ours, layers)
        return False, self._say(
            "from the first corrupt layer on nothing is processed, so update again"
        )

    def _say(self, what_now: str) -> str:
        message = anchored(
            f"{self._refusals[0]}. The update is refused: {what_now}", "update-refused"
        )
        self._log.say(logging.ERROR, "%s", message)
        return message

    def resume(
        self,
        original: Callable[..., Any],
        model: Any,
        static_params: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Let scales stand again whose memory a memory saver has released.

        Zeros that it leaves there would count as a checkpoint's.
        """
        result = original(model, static_params, *args, **kwargs)
        # Of further models, drafts for instance, nobody brings anything back.
        layers: Iterable[Any] = {*model.modules(), *self._checks.known_layers()}
        self._log.guarded("putting K/V scales back", restore_ours, layers)
        return result
