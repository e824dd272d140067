"""Seconds that a model's own kernels take on a machine, by rows: what the cost model computes with. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil

from batchgen_lite.kernels.padding import ROW_PADDING

BEYOND = 1.1  # activations of more rows fill more of a cache


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by rows, piecewise linear through ``points`` (rows, seconds), which ascend in both. Fewer rows than the
    first point's take as long as those: kernels pad. Beyond the last point it goes on as steep as the last piece."""

    points: tuple[tuple[float, float], ...] = ((0.0, 0.0),)

    @classmethod
    def through(cls, points: Iterable[tuple[float, float]]) -> Curve:
        """Measured points, rows ascending. Disturbances make times longer, never shorter, so the shorter ones are
        believed: fewer rows take no longer than more do, and more rows no longer, but for BEYOND, than as often the
        fewer ones as hold them."""
        rows, seconds = (list(values) for values in zip(*points, strict=True))
        for at in range(len(rows) - 2, -1, -1):
            seconds[at] = min(seconds[at], seconds[at + 1])
        for at in range(1, len(rows)):
            often = ceil(rows[at] / rows[at - 1])
            seconds[at] = min(seconds[at], seconds[at - 1] * often * BEYOND)
        return cls(tuple(zip(rows, seconds, strict=True)))

    @classmethod
    def line(cls, once: float, per_row: float) -> Curve:
        """``once`` plus ``per_row`` for every row, rows padded to whole blocks."""
        return cls(tuple((rows, once + per_row * rows) for rows in (ROW_PADDING, 2.0 * ROW_PADDING)))

    def at(self, rows: float) -> float:
        """Seconds of ``rows`` rows."""
        points = self.points
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        (left, low), (right, high) = points[0], points[1]
        for point in points[2:]:
            if rows <= right:
                break
            (left, low), (right, high) = (right, high), point
        return low + (high - low) * (rows - left) / (right - left)

    def scaled(self, factor: float) -> Curve:
        """The same rows in ``factor`` times the seconds."""
        return Curve(tuple((rows, seconds * factor) for rows, seconds in self.points))


NOTHING = Curve()


@dataclass(frozen=True, slots=True)
class ComputeTimes:
    """Of a sweep, computed with ``threads`` threads. ``dense``: by its token rows, everything that all of them need in
    all layers; ``expert``: by the rows of one expert, in every layer that has experts; ``head``: by the rows whose
    logits are wanted. ``visit``: seconds of a query row against a KV page in all layers."""

    dense: Curve
    expert: Curve
    head: Curve
    visit: float

    def scaled(self, factor: float) -> ComputeTimes:
        """On cores that take ``factor`` times as long."""
        return ComputeTimes(
            self.dense.scaled(factor), self.expert.scaled(factor), self.head.scaled(factor), self.visit * factor
        )
