"""The figure of ``docs/rewards.md``: how dwell and follow-ups become points, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from processors.reward.formulas import dwell_points, follow_up_points
from streams.settings import RewardSettings

WIDTH, HEIGHT = 320, 220
LEFT, BOTTOM, PLOT_WIDTH, PLOT_HEIGHT = 52, 176, 250, 140
TOP_POINTS = 0.7
"""Largest value on the vertical axis."""

Place = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Panel:
    """One curve with its axis: places in units of the axis, labels, and where it saturates."""

    title: str
    unit: str
    ticks: tuple[float, ...]
    places: tuple[Place, ...]
    dots: bool


def render(settings: RewardSettings) -> str:
    """Both curves side by side, drawn with the formulas themselves; always the same text."""
    full_s = settings.dwell_saturation_ms / 1_000
    seconds = [full_s * n / 20 for n in range(31)]
    counts = range(settings.follow_up_saturation + 4)
    panels = (
        Panel(
            "dwell",
            "seconds looked at, all dwell events together",
            (0.0, full_s / 2, full_s, 1.5 * full_s),
            tuple((s, dwell_points(1_000 * s, settings)) for s in seconds),
            dots=False,
        ),
        Panel(
            "follow-ups",
            "follow_up events",
            tuple(map(float, counts)),
            tuple((float(n), follow_up_points(n, settings)) for n in counts),
            dots=True,
        ),
    )
    drawn = [_panel(panel, index * WIDTH) for index, panel in enumerate(panels)]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="11" fill="#444">\n'
        f'<rect width="{2 * WIDTH}" height="{HEIGHT}" fill="white"/>\n'
        + "".join(drawn)
        + "</svg>\n"
    )


def _panel(panel: Panel, shift: int) -> str:
    most = panel.ticks[-1]
    spots = [_spot(place, most) for place in panel.places]
    lines = [_line((0.0, value), (most, value), most, "#ddd") for value in (0.0, 0.2, 0.4, 0.6)]
    labels = [
        _text((LEFT - 8, _spot((0.0, value), most)[1] + 4), f"{value:g}", "end")
        for value in (0.0, 0.2, 0.4, 0.6)
    ]
    labels += [
        _text((_spot((tick, 0.0), most)[0], BOTTOM + 16), f"{tick:g}", "middle")
        for tick in panel.ticks
    ]
    labels.append(_text((LEFT + PLOT_WIDTH / 2, BOTTOM + 34), panel.unit, "middle"))
    labels.append(_text((LEFT, 22), f"{panel.title}: points in the implicit component", "start"))
    curve = _dots(spots) if panel.dots else _curve(spots)
    return f'<g transform="translate({shift},0)">\n{"".join(lines)}{"".join(labels)}{curve}</g>\n'


def _spot(place: Place, most: float) -> Place:
    x, y = place
    return LEFT + PLOT_WIDTH * x / most, BOTTOM - PLOT_HEIGHT * y / TOP_POINTS


def _line(start: Place, end: Place, most: float, colour: str) -> str:
    (x1, y1), (x2, y2) = _spot(start, most), _spot(end, most)
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}" stroke="{colour}"/>\n'


def _text(place: Place, text: str, anchor: str) -> str:
    x, y = place
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text}</text>\n'


def _curve(spots: Sequence[Place]) -> str:
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
    return f'<polyline points="{points}" fill="none" stroke="#2a6fb0" stroke-width="2"/>\n'


def _dots(spots: Sequence[Place]) -> str:
    return "".join(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#2a6fb0"/>\n' for x, y in spots)


__all__ = ["render"]
