"""Compares a seam with the engine that is installed.

That happens twice: ``register()`` looks at the imported module, and ``kvcache-plugin doctor`` at
the source file, which imports nothing.
"""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcache_plugin.hosts.engines import package_folders

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from kvcache_plugin.hosts.seams import Seam

_POSITIONAL: Final = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_KEYWORD: Final = inspect.Parameter.KEYWORD_ONLY


def check_module(seam: Seam, module: ModuleType) -> str:
    """What does not fit in an imported module; empty when the seam fits."""
    found: object = module
    for name in seam.qualname.split("."):
        # From the class's own namespace: a bound method would hide its first parameter.
        found = vars(found).get(name) if isinstance(found, type) else getattr(found, name, None)
    return check_function(seam, getattr(found, "__func__", found))


def check_function(seam: Seam, found: object) -> str:
    """What does not fit in what stands for a seam; empty when it fits."""
    if not callable(found):
        return f"{seam.path} is missing"
    if inspect.iscoroutinefunction(found):
        return f"{seam.path} is no plain function"
    return _compare(seam, tuple(inspect.signature(found).parameters.values()))


def check_source(seam: Seam) -> str:
    """What does not fit in the installed source; empty when the seam fits. Nothing is imported."""
    path = source_file(seam)
    if path is None:
        return f"{seam.path} is missing: there is no module {seam.module}"
    try:
        nodes: Sequence[ast.stmt] = _parse(path).body
    except (SyntaxError, ValueError, OSError) as error:
        return f"{seam.path} cannot be judged: {path.name} cannot be read: {error}"
    node: ast.stmt | None = None
    for name in seam.qualname.split("."):
        named = [n for n in _statements(nodes) if getattr(n, "name", None) == name]
        if not named:
            return f"{seam.path} is missing"
        node = named[-1]
        nodes = node.body if isinstance(node, ast.ClassDef) else ()
    if not isinstance(node, ast.FunctionDef):
        return f"{seam.path} is no plain function"
    return _compare(seam, _parameters(node.args))


def _statements(nodes: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of one scope, also those under ``if``, ``try`` and ``with``."""
    for node in nodes:
        yield node
        if isinstance(node, (ast.If, ast.Try, ast.With)):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, ()))
            for handler in getattr(node, "handlers", ()):
                yield from _statements(handler.body)


def _compare(seam: Seam, parameters: Sequence[inspect.Parameter]) -> str:
    names: list[str] = []
    needed: list[str] = []
    for parameter in parameters:
        if parameter.kind is _KEYWORD and "*" not in names:
            names.append("*")
        if parameter.kind in (*_POSITIONAL, _KEYWORD):
            names.append(parameter.name)
            if parameter.default is inspect.Parameter.empty:
                needed.append(parameter.name)
    count = len(seam.parameters)
    if tuple(names[:count]) == seam.parameters and set(needed) <= set(seam.parameters):
        return ""
    found, expected = ", ".join(names), ", ".join(seam.parameters)
    return f"{seam.path} has another signature: ({found}), not ({expected})"


def _parameters(arguments: ast.arguments) -> list[inspect.Parameter]:
    """The parameters of a parsed function; a default is only known to be there."""
    default, empty = object(), inspect.Parameter.empty
    by_position = [*arguments.posonlyargs, *arguments.args]
    without = len(by_position) - len(arguments.defaults)
    parameters = [
        inspect.Parameter(arg.arg, _POSITIONAL[1], default=empty if i < without else default)
        for i, arg in enumerate(by_position)
    ]
    if arguments.vararg:
        parameters.append(inspect.Parameter(arguments.vararg.arg, inspect.Parameter.VAR_POSITIONAL))
    parameters += [
        inspect.Parameter(arg.arg, _KEYWORD, default=empty if given is None else default)
        for arg, given in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(inspect.Parameter(arguments.kwarg.arg, inspect.Parameter.VAR_KEYWORD))
    return parameters


def source_file(seam: Seam) -> Path | None:
    """The file of the seam's module, ``None`` where there is none. Nothing is imported."""
    # Only the top-level package is looked up: finding a submodule would import its parents.
    for root in package_folders(seam.engine):
        path = Path(root).joinpath(*seam.module.split(".")[1:])
        for candidate in (path.with_suffix(".py"), path / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


@lru_cache
def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_bytes(), filename=str(path))
