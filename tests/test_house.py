"""The house stands as docs/house.md draws it: who imports whom, and what is public."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import kvcache_plugin

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "kvcache_plugin"
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
HARDWARE = sorted(PACKAGE.glob("hardware/[!_]*.py"))


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def room_of(module: str) -> str:
    """``kvcache_plugin.hosts.vllm`` is in the room ``hosts/``, ``kvcache_plugin.api`` is one."""
    _, room, *inside = [*module.split("."), ""]
    return f"{room}/" if any(inside) or room in ("hardware", "hosts") else room


def drawn_rooms() -> list[str]:
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    table = [line for line in page.splitlines() if re.match(r"\| `\w+[./]", line)]
    cells = [re.findall(r"`([\w/]+?)(?:\.py)?`", line.split("|")[1]) for line in table]
    return [room for cell in cells for room in cell]


def imports_of(path: Path) -> set[str]:
    """Modules of the package that a module imports, also the ones that it imports late."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == PACKAGE.name:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = (ROOT / Path(*whole.split("."))).with_suffix(".py").exists()
                found.add(whole if is_module else str(node.module))
    return found


def test_every_module_is_drawn_once() -> None:
    drawn = drawn_rooms()
    assert len(drawn) == len(set(drawn))
    assert set(drawn) == {room_of(name_of(path)) for path in MODULES} - {"__main__"}


def test_every_module_of_an_adapter_is_named() -> None:
    page = (ROOT / "docs" / "house.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `hosts/` |")]
    named = set(re.findall(r"`(\w+\.py)`", row))
    assert named == {path.name for path in MODULES if path.parent.name == "hosts"}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_go_up_the_page(path: Path) -> None:
    order = [*drawn_rooms(), "__main__"]
    own = room_of(name_of(path))
    for module in imports_of(path) - {PACKAGE.name}:
        assert order.index(room_of(module)) <= order.index(own), f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", HARDWARE, ids=name_of)
def test_hardware_uses_public_names_alone(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.ImportFrom):
            continue
        module = node.module or ""
        is_sibling = module.startswith(f"{PACKAGE.name}.hardware")
        if module.split(".")[0] == PACKAGE.name and not is_sibling:
            assert module == PACKAGE.name
            assert {alias.name for alias in node.names} <= set(kvcache_plugin.__all__)


def test_public_names_have_a_home_and_a_docstring() -> None:
    for name in set(kvcache_plugin.__all__) - {"__version__", "hookimpl", "hookspec"}:
        assert getattr(kvcache_plugin, name).__doc__
