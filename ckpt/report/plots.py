"""Draws the plots of a report with matplotlib, without a display."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from ckpt.errors import UsageError
from ckpt.report.document import Plot

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH_IN, HEIGHT_IN = 7.0, 3.6
BAR_GROUP = 0.8  # the part of the distance between two groups that their bars fill


def check_can_draw() -> None:
    """Errors: UsageError if matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as exc:
        raise UsageError(
            "plots need matplotlib, which is not installed: pip install 'multilevel-ckpt[report]'"
        ) from exc


def draw(plot: Plot, form: str) -> bytes:
    """The picture; `form`: "svg" or "png". The same plot gives the same bytes. Errors: as `check_can_draw`."""
    check_can_draw()
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": "ckpt", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(WIDTH_IN, HEIGHT_IN), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        if plot.kind == "bars":
            _draw_bars(axes, plot)
        else:
            _draw_points(axes, plot)
        axes.set_title(plot.title)
        axes.set_xlabel(plot.x_label)
        axes.set_ylabel(plot.y_label)
        if plot.log_x:
            axes.set_xscale("log")
        if plot.log_y:
            axes.set_yscale("log")
        axes.grid(visible=True, alpha=0.3)
        if len(plot.series) > 1:
            axes.legend(fontsize="small")
        written = io.BytesIO()
        metadata = {"Date": None} if form == "svg" else {"Software": None}
        figure.savefig(written, format=form, dpi=150, metadata=metadata)
    return written.getvalue()


def _draw_points(axes: Any, plot: Plot) -> None:
    for each in plot.series:
        axes.plot(each.xs, each.ys, "o-" if each.line else "o", label=each.label, markersize=4)
        for x, y, name in zip(each.xs, each.ys, each.names, strict=False):
            axes.annotate(name, (x, y), xytext=(4, 4), textcoords="offset points", fontsize="x-small")


def _draw_bars(axes: Any, plot: Plot) -> None:
    groups: Sequence[Any] = list(dict.fromkeys(x for each in plot.series for x in each.xs))
    width = BAR_GROUP / max(1, len(plot.series))
    for number, each in enumerate(plot.series):
        left = -BAR_GROUP / 2 + width * (number + 0.5)
        axes.bar([groups.index(x) + left for x in each.xs], each.ys, width, label=each.label)
    axes.set_xticks(range(len(groups)), [str(group) for group in groups])
