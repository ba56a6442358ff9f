"""The documentation's checkpoints: ``python -m tests.example_checkpoints FOLDER`` writes them."""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.checkpoints_on_disk import attention_weights, config, scales, write

SOUND = {
    0: (0.0312, 0.0117),
    1: (0.0408, 0.0142),
    2: (0.0521, 0.0163),
    3: (0.0547, 0.0188),
    4: (0.0573, 0.0214),
    5: (0.0612, 0.0243),
    6: (0.0655, 0.0291),
    7: (0.0493, 0.0377),
}
#: Layer 2 has no scales, layer 5 an infinite one, layer 7 one that is out of place.
BROKEN = {
    **{layer: pair for layer, pair in SOUND.items() if layer != 2},
    5: (float("inf"), 0.0243),
    7: (0.0493, 0.9653),
}


def write_examples(folder: Path) -> None:
    """``Llama-FP8``, ``Llama-FP8-broken``, and ``Llama-FP8-fnuz``, which is doubled."""
    doubled = {layer: (2 * k, 2 * v) for layer, (k, v) in SOUND.items()}
    weights = attention_weights(len(SOUND))
    for name, pairs in (("", SOUND), ("-broken", BROKEN), ("-fnuz", doubled)):
        write(folder / f"Llama-FP8{name}", {**weights, **scales(pairs)}, config(len(SOUND)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the documentation's examples.")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    folder = parser.parse_args().folder
    write_examples(folder)
    print("written:", ", ".join(sorted(str(path) for path in folder.glob("Llama-FP8*"))))
