"""Which hardware a name, a torch device or a tensor stands for."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

import kvcache_plugin as kv
from kvcache_plugin import Device

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType


def parts(device: Any) -> tuple[str, str, tuple[int, int] | None]:
    return device.kind, device.arch, device.capability


# Names.


@pytest.mark.parametrize(
    ("name", "arch", "capability"),
    [
        ("sm_80", "sm_80", (8, 0)),
        ("sm_86", "sm_86", (8, 6)),
        ("sm_89", "sm_89", (8, 9)),
        ("sm_90", "sm_90", (9, 0)),
        ("sm_90a", "sm_90", (9, 0)),
        ("sm_100", "sm_100", (10, 0)),
        ("sm_100a", "sm_100", (10, 0)),
        ("sm_100f", "sm_100", (10, 0)),
        ("sm_103", "sm_103", (10, 3)),
        ("sm_103a", "sm_103", (10, 3)),
        ("sm_107", "sm_107", (10, 7)),
        ("sm_110", "sm_110", (11, 0)),
        ("sm_120", "sm_120", (12, 0)),
        ("sm_121", "sm_121", (12, 1)),
        ("sm90", "sm_90", (9, 0)),
        ("SM_90", "sm_90", (9, 0)),
        (" sm_90\n", "sm_90", (9, 0)),
    ],
)
def test_cuda_names(name: str, arch: str, capability: tuple[int, int]) -> None:
    assert parts(Device.parse(name)) == ("cuda", arch, capability)
    assert str(Device.parse(name)) == arch


@pytest.mark.parametrize(
    ("name", "arch"),
    [
        ("gfx942", "gfx942"),
        ("gfx942:sramecc+:xnack-", "gfx942"),
        ("GFX942", "gfx942"),
        (" gfx942 ", "gfx942"),
        ("gfx90a", "gfx90a"),
        ("gfx90a:sramecc+:xnack-", "gfx90a"),
        ("gfx950", "gfx950"),
        ("gfx1100", "gfx1100"),
        ("gfx1200", "gfx1200"),
    ],
)
def test_rocm_names(name: str, arch: str) -> None:
    assert parts(Device.parse(name)) == ("rocm", arch, None)
    assert str(Device.parse(name)) == arch


@pytest.mark.parametrize("name", ["cpu", "CPU", " cpu", "cpu:0"])
def test_cpu(name: str) -> None:
    assert Device.parse(name) == Device("cpu")
    assert parts(Device.parse(name)) == ("cpu", "", None)
    assert str(Device.parse(name)) == "cpu"


def test_other_torch_devices() -> None:
    assert Device.parse("meta") == Device("meta")
    assert str(Device.parse("meta")) == "meta"
    assert Device.parse("xpu:0") == Device("xpu")
    assert Device.parse("xpu:1") == Device.parse("xpu")


@pytest.mark.parametrize(
    "name",
    [
        *("", " ", "gpu", "nvidia", "sm", "sm_", "sm_9", "sm_x", "sm_90x", "sm_90 a", "sm_9.0"),
        *("compute_90", "gfx", "gfx9", "gfx94", "gfxyyy", "gfx942 mi300", "mi300x", "9.0", "90"),
        *("cuda:x", "cuda:-1", "cuda:1:2", "cuda,0", "cpu cpu"),
    ],
)
def test_garbage_names(name: str) -> None:
    with pytest.raises(kv.KVCacheError) as caught:
        Device.parse(name)
    message = str(caught.value)
    assert repr(name) in message
    for known in ("cpu", "sm_90", "gfx942", "cuda:0"):
        assert known in message


@pytest.mark.parametrize("thing", [None, 0, 90, (9, 0), b"cpu", object(), ["cpu"], torch.float32])
def test_what_is_no_device(thing: Any) -> None:
    with pytest.raises(kv.KVCacheError) as caught:
        Device.of(thing)
    assert repr(thing) in str(caught.value)
    assert "sm_90" in str(caught.value)


# Tensors, torch devices and devices.


def test_of_takes_every_form() -> None:
    cpu = Device("cpu")
    assert Device.of("cpu") == Device.of(torch.device("cpu")) == Device.of(torch.zeros(1)) == cpu
    assert Device.of(torch.device("meta")) == Device.of(torch.empty(1, device="meta"))
    assert Device.of("sm_90") == Device.parse("sm_90")
    sm_100 = Device.parse("sm_100")
    assert Device.of(sm_100) is sm_100
    assert Device.of(torch.nn.Parameter(torch.zeros(1))) == cpu


def test_surroundings_do_not_matter() -> None:
    with torch.device("meta"):
        assert Device.parse("cpu") == Device("cpu")


# Equality.


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("sm_90", "sm_90a"),
        ("sm_100", "sm_100f"),
        ("gfx942", "gfx942:sramecc+:xnack-"),
        ("cpu", "cpu:0"),
        ("xpu:0", "xpu:1"),
    ],
)
def test_equal_by_capability(one: str, other: str) -> None:
    assert Device.parse(one) == Device.parse(other)
    assert len({Device.parse(one), Device.parse(other)}) == 1


def test_different_hardware_differs() -> None:
    names = ["cpu", "meta", "sm_80", "sm_90", "sm_100", "sm_103", "sm_120", "gfx942", "gfx950"]
    assert len({Device.parse(name) for name in names}) == len(names)


def test_a_device_is_frozen() -> None:
    device = Device.parse("sm_90")
    with pytest.raises(AttributeError):
        device.arch = "sm_100"  # type: ignore[misc]


# FNUZ.


@pytest.mark.parametrize(
    ("name", "fnuz"),
    [
        ("gfx940", True),
        ("gfx941", True),
        ("gfx942", True),
        ("gfx942:sramecc+:xnack-", True),
        ("gfx950", False),
        ("gfx90a", False),
        ("gfx908", False),
        ("gfx1100", False),
        ("gfx1200", False),
        ("gfx1201", False),
        ("sm_90", False),
        ("cpu", False),
        ("meta", False),
    ],
)
def test_is_fnuz(name: str, fnuz: bool) -> None:
    assert Device.parse(name).is_fnuz is fnuz


# Cards. torch is faked; the module is loaded anew, because it remembers the cards that it has met.


@pytest.fixture
def fresh() -> ModuleType:
    spec = importlib.util.find_spec("kvcache_plugin.device")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Cards = list[SimpleNamespace]


@pytest.fixture
def fake_cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[int]]:
    """Makes torch see these cards; answers with the list of cards that were asked about."""

    def install(cards: Cards, *, hip: str | None = None, current: int = 0) -> list[int]:
        asked: list[int] = []

        def properties(device: Any = None) -> SimpleNamespace:
            index = current if device is None else torch.device("cuda", device).index
            if not 0 <= index < len(cards):
                raise AssertionError("Invalid device id")  # as torch does
            asked.append(index)
            return cards[index]

        def capability(device: Any = None) -> tuple[int, int]:
            found = properties(device)
            return found.major, found.minor

        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(cards))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(cards))
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", capability)
        monkeypatch.setattr(torch.version, "hip", hip)
        return asked

    return install


def nvidia(major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(name="an NVIDIA GPU", major=major, minor=minor)


def amd(arch: str) -> SimpleNamespace:
    """torch gives AMD cards a capability too: that of gfx942 is (9, 4)."""
    return SimpleNamespace(name="an AMD GPU", major=9, minor=4, gcnArchName=arch)


@pytest.mark.parametrize("name", ["cuda", "cuda:0", "cuda:1", "CUDA:0"])
def test_cuda_without_a_gpu(
    name: str, fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    fake_cards([])
    with pytest.raises(kv.KVCacheError) as caught:
        fresh.Device.parse(name)
    message = str(caught.value)
    assert "no GPU" in message
    assert torch.__version__ in message
    assert "sm_90" in message  # the way out
    assert "gfx942" in message
    with pytest.raises(kv.KVCacheError, match="no GPU"):
        fresh.Device.of(torch.device(name.lower()))


@pytest.mark.parametrize(
    ("major", "minor", "arch"),
    [(8, 9, "sm_89"), (9, 0, "sm_90"), (10, 0, "sm_100"), (10, 3, "sm_103"), (12, 1, "sm_121")],
)
def test_an_nvidia_card(
    major: int, minor: int, arch: str, fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    fake_cards([nvidia(major, minor)])
    expected = ("cuda", arch, (major, minor))
    for device in (
        fresh.Device.parse("cuda"),
        fresh.Device.parse("cuda:0"),
        fresh.Device.of(torch.device("cuda")),
        fresh.Device.of(torch.device("cuda", 0)),
    ):
        assert parts(device) == expected
        assert device == fresh.Device.parse(arch)
        assert not device.is_fnuz


@pytest.mark.parametrize(
    ("name", "arch", "fnuz"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", True),
        ("gfx942", "gfx942", True),
        ("gfx950:sramecc+:xnack-", "gfx950", False),
        ("gfx90a:sramecc+:xnack-", "gfx90a", False),
        ("gfx1201", "gfx1201", False),
    ],
)
def test_an_amd_card(
    name: str,
    arch: str,
    fnuz: bool,
    fresh: ModuleType,
    fake_cards: Callable[..., list[int]],
) -> None:
    fake_cards([amd(name)], hip="6.4.43482")
    for device in (fresh.Device.parse("cuda:0"), fresh.Device.of(torch.device("cuda"))):
        assert parts(device) == ("rocm", arch, None)
        assert device == fresh.Device.parse(arch)
        assert device.is_fnuz is fnuz


def test_the_index_chooses_the_card_and_is_no_part_of_it(
    fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    fake_cards([nvidia(9, 0), nvidia(12, 0), nvidia(9, 0)], current=1)
    first, second, third = (fresh.Device.parse(f"cuda:{index}") for index in range(3))
    assert first == third
    assert hash(first) == hash(third)
    assert parts(second) == ("cuda", "sm_120", (12, 0))
    # Without an index it is the card that torch uses now.
    assert fresh.Device.parse("cuda") == second
    assert fresh.Device.of(torch.device("cuda")) == second


def test_the_current_card_may_change(
    fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    cards = [nvidia(9, 0), nvidia(12, 0)]
    fake_cards(cards, current=0)
    assert fresh.Device.parse("cuda").arch == "sm_90"
    fake_cards(cards, current=1)
    assert fresh.Device.parse("cuda").arch == "sm_120"


def test_a_card_is_asked_once(fresh: ModuleType, fake_cards: Callable[..., list[int]]) -> None:
    asked = fake_cards([nvidia(9, 0)])
    for _ in range(3):
        fresh.Device.of(torch.device("cuda", 0))
    assert asked == [0]


@pytest.mark.parametrize("hip", [None, "6.4.43482"])
@pytest.mark.parametrize("index", [1, 7])
def test_a_card_that_is_not_there(
    hip: str | None, index: int, fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    fake_cards([amd("gfx942") if hip else nvidia(9, 0)], hip=hip)
    with pytest.raises(kv.KVCacheError, match=f"cuda:{index}"):
        fresh.Device.parse(f"cuda:{index}")


def test_architectures_need_no_card(
    fresh: ModuleType, fake_cards: Callable[..., list[int]]
) -> None:
    asked = fake_cards([nvidia(8, 0)])
    assert fresh.Device.parse("sm_120").capability == (12, 0)
    assert fresh.Device.parse("gfx942").is_fnuz
    assert fresh.Device.of(torch.zeros(1)).kind == "cpu"
    assert asked == []


@pytest.mark.parametrize("name", [None, 0, b"cpu", 1.5])
def test_a_name_is_a_string(name: Any) -> None:
    with pytest.raises(kv.KVCacheError, match="a device's name is a string"):
        Device.parse(name)
