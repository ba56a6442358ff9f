"""Who is timed: a copy, plain torch, every implementation that serves the device, and peers."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import torch

from kvcache_plugin import calls
from kvcache_plugin.bench.inputs import DTYPE, Inputs, bytes_per_token
from kvcache_plugin.bench.peers import all_peers
from kvcache_plugin.conformance.candidate import Candidate
from kvcache_plugin.device import Device
from kvcache_plugin.errors import KVCacheError
from kvcache_plugin.manager import Manager
from kvcache_plugin.settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvcache_plugin.explaining import Implementation
    from kvcache_plugin.formats import KVFormat
    from kvcache_plugin.hosts.peers import Call, Peer
    from kvcache_plugin.quantized import QuantizedKV

Direction: TypeAlias = Literal["quantize", "dequantize"]
Kind: TypeAlias = Literal["copy", "torch", "implementation", "peer"]

DIRECTIONS: Final[tuple[Direction, ...]] = ("quantize", "dequantize")
COPY: Final = "copy"


@dataclass(frozen=True)
class Contestant:
    """One way to do it.

    :param distribution: name and version of what brings it, empty for torch's own.
    :param how: what is called.
    :param prepare: makes a call ready for inputs, and need not be timed.
    :param sides: how many of K and V a call takes; its time counts for one of them.
    """

    name: str
    kind: Kind
    distribution: str
    how: str
    prepare: Callable[[Inputs], Call]
    sides: int = 1


@dataclass(frozen=True)
class Absent:
    """Somebody who is not timed.

    :param is_broken: whether that is a fault of its own.
    """

    name: str
    kind: Kind
    reason: str
    is_broken: bool = False


@dataclass(frozen=True)
class Contest:
    """Those who do the same.

    :param bytes_read: of a token: of K where it is quantized, else of its codes and block scales.
    :param bytes_written: likewise.
    """

    kv_cache_dtype: str
    direction: Direction
    bytes_read: int
    bytes_written: int
    contestants: tuple[Contestant, ...]
    absent: tuple[Absent, ...]


class PassedError(Exception):
    """An implementation passed on what it says it serves."""

    def __init__(self) -> None:
        super().__init__("it passes on K and V that it says it serves")


def contests(
    device: torch.device, names: Sequence[str], *, with_peers: bool
) -> tuple[Contest, ...]:
    """A contest for each format and direction.

    :param names: of the formats; ``"fp8"`` is what the device stores under that name.
    :raises KVCacheError: for a format that nobody brings.
    """
    manager = Manager(read_settings().block)
    manager.discover()
    hardware = Device.of(device)
    stored: dict[str, KVFormat] = {}
    for name in names:
        kv_format = manager.kv_format(name, hardware)
        if kv_format is None:
            raise calls.unknown_format(manager, name, KVCacheError)
        stored[kv_format.name] = kv_format
    found = manager.implementations
    candidates = {each.name: _candidate(each, found, device) for each in found if not each.left_out}
    peers = all_peers() if with_peers else ()
    return tuple(
        _contest(kv_format, direction, found, candidates, peers, device)
        for kv_format in stored.values()
        for direction in DIRECTIONS
    )


def _candidate(
    found: Implementation, all_found: Sequence[Implementation], device: torch.device
) -> Candidate:
    others = frozenset(each.name for each in all_found) - {found.name}
    return Candidate.installed(found.name, others, device)


def _contest(
    kv_format: KVFormat,
    direction: Direction,
    found: Sequence[Implementation],
    candidates: dict[str, Candidate],
    peers: Sequence[Peer],
    device: torch.device,
) -> Contest:
    of_k, of_codes = bytes_per_token(kv_format)
    moved = (of_k, of_codes) if direction == "quantize" else (of_codes, of_k)
    contestants = [_copy(sum(moved)), *_plain_torch(kv_format, direction)]
    absent: list[Absent] = []
    serving: list[Candidate] = []
    for each in found:
        refusal = _why_not(each, candidates, kv_format, direction)
        if refusal is not None:
            absent.append(refusal)
            continue
        candidate = candidates[each.name]
        serving.append(candidate)
        how = candidate.describe(kv_format).how
        prepare = _quantizing if direction == "quantize" else _dequantizing
        contestants.append(
            Contestant(
                each.name,
                "implementation",
                each.distribution,
                how,
                partial(prepare, candidate, kv_format),
            )
        )
    for peer in peers:
        why = _why_not_peer(peer, kv_format, direction, device)
        if why is None:
            contestants.append(_of_peer(peer, kv_format, direction))
        elif why:
            absent.append(Absent(peer.name, "peer", why))
    return Contest(kv_format.name, direction, *moved, tuple(contestants), tuple(absent))


def _why_not(
    found: Implementation,
    candidates: dict[str, Candidate],
    kv_format: KVFormat,
    direction: Direction,
) -> Absent | None:
    """Why an implementation is not timed, ``None`` where it is."""
    absent = partial(Absent, found.name, "implementation")
    if found.left_out:
        return absent(found.left_out, found.is_broken)
    candidate = candidates[found.name]
    if candidate.kv_format(kv_format.name) is None:
        return absent(f"does not know {kv_format.name}, which another one brings")
    unclear = candidate.unclear(kv_format)
    if unclear:
        return absent(unclear, is_broken=True)
    if f"{direction}_kv" not in candidate.hooks(kv_format):
        return absent(candidate.why_not(kv_format))
    return None


# Each of these makes a call ready.


def _copy(bytes_moved: int) -> Contestant:
    def prepare(inputs: Inputs) -> Call:
        size = inputs.tokens * bytes_moved // 2
        shape = (inputs.count, size)
        source, target = (
            torch.ones(shape, dtype=torch.uint8, device=inputs.device).unbind() for _ in range(2)
        )
        return lambda i: target[i].copy_(source[i])

    return Contestant(
        COPY,
        "copy",
        "",
        "copies as many bytes as are to be moved: reads half, writes half",
        prepare,
    )


def _plain_torch(kv_format: KVFormat, direction: Direction) -> Iterator[Contestant]:
    """FP8 as it is written down; of NVFP4 that is what the CPU reference does."""
    if kv_format.family != "fp8":
        return
    largest, dtype = kv_format.largest, kv_format.torch_dtype

    def quantize(inputs: Inputs) -> Call:
        keys, scale = inputs.keys, inputs.scale(kv_format)
        return lambda i: (keys[i] / scale).clamp(-largest, largest).to(dtype)

    def dequantize(inputs: Inputs) -> Call:
        scale = inputs.scale(kv_format)
        codes = (inputs.first_tokens / scale).clamp(-largest, largest).to(dtype)
        data = inputs.repeated(codes)
        return lambda i: (data[i].float() * scale).to(DTYPE)

    if direction == "quantize":
        how = "(k / scale).clamp(-largest, largest).to(fp8)"
        yield Contestant("plain_torch", "torch", "", how, quantize)
    else:
        how = "(codes.float() * scale).to(bfloat16)"
        yield Contestant("plain_torch", "torch", "", how, dequantize)


def _quantizing(candidate: Candidate, kv_format: KVFormat, inputs: Inputs) -> Call:
    keys, scale, out = inputs.keys, inputs.scale(kv_format), inputs.empty(kv_format)

    def call(i: int) -> None:
        if candidate.quantize(keys[i], scale, kv_format, out[i]) is None:
            raise PassedError

    return call


def _dequantizing(candidate: Candidate, kv_format: KVFormat, inputs: Inputs) -> Call:
    codes = inputs.codes(_sample(candidate, kv_format, inputs))

    def call(i: int) -> None:
        if candidate.dequantize(codes[i], DTYPE) is None:
            raise PassedError

    return call


def _sample(candidate: Candidate, kv_format: KVFormat, inputs: Inputs) -> QuantizedKV:
    """Codes to dequantize, of the implementation itself."""
    sample = candidate.quantize(inputs.first_tokens, inputs.scale(kv_format), kv_format)
    if sample is None:
        raise PassedError
    return sample


# Peers


def _why_not_peer(
    peer: Peer, kv_format: KVFormat, direction: Direction, device: torch.device
) -> str | None:
    """Why a peer is not timed; empty where it has nothing to do here, ``None`` where it is."""
    does_it = peer.quantize if direction == "quantize" else peer.dequantize
    if device.type not in peer.kinds or kv_format.name not in peer.formats or does_it is None:
        return ""
    return None if peer.version is not None else "not installed"


def _of_peer(peer: Peer, kv_format: KVFormat, direction: Direction) -> Contestant:
    prepare = peer.quantize if direction == "quantize" else peer.dequantize
    assert prepare is not None

    def ready(inputs: Inputs) -> Call:
        return prepare(inputs.keys, inputs.scale(kv_format), kv_format.name)

    distribution = f"{peer.project} {peer.version}"
    return Contestant(peer.name, "peer", distribution, peer.how, ready, peer.sides)
