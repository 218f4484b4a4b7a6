"""Places labels beside the points of a picture so that they do not overlap."""

from collections.abc import Sequence

from matplotlib.axes import Axes

SIZE = 8.5
CHARACTER, LINE = 5.4, 11.0
"""Width of a character and height of a line at this size, in points (1/72 inch)."""
PLACES = ((7, 0, "left"), (0, 9, "center"), (0, -9, "center"), (-7, 0, "right"), (7, 9, "left"), (7, -9, "left"),
          (-7, 9, "right"), (-7, -9, "right"), (0, 20, "center"), (0, -20, "center"))  # fmt: skip
"""Offsets of a label in points (right, up) with its horizontal alignment, the preferred one first."""
OUTSIDE = 20.0
"""Cost of one point outside the panel, in square points of hidden lines."""

Box = tuple[float, float, float, float]  # left, bottom, right, top


def name_points(
    axes: Axes, points: list[tuple[float, float, str, str]], drawn: Sequence[tuple[float, float]] = ()
) -> None:
    """Label points (x, y, text, colour), in this order. Labels avoid the places (x, y) in `drawn`. Call it after the
    axis limits are set."""
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.draw_without_rendering()
    scale = 72 / figure.dpi
    spots = [axes.transData.transform((x, y)) * scale for x, y, _, _ in points]
    busy = [*spots, *(axes.transData.transform(place) * scale for place in drawn)]
    marks: list[Box] = [(x - 3.5, y - 3.5, x + 3.5, y + 3.5) for x, y in busy]
    names: list[Box] = []
    frame = axes.get_window_extent()
    inside = (frame.x0 * scale, frame.y0 * scale, frame.x1 * scale, frame.y1 * scale)
    for (x, y, text, colour), spot in zip(points, spots, strict=True):
        width = CHARACTER * len(text)
        boxes, costs = list[Box](), []
        for place, (right, up, end) in enumerate(PLACES):
            left = spot[0] + right - width * {"left": 0, "center": 0.5, "right": 1}[end]
            box = (left, spot[1] + up - LINE / 2, left + width, spot[1] + up + LINE / 2)
            outside = sum(max(0.0, inside[i] - box[i]) + max(0.0, box[i + 2] - inside[i + 2]) for i in (0, 1))
            boxes.append(box)
            costs.append((_hidden(box, names), _hidden(box, marks) + OUTSIDE * outside + 0.1 * place))
        best = costs.index(min(costs))
        right, up, end = PLACES[best]
        names.append(boxes[best])
        axes.annotate(
            text, (x, y), (right, up), textcoords="offset points", ha=end, va="center", fontsize=SIZE, color=colour,
            bbox={"fc": "white", "ec": "none", "pad": 0.4, "alpha": 0.7}, annotation_clip=False,
        )  # fmt: skip


def _hidden(box: Box, taken: list[Box]) -> float:
    """The area of the box that overlaps others, in square points."""
    return sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )
