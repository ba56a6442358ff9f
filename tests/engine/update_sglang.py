"""Runs inside SGLang's environment: updates a model that is served, and prints what came of it.

``python update_sglang.py SOUND CORRUPT NEW`` serves SOUND, and then, one after the other, lets the
engine take CORRUPT and NEW from disk, and corrupt and sound scales as tensors. After each step it
prints ``STEP {...}``: the answer, the tokens, and the scales that the recorder has seen.

SGLang ends its whole process tree when a worker dies, so run it in a session of its own.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from typing import Any

LAYER = "model.layers.1.self_attn"
#: What the tensors of the last two steps bring, K first.
CORRUPT, SOUND = (float("nan"), 0.7), (0.25, 0.125)


def main() -> int:
    import torch
    from safetensors.torch import load_file

    serve = importlib.import_module("serve_sglang")  # beside this script
    sound, corrupt, new = sys.argv[1:]
    engine = serve.start(sound)

    def tell(step: str, answer: Any = None) -> None:
        tokens = serve.generate(engine)
        wait_until_idle(engine)
        recorded = load_file(os.environ["RECORD_POOL"])
        scales = {layer: recorded[f"{layer}.scales"].tolist() for layer in (0, 1)}
        print("STEP", json.dumps([step, answer, tokens, scales]), flush=True)

    def update_by_tensors(scales: tuple[float, float]) -> Any:
        names = (f"{LAYER}.{side}_scale" for side in "kv")
        tensors = [(name, torch.tensor([x])) for name, x in zip(names, scales, strict=True)]
        engine.begin_weight_update()
        engine.update_weights_from_tensor(tensors)
        return engine.end_weight_update()

    tell("start")
    tell("corrupt from disk", engine.update_weights_from_disk(corrupt))
    tell("new from disk", engine.update_weights_from_disk(new))
    tell("corrupt tensors", update_by_tensors(CORRUPT))
    tell("sound tensors", update_by_tensors(SOUND))
    engine.shutdown()
    return 0


def wait_until_idle(engine: Any) -> None:
    """The tokens are here a little before the scheduler lets go of their request.

    An update in between is taken, and answered with ``success=False``: no cache was flushed.
    """
    for _ in range(100):
        if engine.flush_cache().success:
            return
        time.sleep(0.1)
    raise TimeoutError("the scheduler is still busy after 10 s")


if __name__ == "__main__":
    sys.exit(main())
