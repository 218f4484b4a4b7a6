"""Names beside the points of a picture, so that none hides another as far as there is room. Only where text stands is
decided here."""

from collections.abc import Sequence

from matplotlib.axes import Axes

CHARACTER, LINE = 5.4, 11.0
"""Points (1/72 inch) that a character is wide and a line is high, at the size below."""
SIZE = 8.5
PLACES = ((7, 0, "left"), (0, 9, "center"), (0, -9, "center"), (-7, 0, "right"), (7, 9, "left"), (7, -9, "left"),
          (-7, 9, "right"), (-7, -9, "right"), (0, 20, "center"), (0, -20, "center"))  # fmt: skip
"""Places of a name about its point, the favourite first: right and up in points, and which end is there."""
OUTSIDE = 20.0
"""Square points of lines and points that a name would rather hide than leave the panel by a point."""

Box = tuple[float, float, float, float]  # left, bottom, right, top


def name_points(
    axes: Axes, points: list[tuple[float, float, str, str]], drawn: Sequence[tuple[float, float]] = ()
) -> None:
    """Write names beside points (x, y, text, colour), the first point's first; `drawn` are places (x, y) that names
    should not hide. Call it when the limits are final."""
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
        boxes = [_box(spot[0] + right, spot[1] + up, text, end) for right, up, end in PLACES]
        costs = [
            (_hidden(box, names), _hidden(box, marks) + OUTSIDE * _outside(box, inside) + 0.1 * place)
            for place, box in enumerate(boxes)
        ]
        best = costs.index(min(costs))
        right, up, end = PLACES[best]
        names.append(boxes[best])
        axes.annotate(
            text, (x, y), (right, up), textcoords="offset points", ha=end, va="center", fontsize=SIZE, color=colour,
            bbox={"fc": "white", "ec": "none", "pad": 0.4, "alpha": 0.7}, annotation_clip=False,
        )  # fmt: skip


def _box(x: float, y: float, text: str, end: str) -> Box:
    width = CHARACTER * len(text)
    left = {"left": x, "center": x - width / 2, "right": x - width}[end]
    return left, y - LINE / 2, left + width, y + LINE / 2


def _hidden(box: Box, taken: list[Box]) -> float:
    """How much of what stands there already a name would hide, in square points."""
    return sum(
        max(0.0, min(box[2], other[2]) - max(box[0], other[0]))
        * max(0.0, min(box[3], other[3]) - max(box[1], other[1]))
        for other in taken
    )


def _outside(box: Box, inside: Box) -> float:
    """How far a name would leave the panel, in points."""
    across = max(0.0, inside[0] - box[0]) + max(0.0, box[2] - inside[2])
    return across + max(0.0, inside[1] - box[1]) + max(0.0, box[3] - inside[3])
