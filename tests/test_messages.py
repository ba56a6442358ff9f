"""Every message has a name, and docs/errors.md has each of them with its text, cause and remedy."""

from __future__ import annotations

import pickle
import re

import pytest

from kvcache_plugin import errors
from kvcache_plugin.errors import (
    CheckpointError,
    KVCacheError,
    KVQuantizeError,
    KVScaleError,
    NoImplementationError,
)
from tests.messages import Message, is_shown, messages, sections

NAMED, UNNAMED = messages()


def test_every_message_has_a_name() -> None:
    assert not UNNAMED
    assert len(NAMED) > 100
    assert all(re.fullmatch(r"[a-z][a-z0-9]*(-[a-z0-9]+)*", message.name) for message in NAMED)


def test_the_page_has_every_name_and_no_other() -> None:
    assert set(sections()) == {message.name for message in NAMED}


@pytest.mark.parametrize("message", NAMED, ids=lambda message: f"{message.name}-{message.where}")
def test_the_page_quotes_the_message(message: Message) -> None:
    assert is_shown(message, sections()[message.name]), message.pattern


@pytest.mark.parametrize("name", sections())
def test_the_page_tells_cause_and_remedy(name: str) -> None:
    section = sections()[name]
    assert re.search(r"^\*\*Cause\.\*\* \S", section, re.MULTILINE)
    assert re.search(r"^\*\*Remedy\.\*\* \S", section, re.MULTILINE)


@pytest.mark.parametrize(
    "error",
    [
        KVCacheError("no such device", name="device-name"),
        KVQuantizeError("no such dtype", name="value-dtype"),
        NoImplementationError("nobody serves it", name="no-implementation"),
        KVScaleError("not finite", layer="layers.3", remedy="Export it again", name="scale-nan"),
        CheckpointError("not JSON", file="config.json", remedy="Copy it again", name="file-json"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_ends_with_its_name_also_in_another_process(error: KVCacheError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert str(error).endswith(f" [errors#{error.name}]")
    assert error.problem in str(error)
    assert "[errors#" not in error.problem
    assert (str(there), vars(there)) == (str(error), vars(error))


def test_an_error_takes_further_arguments_as_any_exception_does() -> None:
    error = KVQuantizeError("no kernel for it", 17)
    assert error.args == ("no kernel for it", 17)
    assert pickle.loads(pickle.dumps(error)).args == error.args


def test_an_error_of_another_package_needs_no_name() -> None:
    assert str(KVScaleError("too small", layer="layers.3")) == "layers.3: too small"
    assert errors.anchored("too small", "") == "too small"
