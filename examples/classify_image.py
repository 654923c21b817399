"""Classify an image: compile a network, compare it with PyTorch, save it, and load it again.

    python examples/classify_image.py                    # ResNet-18 at 224 x 224, a synthetic image
    python examples/classify_image.py cat.png            # your own image (needs Pillow)
    python examples/classify_image.py --model mobilenetv2 --small

The zoo's weights are random, so the classes mean nothing; the times and the comparison do. For real predictions build a
model with trained weights, such as torchvision.models.resnet18(weights="DEFAULT"), and leave the rest as it is.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import tilewright
from tilewright import zoo


def image_of(path: Path | None, size: int) -> np.ndarray:
    """An image as float32 [1, 3, size, size], normalised as ImageNet's networks expect."""
    if path is not None:
        from PIL import Image

        pixels = np.asarray(Image.open(path).convert("RGB").resize((size, size)), np.float32) / 255
    else:  # a bright disc on a gradient
        y, x = np.mgrid[0:size, 0:size].astype(np.float32) / size
        disc = ((x - 0.5) ** 2 + (y - 0.5) ** 2 < 0.08).astype(np.float32)
        pixels = np.stack([x, y, disc], axis=-1)
    mean, deviation = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return np.ascontiguousarray(((pixels - mean) / deviation).transpose(2, 0, 1)[None], np.float32)


def interleaved(systems: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each. They take turns, so that a change of the clock speed meets all of them."""
    times: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(rounds + 2):
        for name, call in systems.items():
            begin = time.perf_counter()
            call()
            if number >= 2:  # the first two rounds only warm up
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Compile an image classifier and compare it with PyTorch.")
    parser.add_argument("image", nargs="?", type=Path, help="an image file; default: a synthetic one")
    parser.add_argument("--model", default="resnet18", help="a model of the zoo: see `tilewright zoo`")
    parser.add_argument("--small", action="store_true", help="the small version of the model")
    options = parser.parse_args()

    model = zoo.build(options.model, small=options.small)
    (example,) = zoo.example_inputs(options.model, small=options.small)
    image = torch.from_numpy(image_of(options.image, example.shape[-1]))

    # 1. Compile for inputs of this shape and type. Nothing is measured; `effort="quick"` would tune.
    begin = time.perf_counter()
    fast = tilewright.compile(model, (image,))
    print(f"compiled in {time.perf_counter() - begin:.1f} s: {fast}")

    # 2. Compare with PyTorch: first the results, then the times.
    with torch.inference_mode():
        expected = model(image)
        scores = fast(image)
        error = float((scores - expected).norm() / expected.norm())
        print(f"top 5: {scores[0].topk(5).indices.tolist()}, PyTorch {expected[0].topk(5).indices.tolist()}")
        print(f"relative error to PyTorch: {error:.1e}")
        times = interleaved({"PyTorch": lambda: model(image), "Tilewright": lambda: fast(image)}, rounds=20)
    print(", ".join(f"{name} {seconds * 1e3:.2f} ms" for name, seconds in times.items()))

    # 3. Save it, and load it as a server would: one file, NumPy in and out, no PyTorch needed.
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "classifier.tw"
        fast.save(path)
        loaded = tilewright.load(path)
        same = np.array_equal(loaded(image.numpy()), scores.numpy())
        print(f"saved {path.stat().st_size / 1e6:.1f} MB; loaded again, the same bits: {same}")


if __name__ == "__main__":
    main()
