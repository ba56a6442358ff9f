"""Runs inside vLLM's environment: serves a checkpoint and says what lies in the KV cache then.

``python write_vllm.py CHECKPOINT [--ranks N] [--reload CHECKPOINT]...`` prints ``FOUND {...}``, an
object for each checkpoint: the ``tokens``, and for each rank and layer how the bytes that were
written compare; or why a reload was ``refused``.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from serve_vllm import generate, start  # type: ignore[import-not-found]


def served(engine: Any) -> dict[str, Any]:
    engine.collective_rpc("watch")
    tokens = generate(engine)
    return {"tokens": tokens, "ranks": engine.collective_rpc("compare")}


def reloaded(engine: Any, checkpoint: str) -> dict[str, Any]:
    try:
        engine.collective_rpc("reload_weights", kwargs={"weights_path": checkpoint})
    except Exception as error:
        return {"refused": str(error)}
    return served(engine)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--reload", action="append", default=[])
    arguments = parser.parse_args()
    engine = start(
        arguments.checkpoint,
        kv_cache_dtype="fp8",
        enable_prefix_caching=False,  # a reload does not empty it
        tensor_parallel_size=arguments.ranks,
        worker_extension_cls="watch_vllm.Watch",
    )
    found = [served(engine)]
    found += [reloaded(engine, checkpoint) for checkpoint in arguments.reload]
    print(f"FOUND {json.dumps(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
