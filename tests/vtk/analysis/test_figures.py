"""Plots: names from outside, legends that hide nothing, files that do not change."""

import io

import numpy as np
import pytest
from PIL import Image

from vtk.analysis import figures
from vtk.analysis.report.plot_files import embed


def line(entries=1, name="a line", width=figures.WIDTH):
    figure, (axes,) = figures.new(width=width)
    for i in range(entries):
        axes.plot([0, 1], [i, i + 1], color=figures.COLOURS[i], label=f"{name} {i}")
    figures.finish(axes, x="normalised depth", y="value, nats", legend=True)
    return figure, axes


def boxes(figure):
    """Extents in pixels of everything that is written, after the layout has settled."""
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legends = [*figure.legends, *([axes.get_legend()] if axes.get_legend() else [])]
    ticks = [tick.label1 for axis in (axes.xaxis, axes.yaxis) for tick in axis._update_ticks()]  # those that are seen
    written = [axes.xaxis.label, axes.yaxis.label, axes.title, *ticks]
    return [legend.get_window_extent() for legend in legends], [t.get_window_extent() for t in written if t.get_text()]


@pytest.mark.parametrize("entries", [1, 2, 6])
def test_a_shaded_plot_has_one_legend_that_overlaps_nothing(entries):
    figure, axes = line(entries, "a model of a long name: class")
    figures.shade(axes, ["other", "msa", "mlp", "conv", "subsampling", "other"])
    legends, written = boxes(figure)
    below = figure.legends[0].get_window_extent()
    assert len(figure.legends) == 1 and len(legends) == (2 if entries == 1 else 1)
    assert not any(below.overlaps(box) for box in written) and not below.overlaps(axes.get_window_extent())
    assert axes.get_window_extent().height > 0.7 * figures.HEIGHT * figure.dpi  # the legend takes nothing of the plot
    page = figure.bbox
    for box in (*legends, *written):
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= page.x1 + 1 and box.y1 <= page.y1 + 1
    texts = [text.get_text() for text in figure.legends[0].get_texts()]
    assert texts[-4:] == ["MSA", "MLP", "Conv", "subsampling"]
    assert len(axes.patches) == 4  # nothing leads to the first point, and `other` is not shaded


def test_a_short_legend_stays_in_the_axes():
    figure, axes = line(2)
    assert axes.get_legend() is not None and not figure.legends


def test_text_is_nine_pixels_high_on_a_phone():
    figure, axes = line()
    scale = 340 / (figure.get_figwidth() * 72)  # px of a point: a phone of 360 px has 340 for a plot
    sizes = [axes.xaxis.label.get_size(), *(text.get_size() for text in axes.get_xticklabels())]
    assert min(sizes) * scale >= 9
    assert axes.get_legend().get_texts()[0].get_size() * scale >= 8


@pytest.mark.parametrize(
    "text", ["$x_1$", "cost $5", r"$\frac{", "$", "_hidden", "a_b", "a\nb\x1b[31m", "\ud800", "%d {0}"]
)
def test_names_from_outside_are_shown_as_they_are(text):
    figure, (axes,) = figures.new()
    axes.plot([0, 1], [0, 1], label=figures.label(text))
    axes.set_title(figures.label(text))
    figures.finish(axes, x="x", y="y", legend=True)
    (shown,) = [t.get_text() for t in axes.get_legend().get_texts()]  # `_hidden` would not be there
    assert shown.isprintable() or shown[0] == "\u200b"
    figure.draw_without_rendering()  # a formula would be an error
    parsed = axes.get_legend().get_texts()[0]._preprocess_math(shown)
    assert parsed[1] is False or parsed[1] == "TeX"


def test_dollars_are_written_and_not_counted_as_formulas():
    text = figures.new()[1][0].set_title(figures.label("a $x$ b"))
    written, formula = text._preprocess_math(text.get_text())
    assert (written, formula) == ("a $x$ b", False)


def test_long_names_keep_both_ends():
    assert figures.label("vit_small") == "vit_small"
    name = "vit_small_patch14_dinov2.lvd142m.finetuned"
    shown = figures.label(name)
    assert len(shown) == 26 and shown.startswith("vit_small_pat") and shown.endswith("2m.finetuned")


def heat():
    figure, (axes,) = figures.new()
    axes.pcolormesh(np.arange(400.0).reshape(20, 20))
    axes.plot([0, 20], [0, 20])
    figures.finish(axes, x="x", y="y")
    return figure


def test_the_same_plot_is_the_same_file(tmp_path, monkeypatch):
    figures.save(heat(), tmp_path / "one.v1")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "12345")
    figures.save(heat(), tmp_path / "two.v1")
    for kind in ("png", "svg"):
        assert (tmp_path / f"one.v1.{kind}").read_bytes() == (tmp_path / f"two.v1.{kind}").read_bytes()
    svg = (tmp_path / "one.v1.svg").read_text()
    assert "<dc:date>" not in svg
    assert svg.count("<image") == 1 and svg.count("<path") < 100  # 400 cells would be 400 shapes


def decoded(address):
    kind, _, data = address.partition(";base64,")
    import base64

    return kind.removeprefix("data:"), Image.open(io.BytesIO(base64.b64decode(data)))


def test_plots_are_embedded_with_256_colours():
    figure, axes = line(6)
    figures.shade(axes, ["other", "msa", "mlp"])
    png = figures.png(figure)
    whole = Image.open(io.BytesIO(png)).convert("RGB")
    address, width, height = embed(png)
    kind, image = decoded(address)
    assert kind == "image/png" and image.mode == "P" and image.size == (width, height) == whole.size and width == 900
    assert len(address) < 40_000 and len(address) < len(png)
    whole = np.asarray(whole, dtype=int)
    small = np.asarray(image.convert("RGB"), dtype=int)
    for colour in figures.COLOURS[:6]:  # every line keeps its colour
        at = (whole == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=2)
        assert at.sum() > 100 and np.abs(small[at] - whole[at]).max() <= 8
    shaded = np.abs(whole - 255).max(axis=2) > 2
    assert (np.abs(small[shaded] - 255).max(axis=2 - 1) > 2).mean() > 0.98  # light shades are not lost


def test_photographs_are_embedded_as_jpeg():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (12, 12, 3), dtype=np.uint8)).resize((400, 300), 3)
    buffer = io.BytesIO()
    small.save(buffer, format="PNG")
    kind, image = decoded(embed(buffer.getvalue())[0])
    assert kind == "image/jpeg" and image.size == (400, 300)
    difference = np.asarray(image, dtype=float) - np.asarray(small, dtype=float)
    assert np.sqrt((difference**2).mean()) < 4


def test_an_axis_from_zero_ends_above_the_highest_value():
    _, (axes,) = figures.new()
    axes.plot([0, 1], [4.0, 4.0])  # without a margin the line would be the frame
    figures.from_zero(axes)
    assert axes.get_ylim() == pytest.approx((0, 4.2))
    empty = figures.new()[1][0]
    figures.from_zero(empty)
    assert empty.get_ylim() == (0, 1)
