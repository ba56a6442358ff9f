"""What the documentation gives a shell to start an engine is understood by the engine's parser."""

from __future__ import annotations

import json

import pytest

from tests.engine.serving import run_python
from tests.pages.blocks import blocks, shell_commands

pytestmark = pytest.mark.engine

#: What stands in front of an engine's arguments, and what reads a JSON list of such lists.
_BEFORE = {"vllm": ["vllm", "serve"], "sglang": ["python", "-m", "sglang.launch_server"]}
_READ = {
    "vllm": """
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
""",
    "sglang": """
from argparse import ArgumentParser
from sglang.srt.server_args import ServerArgs
parser = ArgumentParser()
ServerArgs.add_cli_args(parser)
""",
}
_READ_ALL = """
import json, sys
for arguments in json.loads(sys.argv[1]):
    parser.parse_args(arguments)
    print("understood")
"""


def test_the_engine_understands_what_the_pages_start_it_with(engine: str) -> None:
    before = _BEFORE[engine]
    found = [
        words[len(before) :]
        for block in blocks()
        if block.language == "bash"
        for words in shell_commands(block.code)
        if words[: len(before)] == before
    ]
    assert found
    program = _READ[engine] + _READ_ALL
    status, log = run_python(engine, ["-c", program, json.dumps(found)])
    assert status == 0, log
    assert log.count("understood") == len(found)
