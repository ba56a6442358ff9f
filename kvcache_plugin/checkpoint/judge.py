"""Puts the pair of each layer through ``validate_kv_scales``, as the engines do."""

from __future__ import annotations

import logging
import math
import re
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import torch

from kvcache_plugin import formats
from kvcache_plugin.api import validate_kv_scales
from kvcache_plugin.checkpoint.collector import MOST_VALUES
from kvcache_plugin.checkpoint.report import LayerScales
from kvcache_plugin.errors import KVScaleError, shown
from kvcache_plugin.tensor_kinds import holds_numbers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvcache_plugin.checkpoint.collector import FoundScale
    from kvcache_plugin.checkpoint.declaration import Declaration
    from kvcache_plugin.checkpoint.model_shape import ModelShape
    from kvcache_plugin.device import Device
    from kvcache_plugin.scales import Granularity

_INDEX: Final = re.compile(r"(?P<stack>.*)\.(?P<index>\d{1,9})(?:\..*)?")
#: How the names of stacks of draft layers begin.
_DRAFTS: Final = ("mtp", "draft", "eagle", "nextn", "medusa", "speculator")


@dataclass(frozen=True)
class Judge:
    """Checks layers for one format and device.

    :param kv_cache_dtype: the format's name, as the device stores it.
    """

    kv_cache_dtype: str
    device: Device
    declaration: Declaration
    shape: ModelShape

    def layer(self, module: str, scales: Sequence[FoundScale]) -> LayerScales:
        """The verdict on one layer.

        :param module: the attention module.
        :param scales: its K and V scales, of one side perhaps several.
        """
        k, v = _pick(scales, ("k", "kv")), _pick(scales, ("v",))
        located = _INDEX.fullmatch(module)
        stack, index = (located["stack"], int(located["index"])) if located else (module, None)
        layer = LayerScales(
            layer=module,
            stack=stack,
            index=index,
            is_draft=self._is_draft(stack, index),
            stored_k=k.stored if k else None,
            stored_v=v.stored if v else None,
        )
        for scale in filter(None, (k, v)):
            if scale.tensor is None:
                return _unread(layer, scale)
        return self._judge(layer, _raw(k), _raw(v))

    def _judge(
        self, layer: LayerScales, k: torch.Tensor | None, v: torch.Tensor | None
    ) -> LayerScales:
        granularity, heads = self._granularity(layer)
        try:
            served = validate_kv_scales(
                k,
                v,
                kv_cache_dtype=self.kv_cache_dtype,
                device=self.device,
                layer=layer.layer,
                granularity=granularity,
                num_kv_heads=heads,
            )
        except KVScaleError as error:
            problem = _with_markers(error.problem or str(error), layer)
            return replace(layer, refusal=problem, refused_as=_kind(k, v, granularity, heads))
        return replace(
            layer,
            k_scale=_floats(served.k),
            v_scale=_floats(served.v),
            k_source=served.k_source,
            v_source=served.v_source,
        )

    def _granularity(self, layer: LayerScales) -> tuple[Granularity, int | None]:
        """As declared; where ``config.json`` has no number of heads, the tensor's own counts."""
        scheme = self.declaration.scheme
        if scheme is None or not scheme.per_head or self.kv_cache_dtype == formats.NVFP4.name:
            return "tensor", None
        stored = {scale.shape[0] for scale in layer.stored if scale.shape}
        heads = stored & set(self.shape.kv_heads) or self.shape.kv_heads or stored
        return "head", max(1, *heads)

    def _is_draft(self, stack: str, index: int | None) -> bool:
        if any(part.startswith(_DRAFTS) for part in stack.lower().split(".")):
            return True
        layers = self.shape.num_layers
        if layers is None or index is None:
            return False
        return layers <= index < layers + self.shape.draft_layers


@contextmanager
def quiet() -> Iterator[None]:
    """Keep this thread's warnings about single pairs out of the log: they are in the report."""
    thread = threading.get_ident()

    def passes(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger = logging.getLogger("kvcache_plugin.scales")
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def _pick(scales: Sequence[FoundScale], sides: tuple[str, ...]) -> FoundScale | None:
    """The tensor of a side: of several, the one that most engines find, and one of its own."""

    def worth(scale: FoundScale) -> tuple[int, bool, bool]:
        stored = scale.stored
        engines = sum(verdict.finds for verdict in stored.engines)
        return engines, stored.role == "scale", stored.side != "kv"

    return max((s for s in scales if s.stored.side in sides), key=worth, default=None)


def _unread(layer: LayerScales, scale: FoundScale) -> LayerScales:
    stored = scale.stored
    if math.prod(stored.shape) > MOST_VALUES:
        problem = f"{shown(stored.name)} has shape {stored.shape}, too large for a scale"
        return replace(layer, refusal=problem, refused_as="wrong-shape")
    problem = (
        f"{shown(stored.name)} has dtype {stored.dtype}, which torch {torch.__version__} lacks"
    )
    return replace(layer, refusal=problem, refused_as="wrong-dtype")


def _kind(
    k: torch.Tensor | None, v: torch.Tensor | None, granularity: Granularity, heads: int | None
) -> str:
    """What is wrong with a pair that is refused: dtype, shape, or values."""
    tensors = [tensor for tensor in (k, v) if tensor is not None]
    if not all(holds_numbers(tensor.dtype) for tensor in tensors):
        return "wrong-dtype"
    shapes = ((heads,), (heads, 1, 1))
    fits = (
        tuple(tensor.shape) in shapes if granularity == "head" else tensor.numel() == 1
        for tensor in tensors
    )
    return "corrupt-scale" if all(fits) else "wrong-shape"


def _with_markers(problem: str, layer: LayerScales) -> str:
    """The problem of a pair, with what is stored where the rules were told that nothing is."""
    for side, scale in (("k", layer.stored_k), ("v", layer.stored_v)):
        if scale is not None and scale.is_marker:
            problem = problem.replace(
                f"{side}_scale=unset",
                f"{side}_scale={scale.values[0]!r} (which engines take for unset)",
            )
    return problem


def _raw(scale: FoundScale | None) -> torch.Tensor | None:
    """A multiplier as the rules take it, ``None`` where it counts as not loaded."""
    if scale is None or scale.tensor is None or not holds_numbers(scale.tensor.dtype):
        return scale.tensor if scale else None
    if scale.stored.is_marker:
        return None
    tensor = scale.tensor.double()
    return tensor.reciprocal() if scale.stored.meaning == "reciprocal" else tensor


def _floats(scale: float | torch.Tensor) -> tuple[float, ...]:
    return tuple(scale.tolist()) if isinstance(scale, torch.Tensor) else (scale,)
