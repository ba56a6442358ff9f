"""Runs inside SGLang's environment: serves what a file asks for and prints ``RESULT {...}``.

``python serve_sglang_nvfp4.py ASKED``: a JSON object with ``checkpoint``, ``kv_cache_dtype``,
``max_total_tokens``, ``texts`` whose tokens are judged one by one, and ``prompts`` that are gone
on with: each alone, then the first with what came after it in the cache, then all at once.

SGLang ends its whole process tree when a worker dies, so run it in a session of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from serve_sglang import start  # type: ignore[import-not-found]

NUM_TOKENS = 24


def main() -> int:
    asked = json.loads(Path(sys.argv[1]).read_text())
    # With it more requests are let in than there is room for in the end, and some are retracted.
    os.environ["SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION"] = "1"
    engine = start(
        asked["checkpoint"],
        kv_cache_dtype=asked["kv_cache_dtype"],
        max_total_tokens=asked["max_total_tokens"],
        schedule_conservativeness=0.01,
    )

    def go_on(prompts: Any, count: int = NUM_TOKENS) -> Any:
        sampling = {"temperature": 0.0, "max_new_tokens": count}
        return engine.generate(input_ids=prompts, sampling_params=sampling)

    judged = []
    for text in asked["texts"]:
        sampling = {"temperature": 0.0, "max_new_tokens": 1}
        result = engine.generate(
            input_ids=text,
            sampling_params=sampling,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=1,
        )["meta_info"]
        judged.append(
            {
                # What is likeliest after each token, and how likely the token was that came.
                "likeliest": [top[0][1] for top in result["input_top_logprobs"][1:]],
                "logprobs": [x[0] for x in result["input_token_logprobs"][1:]],
            }
        )
        engine.flush_cache()

    alone = []
    for prompt in asked["prompts"]:
        alone.append(go_on(prompt)["output_ids"])
        engine.flush_cache()
    cached = {"tokens": [], "from_cache": 0}
    if alone:
        go_on(asked["prompts"][0])
        half = NUM_TOKENS // 2
        longer = asked["prompts"][0] + alone[0][:half]
        again = go_on(longer, NUM_TOKENS - half)
        cached = {"tokens": again["output_ids"], "from_cache": again["meta_info"]["cached_tokens"]}
        engine.flush_cache()
    together = [result["output_ids"] for result in go_on(asked["prompts"])] if alone else []

    found = {"judged": judged, "alone": alone, "cached": cached, "together": together}
    print(f"RESULT {json.dumps(found)}", flush=True)
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
