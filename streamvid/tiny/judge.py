"""The objective measure of the embedded model: does a video show what its prompt says, frame by frame?

`observe` measures every frame with OpenCV and no knowledge of the prompt: background, object colour,
place, size, angle, and the shape whose rendering overlaps best. `judge` compares that with the prompt.
Colours count by their distance in RGB, not by the nearest name, so a drift that ends beside the right
colour is seen. All lengths are in pixels of a 64-pixel picture; larger frames are reduced first.
"""

from dataclasses import asdict, dataclass
from functools import lru_cache

import cv2
import numpy as np

from streamvid.tiny.captions import Attributes, parse
from streamvid.tiny.world import (
    AMPLITUDE,
    BACKGROUND_RGB,
    FOLDS,
    PERIOD,
    PULSE_PERIOD,
    RADII,
    RGB,
    SIDE,
    SPIN,
)
from streamvid.tiny.world import coverage as draw

COLOUR_ERROR = 40.0  # largest channel difference (0..255) that is still the same object colour
BACKGROUND_ERROR = 16.0
FIT = 0.7  # overlap (intersection over union) with the ideal shape; blur and damage push it down
SOFT = 5.0  # softness of the edge (1: as drawn, 3.4: blurred by a pixel) from which a shape counts as blurred
HOLDS = 0.8  # part of the frames in which a property must be right
SIZE_EDGE = float(np.sqrt(RADII["big"] * RADII["small"]))
SHAPES = tuple(FOLDS)


@dataclass
class Observation:
    """What is seen in each of n frames; `shape` is an index into SHAPES, angle is of the folds of that
    shape."""

    found: np.ndarray  # [n] bool: one object stands out from the background
    background: np.ndarray  # [n, 3] RGB
    spread: np.ndarray  # [n] mean absolute deviation of the border from its median: is the background plain?
    colour: np.ndarray  # [n, 3] RGB
    place: np.ndarray  # [n, 2] x, y in pixels from the middle
    shape: np.ndarray  # [n]
    fit: np.ndarray  # [n] overlap with the best shape
    soft: np.ndarray  # [n] softness of the edge, for its length; 1 is as sharp as the renderer draws
    radius: np.ndarray  # [n] nominal radius of the best shape
    area: np.ndarray  # [n]
    turns: np.ndarray  # [n, 3] phase of the 3-, 4- and 5-fold moment, radians

    def part(self, frames: slice) -> "Observation":
        """The observation of some of the frames."""
        return Observation(**{k: v[frames] for k, v in self.__dict__.items()})


@dataclass(frozen=True)
class Verdict:
    """Which properties of the prompt hold over a clip, and in which part of its frames (0..1)."""

    colour: bool
    background: bool
    shape: bool
    motion: bool
    size: bool
    identity: bool
    colour_frames: float
    background_frames: float
    shape_frames: float
    motion_seen: str
    background_error: float

    @property
    def right(self) -> bool:
        """Colour, shape, motion and background all right."""
        return self.colour and self.background and self.shape and self.motion

    def as_dict(self) -> dict:
        """All fields and `right`."""
        return {**asdict(self), "right": self.right}


@lru_cache(maxsize=1)
def _reference() -> tuple[dict[str, float], dict[str, float]]:
    """Area of every shape at radius 1, and the moment phase of every angular shape when upright."""
    areas, phases = {}, {}
    for shape, fold in FOLDS.items():
        cover = draw(shape, np.array([[0.0, 0.0, 16.0, 0.0]]))[0]
        areas[shape] = float(cover.sum()) / 256
        if fold:
            phases[shape] = float(np.angle(_moment(cover, 0.0, 0.0, fold)))
    return areas, phases


def _moment(cover: np.ndarray, x: float, y: float, fold: int) -> complex:
    grid = np.arange(SIDE) + 0.5 - SIDE / 2
    z = (grid[None, :] - x) + 1j * (grid[:, None] - y)
    return complex((cover * z**fold).sum())


def _isolate(frame: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, float, bool]:
    """Coverage of the object [64, 64], its colour, the background, the spread of the border, and whether
    it is one."""
    image = frame.astype(np.float32)
    border = np.concatenate(
        [image[:2].reshape(-1, 3), image[-2:].reshape(-1, 3), image[:, :2].reshape(-1, 3)]
    )
    border = np.concatenate([border, image[:, -2:].reshape(-1, 3)])
    background = np.median(border, 0)
    spread = float(np.abs(border - background).mean())
    away = np.linalg.norm(image - background, axis=2)
    top = float(np.percentile(away, 98))
    mask = (away > 0.5 * top).astype(np.uint8)
    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask, connectivity=8)
    if top < 40 or count < 2:
        return np.zeros((SIDE, SIDE), np.float32), background, background, spread, False
    areas = stats[1:, cv2.CC_STAT_AREA]
    largest = (labels == 1 + int(areas.argmax())).astype(np.uint8)
    core = cv2.erode(largest, np.ones((3, 3), np.uint8))
    colour = np.median(image[(core if core.sum() >= 8 else largest).astype(bool)], 0)
    line = colour - background
    cover = np.clip((image - background) @ line / max(float(line @ line), 1e-6), 0, 1)
    cover = cover * cv2.dilate(largest, np.ones((5, 5), np.uint8))
    alone = areas.sum() - areas.max() <= 0.15 * areas.max()
    return cover, colour, background, spread, bool(alone and 60 <= areas.max() <= 0.5 * SIDE * SIDE)


def _shape(cover: np.ndarray) -> tuple[int, float, float, float, float, float, list[float]]:
    """Best shape, overlap, softness, radius, x, y and the moment phases of a coverage."""
    areas, phases = _reference()
    moments = cv2.moments(cover)
    total = max(moments["m00"], 1e-6)
    x, y = moments["m10"] / total + 0.5 - SIDE / 2, moments["m01"] / total + 0.5 - SIDE / 2
    turns = [float(np.angle(_moment(cover, x, y, fold))) for fold in (3, 4, 5)]
    best = (0, 0.0, 99.0, 0.0)
    haze = 6 * float((cover * (1 - cover)).sum())  # an anti-aliased edge has 1/6 on each pixel of its length
    for index, (shape, fold) in enumerate(FOLDS.items()):
        radius = float(np.sqrt(total / areas[shape]))
        angle = (turns[fold - 3] - phases[shape]) / fold if fold else 0.0
        ideal = draw(shape, np.array([[x, y, radius, angle]]))[0]
        overlap = float(np.minimum(ideal, cover).sum() / max(np.maximum(ideal, cover).sum(), 1e-6))
        if overlap > best[1]:
            edge = float(np.hypot(*np.gradient(ideal)).sum())
            best = (index, overlap, haze / max(edge, 1e-6), radius)
    return (*best, x, y, turns)


def observe(frames: np.ndarray) -> Observation:
    """Measures uint8 frames [n, h, w, 3] (square, 64 pixels or more)."""
    rows = []
    for frame in frames:
        if frame.shape[0] != SIDE:
            frame = cv2.resize(frame, (SIDE, SIDE), interpolation=cv2.INTER_AREA)
        cover, colour, background, spread, found = _isolate(frame)
        shape, fit, soft, radius, x, y, turns = _shape(cover)
        rows.append(
            (found, background, spread, colour, (x, y), shape, fit, soft, radius, float(cover.sum()), turns)
        )
    return Observation(*(np.asarray(column) for column in zip(*rows, strict=True)))


def _harmonics(values: np.ndarray, period: float) -> tuple[np.ndarray, np.ndarray]:
    """Least squares on mean, first and second harmonic: the two complex amplitudes, and the residual."""
    t = 2 * np.pi * np.arange(len(values)) / period
    basis = np.stack([np.ones_like(t), np.cos(t), np.sin(t), np.cos(2 * t), np.sin(2 * t)], 1)
    solution = np.linalg.lstsq(basis, values, rcond=None)[0]
    return np.array(
        [solution[1] - 1j * solution[2], solution[3] - 1j * solution[4]]
    ), values - basis @ solution


def _rests(seen: Observation, shape: str) -> str:
    """The motion of an object that stays in its place: still, spinning, pulsing or unknown."""
    grown, rest = _harmonics(np.log(np.maximum(seen.area, 1.0)) / 2, PULSE_PERIOD)
    if 0.1 < abs(grown[0]) < 0.4 and rest.std() < 0.06:
        return "pulsing"
    if FOLDS[shape]:
        angle = np.unwrap(seen.turns[:, FOLDS[shape] - 3]) / FOLDS[shape]
        t = np.arange(len(angle))
        slope, start = np.polyfit(t, angle, 1)
        error = (angle - slope * t - start).std()
        if 0.5 < np.rad2deg(slope) / SPIN < 1.6 and error < np.deg2rad(12):
            return "spinning"
        if abs(np.rad2deg(slope)) > 0.8 or angle.std() > np.deg2rad(8):
            return "unknown"
    return "still" if np.log(np.maximum(seen.area, 1.0)).std() < 0.12 else "unknown"


def motion_of(seen: Observation, shape: str) -> str:
    """The motion of an observed clip (32 frames or more) of a known shape: a name of MOTIONS, or
    "unknown"."""
    place = seen.place
    extent = np.percentile(place, 95, axis=0) - np.percentile(place, 5, axis=0)
    if extent.max() < 6:
        return _rests(seen, shape) if extent.max() < 4.5 else "unknown"
    (x1, x2), rest_x = _harmonics(place[:, 0], PERIOD)
    (y1, y2), rest_y = _harmonics(place[:, 1], PERIOD)
    if max(rest_x.std(), rest_y.std()) > 2.5:
        return "unknown"
    wide = [0.55 * AMPLITUDE < abs(a) < 1.5 * AMPLITUDE for a in (x1, y1)]
    if wide[0] and wide[1] and max(abs(x2), abs(y2)) < 4 and abs(np.sin(np.angle(x1) - np.angle(y1))) > 0.7:
        return "orbiting"
    if wide[0] and 2.5 < abs(y2) < 9 and abs(y1) < 4 and abs(x2) < 3.5:
        return "bouncing"
    if wide[0] and extent[1] < 5 and abs(x2) < 3.5:
        return "sliding"
    if wide[1] and extent[0] < 5 and abs(y2) < 3.5:
        return "rising"
    return "unknown"


def _same_object(seen: Observation, span: int = 24) -> bool:
    """Whether the last frames show the object and the background of the first ones."""
    first, last = seen.part(slice(0, span)), seen.part(slice(-span, None))
    mode = [np.bincount(o.shape, minlength=len(SHAPES)).argmax() for o in (first, last)]
    colour = np.abs(np.median(first.colour, 0) - np.median(last.colour, 0)).max()
    background = np.abs(np.median(first.background, 0) - np.median(last.background, 0)).max()
    whole = (last.fit >= FIT - 0.05).mean() >= HOLDS and seen.found.mean() >= 0.95
    return bool(mode[0] == mode[1] and colour <= COLOUR_ERROR and background <= BACKGROUND_ERROR and whole)


def judge(frames: np.ndarray, prompt: str | Attributes, *, seen: Observation | None = None) -> Verdict:
    """Which properties of the prompt uint8 frames [n, h, w, 3] show; `seen` spares a second `observe`.

    A property of every frame must hold in 80 % of them. Motion is judged over the whole clip; give it 48
    frames or more, of one prompt: cut a clip at a prompt change and judge the parts.
    """
    wanted = parse(prompt) if isinstance(prompt, str) else prompt
    seen = observe(frames) if seen is None else seen
    colour = np.abs(seen.colour - np.asarray(RGB[wanted.colour], np.float32)).max(1)
    background = np.abs(seen.background - np.asarray(BACKGROUND_RGB[wanted.background], np.float32)).max(1)
    colour_right = seen.found & (colour <= COLOUR_ERROR)
    background_right = (background <= BACKGROUND_ERROR) & (seen.spread <= 12)
    shape_right = seen.found & (seen.shape == SHAPES.index(wanted.shape)) & (seen.fit >= FIT)
    shape_right &= seen.soft <= SOFT
    motion = motion_of(seen, wanted.shape)
    radius = np.median(np.sqrt(seen.area / _reference()[0][wanted.shape]))
    size_right = radius >= SIZE_EDGE if wanted.size == "big" else radius < SIZE_EDGE
    return Verdict(
        colour=bool(colour_right.mean() >= HOLDS),
        background=bool(background_right.mean() >= HOLDS),
        shape=bool(shape_right.mean() >= HOLDS),
        motion=motion == wanted.motion,
        size=bool(size_right and 0.7 * RADII["small"] < radius < 1.3 * RADII["big"]),
        identity=_same_object(seen),
        colour_frames=float(colour_right.mean()),
        background_frames=float(background_right.mean()),
        shape_frames=float(shape_right.mean()),
        motion_seen=motion,
        background_error=float(background.mean()),
    )


def largest_jump(seen: Observation) -> float:
    """The largest move of the object between two neighbouring frames, pixels."""
    return float(np.linalg.norm(np.diff(seen.place, axis=0), axis=1).max())
