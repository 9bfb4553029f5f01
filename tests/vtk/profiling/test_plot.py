"""The plots of a profile as pictures: every part of the frame is used, and no text is cut off or covers another."""

import itertools

import numpy as np
import pytest
from matplotlib.text import Text

from vtk.profiling.cells import BackendResult, Cell
from vtk.profiling.figures import labelled, legend, new_figure, style
from vtk.profiling.plot import latency_figure
from vtk.profiling.result import ProfileResult
from vtk.profiling.work import Ceilings, Work

NAMES = ("eager", "compile", "fused", "fused+graph", "fused+nograph", "ort-cpu", "ort-cuda", "ort-trt", "aoti", "bank")
ALL = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


def result(backends: int, batches: tuple[int, ...], *, memory: bool = False, roof: bool = False, **more):
    rows = []
    for i, name in enumerate(NAMES[:backends]):
        times = [(batch, (3 + i) + batch * (1 + i / 9)) for batch in batches]
        cells = (
            Cell(
                batch, runs=1200, p50_ms=ms if batch < 64 else None, p90_ms=1.1 * ms if batch < 64 else None,
                p99_ms=1.4 * ms if batch < 4 else None, mean_ms=ms, images_per_second=1000 * batch / ms,
                weight_bytes=23_000_000 if memory else None, activation_bytes=900_000 * batch if memory else None,
                roofline=0.3 / (1 + i) if roof else None,
            )
            for batch, ms in times
        )  # fmt: skip
        rows.append(BackendResult(name, provider="torch cpu", cells=tuple(cells)))
    return ProfileResult(
        source="vit", kind="timm", model="vit_small_patch16_224", input_shape=(3, 224, 224), device="cpu",
        device_name="A CPU with a rather long name, 96 cores @ 2.60 GHz", precision="fp32", threads=4, duration_s=10.0,
        reference="torch", inputs="32 images", order="ascending", memory="counted", backends=tuple(rows),
        work=Work(2_500_000_000, 5_700_000, 150_000) if roof else None,
        ceilings=Ceilings(2e10, {"fp32": 4e12}) if roof else None, **more,
    )  # fmt: skip


CASES = {
    "one back-end, one batch size": result(1, (8,)),
    "two back-ends with memory": result(2, (1, 2, 4, 8, 16, 32, 64), memory=True),
    "ten back-ends with everything": result(10, ALL, memory=True, roof=True, budget_ms=40.0),
    "ten back-ends at one batch size": result(10, (8,), memory=True, roof=True, budget_ms=12.0),
    "every batch size of many": result(3, tuple(range(1, 33)), roof=True),
    "nothing": result(0, ()),
}


def drawn_texts(figure) -> list[Text]:
    """Matplotlib keeps labels of ticks outside of the axis, and does not draw them."""
    ticks, shown = set(), set()
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks()):
                ticks |= {tick.label1, tick.label2}
                shown |= {tick.label1} if low <= tick.get_loc() <= high else set()
    texts = (t for t in figure.findobj(Text) if t.get_visible() and t.get_text().strip())
    return [t for t in texts if t not in ticks or t in shown]


QUICK = {("two back-ends with memory", False), ("ten back-ends with everything", True), ("nothing", False)}
BOTH = [
    pytest.param(case, stacked, marks=() if (case, stacked) in QUICK else pytest.mark.slow)
    for case in CASES for stacked in (False, True)
]  # fmt: skip


@pytest.mark.parametrize(("case", "stacked"), BOTH)
def test_plots_use_their_frame_and_their_texts_neither_leave_it_nor_overlap(case: str, stacked: bool) -> None:
    figure = latency_figure(CASES[case], stacked=stacked)
    figure.canvas.draw()
    pixels = np.asarray(figure.canvas.buffer_rgba())[..., :3]
    height, width = pixels.shape[:2]
    if CASES[case].backends:
        for rows, columns in itertools.product((slice(None, height // 2), slice(height // 2, None)),
                                               (slice(None, width // 2), slice(width // 2, None))):  # fmt: skip
            used = (pixels[rows, columns] < 250).any(axis=-1)  # ink in each quarter, and in most of its columns
            assert used.any(axis=0).mean() > 0.6
    boxes = [(text.get_text(), text.get_window_extent()) for text in drawn_texts(figure)]
    assert boxes
    for text, box in boxes:
        assert box.x0 >= 0 and box.y0 >= 0 and box.x1 <= width and box.y1 <= height, text
    for (text, box), (other, second) in itertools.combinations(boxes, 2):
        assert not box.overlaps(second), (text, other)


def test_one_batch_size_is_drawn_as_bars_of_the_measured_length() -> None:
    latency, throughput, memory, roofline = latency_figure(CASES["ten back-ends at one batch size"]).axes
    cells = [backend.cells[0] for backend in CASES["ten back-ends at one batch size"].backends]
    for axes, expected in (
        (latency, [c.p50_ms for c in cells]),
        (throughput, [c.images_per_second for c in cells]),
        (memory, [23 + 0.9 * 8] * 10),
        (roofline, [100 * c.roofline for c in cells]),
    ):
        assert [bar.get_width() for bar in axes.patches] == pytest.approx(expected)
        assert [label.get_text() for label in axes.get_yticklabels()] == list(NAMES)


def test_no_two_curves_look_alike() -> None:
    assert len({style(i) for i in range(64)}) == 64


def test_batch_sizes_are_labelled_where_there_is_room_the_ends_first() -> None:
    assert labelled([1, 2, 4], [1, 2, 4], 300) == [0, 1, 2]
    shown = [ALL[i] for i in labelled(ALL, ALL, 250)]
    assert shown[0] == 1 and shown[-1] == 512 and {2, 4, 8, 16, 32, 64, 128, 256} <= set(shown)
    assert labelled([7], [7], 250) == [0]


def test_the_legend_takes_as_many_rows_as_the_width_needs() -> None:
    rows = []
    for width in (9.0, 3.0):
        figure = new_figure(width, 3.0)
        axes = figure.subplots()
        for name in NAMES:
            axes.plot([1, 2], label=name)
        legend(figure, axes)
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= width * 130
        rows.append(box.height)
    assert rows[0] < rows[1]
