"""Every message of the package, found in its source: ``python -m tests.messages PAGE [ROOM]``.

A message has a name, which is its heading in ``docs/errors.md``, and ends with it. It gets the name
where it is made: ``KVCacheError(…, name="…")`` and its subclasses, ``site.error`` and ``site.warn``
of ``scales.py``, and ``anchored(…, "…")`` for what is logged and for the exceptions of Python. The
modules of ``hardware/`` use public names alone: what they log ends with ``[errors#…]`` literally.
"""

from __future__ import annotations

import ast
import builtins
import re
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).resolve().parents[1] / "kvcache_plugin"
PAGE = PACKAGE.parent / "docs" / "errors.md"

#: What is called with ``name="…"``.
_NAMED = (
    "KVCacheError",
    "KVScaleError",
    "KVQuantizeError",
    "NoImplementationError",
    "CheckpointError",
    "error",
    "warn",
)
#: Exceptions that never leave the package: their text becomes part of a message of this name.
_REASONS = {
    "BrokenPluginError": "plugin-left-out",
    "UnavailableError": "cpu-kernels-missing",
    "AbsentPeerError": "",
    "PassedError": "",
    "_HostError": "",
    "_WrongJsonError": "json-invalid",
}
#: Python's own protocols: what asks for an attribute or for an abstract method catches these.
_PROTOCOL = ("AttributeError", "NotImplementedError")
#: Methods of ``hosts/engine_log.py``, which logs what it is given; a topic comes first.
_TOPICAL = ("say_once", "warn_once")
_LOGS_WHAT_IT_IS_GIVEN = "hosts/engine_log.py"
#: They log texts that have got their name elsewhere.
_HANDS_ON = (
    "errors.py",
    "manager.py",
    "scales.py",
    "settings.py",
    "hosts/gate.py",
    "hosts/sglang_updates.py",
)
_LEVELS = ("debug", "info", "warning", "error", "exception", "critical", "log")
_ENDING = re.compile(r" \[errors#([a-z0-9-]+)\]$")
_PLACEHOLDER = re.compile(r"%[-#0 +]*\d*(?:\.\d+)?[diouxXeEfFgGcrsa%]")


class Message(NamedTuple):
    """One place where a message is made.

    :param name: its heading in the documentation; empty where it says what another message brings.
    :param pattern: a regular expression for the text, with ``.*`` for what is not known here.
    :param is_logged: whether it goes into a log, and is not raised.
    """

    name: str
    pattern: str
    where: str
    is_logged: bool = False


class Unnamed(NamedTuple):
    """A place where something is raised or logged that has no name."""

    where: str
    code: str


def _pattern(text: ast.expr) -> str:
    if isinstance(text, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else None for part in text.values)
        return "".join(".*" if part is None else re.escape(part) for part in parts)
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return ".*".join(map(re.escape, _PLACEHOLDER.split(text.value)))
    return ".*"


def _called(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _is_log(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else None
    if isinstance(owner, ast.Name) and owner.id == "logger":
        return _called(call) in _LEVELS
    return isinstance(call.func, ast.Attribute) and _called(call) in ("say", *_TOPICAL)


def _name_at_end(text: ast.expr) -> str:
    if not isinstance(text, ast.Constant) or not isinstance(text.value, str):
        return ""
    match = _ENDING.search(text.value)
    return match[1] if match else ""


def _is_anchored(text: ast.expr) -> bool:
    return isinstance(text, ast.Call) and _called(text) == "anchored"


def _is_python_error(name: str) -> bool:
    kind = getattr(builtins, name, None)
    return isinstance(kind, type) and issubclass(kind, Exception) and name not in _PROTOCOL


def _lacks_a_name(raised: ast.expr) -> bool:
    """Whether it is an exception that ``raise`` makes of nothing that has a name."""
    if isinstance(raised, ast.Call):
        name = _called(raised)
        is_ours = name in _NAMED or name in _REASONS or name in _PROTOCOL
        is_error = name.endswith(("Error", "SkipTest"))
        return is_error and not is_ours and not any(map(_is_anchored, raised.args))
    return isinstance(raised, ast.Name) and _is_python_error(raised.id)


def _look(path: Path) -> list[Message | Unnamed]:
    found: list[Message | Unnamed] = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    module = str(path.relative_to(PACKAGE))
    logged = set()
    for node in ast.walk(tree):
        where = f"{module}:{getattr(node, 'lineno', 0)}"

        def unnamed(node: ast.AST = node, where: str = where) -> None:
            found.append(Unnamed(where, ast.unparse(node)[:90]))

        if isinstance(node, ast.Raise) and node.exc is not None and _lacks_a_name(node.exc):
            unnamed()
        if not isinstance(node, ast.Call):
            continue
        name = _called(node)
        if _is_log(node) and module != _LOGS_WHAT_IT_IS_GIVEN:
            given = node.args[1:] if name in _TOPICAL else node.args  # but for a topic
            text = next(a for a in given if not isinstance(a, ast.Attribute))  # but for a level
            if its_end := _name_at_end(text):
                found.append(Message(its_end, _pattern(text), where, is_logged=True))
            elif isinstance(text, ast.Constant) and text.value == "%s" and module in _HANDS_ON:
                pass
            elif _is_anchored(text):
                logged.add(text)
            else:
                unnamed()
        elif name == "anchored":
            text, its_name = [*node.args, ast.Constant("")][:2]
            if isinstance(its_name, ast.Constant):
                is_logged = node in logged
                found.append(Message(str(its_name.value), _pattern(text), where, is_logged))
        elif name in _REASONS:
            if _REASONS[name] and node.args:
                found.append(Message(_REASONS[name], _pattern(node.args[0]), where))
        elif name in _NAMED and (node.args or node.keywords):
            its_name = next((k.value for k in node.keywords if k.arg == "name"), None)
            if its_name is None:
                unnamed()
            elif isinstance(its_name, ast.Constant):
                text = node.args[0] if node.args else ast.Constant("")
                found.append(Message(str(its_name.value), _pattern(text), where))
    return found


@cache
def messages(room: str = "") -> tuple[tuple[Message, ...], tuple[Unnamed, ...]]:
    """What has a name, and what has none.

    :param room: the beginning of the paths to look at, below the package.
    """
    paths = sorted(PACKAGE.rglob("*.py"))
    mine = [path for path in paths if str(path.relative_to(PACKAGE)).startswith(room)]
    found = [one for path in mine for one in _look(path)]
    return (
        tuple(one for one in found if isinstance(one, Message)),
        tuple(one for one in found if isinstance(one, Unnamed)),
    )


def sections(page: Path = PAGE) -> dict[str, str]:
    """The text below each heading of a message, by its name."""
    _, *parts = re.split(r"^### ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {}
    for part in parts:
        heading, _, text = part.partition("\n")
        assert heading not in found, f"{heading} is there twice"
        found[heading] = re.split(r"^## ", text, flags=re.MULTILINE)[0]
    return found


def shown(section: str) -> str:
    """The messages that a section quotes, in one line."""
    quoted = re.findall(r"^```text\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
    return " ".join(" ".join(quoted).split())


def is_shown(message: Message, section: str) -> bool:
    pattern = re.sub(r"(?:\\\s|\s|\\n)+", " ", message.pattern).strip()
    return re.search(pattern, shown(section)) is not None


def main(page: str, *rooms: str) -> None:
    known = sections(Path(page))
    used = set()
    for room in rooms or ("",):
        named, unnamed = messages(room)
        for where, code in unnamed:
            print(f"{where}: no name: {code}")
        for message in named:
            used.add(message.name)
            if message.name not in known:
                print(f"{message.where}: {message.name} is not on the page")
            elif not is_shown(message, known[message.name]):
                print(f"{message.where}: {message.name} does not quote {message.pattern}")
    for name in sorted(set(known) - used):
        print(f"{name}: on the page, and nobody says it")


if __name__ == "__main__":
    main(*sys.argv[1:])
