"""Loss curves as small SVG drawings, without a script, in the colours of the page around them."""

from __future__ import annotations

import html
from collections.abc import Sequence

WIDTH, HEIGHT = 300, 150
LEFT, RIGHT, TOP, BOTTOM = 40, 8, 10, 22


def smooth(values: Sequence[float], weight: float = 0.85) -> list[float]:
    """Exponential mean that starts at the first value and is not drawn towards it later.

    >>> smooth([1.0, 1.0, 1.0])
    [1.0, 1.0, 1.0]
    """
    out, total, norm = [], 0.0, 0.0
    for value in values:
        total, norm = weight * total + (1 - weight) * value, weight * norm + (1 - weight)
        out.append(total / norm)
    return out


def curve(steps: Sequence[float], values: Sequence[float], title: str, seconds: float) -> str:
    """One loss over training: raw values faint, their running mean on top; the axis below is in seconds."""
    calm = smooth(values)
    # Single steps may jump far; the frame follows the running mean and lets them leave it.
    low, high = min(calm), max(calm)
    margin = 0.12 * (high - low) or 0.5
    low, high = (max(low - margin, 0.0) if min(values) >= 0 else low - margin), high + margin
    last = max(steps)

    def points(series: Sequence[float]) -> str:
        pairs = []
        for step, value in zip(steps, series, strict=True):
            x = LEFT + (WIDTH - LEFT - RIGHT) * step / last
            y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - (min(max(value, low), high) - low) / (high - low))
            pairs.append(f"{x:.1f},{y:.1f}")
        return " ".join(pairs)

    floor, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    marks = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y}" y2="{y}"/>' for y in (TOP, (TOP + floor) / 2, floor)
    ]
    marks += [
        f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{value:.2f}</text>'
        for y, value in ((TOP, high), ((TOP + floor) / 2, (low + high) / 2), (floor, low))
    ]
    marks += [
        f'<text x="{LEFT}" y="{HEIGHT - 6}">0</text>',
        f'<text x="{right}" y="{HEIGHT - 6}" text-anchor="end">{seconds:.0f} s</text>',
    ]
    return (
        f'<figure class="curve"><figcaption>{title}</figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}: '
        f'from {calm[0]:.2f} to {calm[-1]:.2f}">{"".join(marks)}'
        f'<polyline class="raw" points="{points(values)}"/><polyline class="mean" points="{points(calm)}"/>'
        "</svg></figure>"
    )
