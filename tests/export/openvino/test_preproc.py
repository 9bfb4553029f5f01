"""Preprocessing inside of an OpenVINO model: Pillow's sizes and crops exactly, its pixels up to a level or two."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from vtk.card import InputSpec
from vtk.data.decoding.memory_images import take_image
from vtk.data.decoding.rules import Decoding
from vtk.data.loading.eval_pipeline import eval_transform
from vtk.errors import UsageError
from vtk_export.openvino import preproc

openvino = pytest.importorskip("openvino")
from openvino import opset13 as op  # noqa: E402

IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
SIZES = ((40, 60), (61, 33), (20, 90), (7, 5), (32, 48), (64, 96), (131, 34))


def identity(spec: InputSpec) -> Any:
    """A model that returns what it was given, with the preprocessing before it."""
    images = op.parameter([-1, 3, *spec.size], np.float32)
    same = op.add(images, op.constant(np.float32(0)))
    images.output(0).tensor.set_names({"pixel_values"})
    return preproc.prepend(openvino.Model([op.result(same)], [images]), spec, None)


def compiled(model: Any) -> Any:
    return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})


@pytest.mark.parametrize(
    ("mode", "size", "crop_pct", "interpolation"),
    [
        ("crop", (32, 32), 0.9, "bicubic"), ("crop", (32, 48), 0.9, "bilinear"), ("crop", (28, 28), 1.0, "bicubic"),
        ("squash", (32, 48), 1.0, "bicubic"), ("pad", (32, 48), 1.0, "bicubic"), ("pad", (48, 32), 1.0, "bilinear"),
    ],
)  # fmt: skip
def test_images_of_any_size_are_prepared_as_by_pillow(
    mode: Any, size: tuple[int, int], crop_pct: float, interpolation: str
) -> None:
    spec = InputSpec(*size, resize_mode=mode, crop_pct=crop_pct, interpolation=interpolation, **IMAGENET)
    run, transform = compiled(identity(spec)), eval_transform(spec)
    rng, std = np.random.default_rng(0), np.array(spec.std)[:, None, None]
    for height, width in SIZES:
        tall = height > 3 * width  # its rows are filtered first, which shows in noise
        cells = Image.fromarray(rng.integers(0, 256, (height, width, 3) if tall else (5, 5, 3), dtype=np.uint8))
        image = np.asarray(cells.resize((width, height), Image.Resampling.BICUBIC))
        want = transform(take_image(image, 3, Decoding.of(spec))).numpy()
        got = run(np.stack([image[::-1], image]))[0][1]
        levels = np.abs(got - want) * std * 255
        # a level where a value is half between two, a second where such a row is filtered once more
        assert levels.max() < 2.01 and levels.mean() < 0.2, (height, width)


def test_sizes_are_pillows_for_every_image() -> None:
    """On a few thousand images, up to the largest that a card allows."""
    spec = InputSpec(336, 252, resize_mode="crop", crop_pct=0.9)
    steps, sides = preproc._Steps(spec), [op.parameter([-1], np.int64) for _ in range(2)]
    results = [op.result(side) for side in steps.sizes(*sides)]
    run = compiled(openvino.Model(results, sides))
    rng = np.random.default_rng(0)
    height, width = rng.integers(1, 60000, (2, 4000))
    rows, columns = run([height, width]).values()
    cover = [int(side / 0.9) for side in spec.size]
    ratio = np.minimum(height / cover[0], width / cover[1])
    # timm's ResizeKeepRatio
    np.testing.assert_array_equal(rows, np.maximum(np.rint(height / ratio), 1))
    np.testing.assert_array_equal(columns, np.maximum(np.rint(width / ratio), 1))


def test_quotients_are_exact_where_the_plugin_is_one_off() -> None:
    steps, (number, divisor) = preproc._Steps(InputSpec(8, 8)), [op.parameter([-1], np.int64) for _ in range(2)]
    run = compiled(openvino.Model([op.result(steps.divided(number, divisor))], [number, divisor]))
    rng = np.random.default_rng(0)
    below = rng.integers(1 << 14, 1 << 16, 5000)
    # next to a multiple, beyond what single precision holds, as a side times a target is
    above = rng.integers(1 << 25, 1 << 30, 5000) // below * below + rng.integers(-1, 2, 5000)
    np.testing.assert_array_equal(run([above, below])[0], above // below)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (InputSpec(8, 8, 1, (0.5,), (0.5,)), "RGB"), (InputSpec(8, 8, interpolation="nearest"), "nearest"),
        (InputSpec(8, 8, value_range=((0.0, 4095.0),), value_type="uint16"), "uint16"),
    ],
)  # fmt: skip
def test_what_the_steps_cannot_prepare_is_refused(spec: InputSpec, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        preproc.check(spec)
