"""The world the embedded model knows: one large flat object on a plain background, in slow and endless
motion.

An analytic renderer: signed distances, coverage clipped to one pixel, no image library. Everything is a
function of (seed, index) or of a `Scene`, so a clip can be made again anywhere. The world is poor on
purpose: given the caption, only a phase along the path and a small shift of the place are random, so that
a small model can learn it in hours.
"""

from dataclasses import dataclass

import numpy as np

from streamvid.tiny.captions import TABLES, Attributes, caption, possible, sample_attributes

SIDE = 64  # pixels
FPS = 16
PERIOD = 64.0  # frames in one round of a path
AMPLITUDE = 11.0  # pixels from the middle to the end of a path
HOP = 13.0  # pixels of height of a hop
SPIN = 4.5  # degrees a frame
PULSE_PERIOD, PULSE = 48.0, 0.3  # frames; part of the radius
JITTER = 1.5  # pixels
EASE = 16.0  # frames in which a changed motion reaches its new path
RADII = {"big": 0.26 * SIDE, "small": 0.2 * SIDE}  # pixels
FOLDS = {"ball": 0, "square": 4, "triangle": 3, "star": 5, "ring": 0}  # rotational symmetry
RGB = {
    "red": (225, 40, 45),
    "orange": (250, 145, 25),
    "yellow": (250, 232, 60),
    "green": (55, 190, 75),
    "cyan": (50, 208, 225),
    "blue": (50, 95, 235),
    "purple": (170, 75, 225),
    "white": (245, 245, 245),
}
BACKGROUND_RGB = {
    "black": (12, 12, 14),
    "grey": (116, 116, 120),
    "navy": (22, 30, 92),
    "brown": (98, 64, 36),
    "teal": (16, 92, 92),
    "plum": (90, 28, 80),
}


@dataclass(frozen=True)
class Scene:
    """What is shown: attributes from a frame on (the first at 0), the phase of the path in frames, a shift
    in pixels."""

    segments: tuple[tuple[int, Attributes], ...]
    phase: float
    shift: tuple[float, float]

    def attributes_at(self, frame: int) -> Attributes:
        """The attributes in force at a frame."""
        return [attributes for start, attributes in self.segments if start <= frame][-1]

    def captions(self, rng: np.random.Generator | None = None) -> list[tuple[int, str]]:
        """(first frame, caption) of every segment, plain or paraphrased by `rng`."""
        return [(start, caption(attributes, rng)) for start, attributes in self.segments]


def path(motion: str, size: str, t: np.ndarray) -> np.ndarray:
    """Pose on the path of a motion at times `t` (frames): [n, 4] of x, y (pixels from the middle), radius,
    angle."""
    t = np.asarray(t, np.float64)
    pose = np.zeros((len(t), 4))
    pose[:, 2] = RADII[size]
    turn = 2 * np.pi * t / PERIOD
    if motion == "sliding":
        pose[:, 0] = AMPLITUDE * np.cos(turn)
    elif motion == "rising":
        pose[:, 1] = AMPLITUDE * np.cos(turn)
    elif motion == "orbiting":
        pose[:, 0], pose[:, 1] = AMPLITUDE * np.cos(turn), AMPLITUDE * np.sin(turn)
    elif motion == "bouncing":
        hop = (2 * t / PERIOD) % 1.0  # two hops a round: one there, one back
        pose[:, 0], pose[:, 1] = AMPLITUDE * np.cos(turn), HOP / 2 - HOP * 4 * hop * (1 - hop)
    elif motion == "spinning":
        pose[:, 3] = np.deg2rad(SPIN) * t
    elif motion == "pulsing":
        pose[:, 2] *= 1 + PULSE * np.sin(2 * np.pi * t / PULSE_PERIOD)
    return pose


def _nearest_phase(motion: str, size: str, pose: np.ndarray) -> float:
    """The phase at which the path of a motion comes nearest to a pose, so that a change of motion is not a
    jump."""
    if motion in ("still", "spinning"):
        return 0.0
    phases = np.arange(0.0, PULSE_PERIOD if motion == "pulsing" else PERIOD, 0.5)
    gap = path(motion, size, phases)[:, :3] - pose[:3]
    return float(phases[int(np.argmin((gap**2).sum(1)))])


def poses(scene: Scene, num_frames: int) -> np.ndarray:
    """Pose of the object in every frame, [num_frames, 4]: x, y in pixels from the middle, radius, angle in
    radians.

    After a change the old pose fades out over `EASE` frames; where neither motion nor size changes,
    nothing moves.
    """
    out = np.zeros((num_frames, 4))
    phase, fade_from, offset = scene.phase, 0, np.zeros(4)
    for number, (start, now) in enumerate(scene.segments):
        end = scene.segments[number + 1][0] if number + 1 < len(scene.segments) else num_frames
        if number:
            before = scene.segments[number - 1][1]
            if before.motion != now.motion or before.size != now.size:
                here = _pose_at(before, phase, offset, fade_from, np.array([start]))[0]
                if before.motion != now.motion:
                    phase = _nearest_phase(now.motion, now.size, here) - start
                fade_from, offset = start, here - path(now.motion, now.size, np.array([phase + start]))[0]
                offset[3] = _wrap(offset[3], FOLDS[now.shape])
        frames = np.arange(start, min(end, num_frames))
        if len(frames):
            out[frames] = _pose_at(now, phase, offset, fade_from, frames)
    out[:, :2] += scene.shift
    return out


def _pose_at(
    now: Attributes, phase: float, offset: np.ndarray, fade_from: int, frames: np.ndarray
) -> np.ndarray:
    u = np.clip((frames - fade_from) / EASE, 0.0, 1.0)[:, None]
    return path(now.motion, now.size, phase + frames) + offset * (1 - u * u * (3 - 2 * u))


def _wrap(angle: float, fold: int) -> float:
    """The equivalent angle nearest to zero under an n-fold symmetry (0 for round shapes)."""
    if not fold:
        return 0.0
    step = 2 * np.pi / fold
    return float((angle + step / 2) % step - step / 2)


def distance(shape: str, x: np.ndarray, y: np.ndarray, radius: np.ndarray) -> np.ndarray:
    """Signed distance (pixels, negative inside) to a shape of nominal radius, upright, centred on its
    centroid."""
    if shape == "ball":
        return np.hypot(x, y) - 0.95 * radius
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.78 * radius) - 0.27 * radius
    if shape == "square":
        dx, dy = np.abs(x) - 0.85 * radius, np.abs(y) - 0.85 * radius
        return np.hypot(np.maximum(dx, 0), np.maximum(dy, 0)) + np.minimum(np.maximum(dx, dy), 0)
    fold, outer, inner = (3, 1.15, 0.575) if shape == "triangle" else (5, 1.15, 0.5)
    # A regular star of `fold` points: fold the plane into one half sector, then the distance to one edge.
    step = np.pi / fold
    angle = np.arctan2(x, -y)
    angle = np.abs((angle + step) % (2 * step) - step)
    length = np.hypot(x, y)
    px, py = length * np.cos(angle), length * np.sin(angle)
    ax, bx, by = outer * radius, inner * radius * np.cos(step), inner * radius * np.sin(step)
    ex, ey = bx - ax, by
    h = np.clip(((px - ax) * ex + py * ey) / (ex * ex + ey * ey), 0, 1)
    side = (px - ax) * ey - py * ex
    return np.hypot(px - ax - h * ex, py - h * ey) * np.sign(side)


def coverage(shape: str, pose: np.ndarray, side: int = SIDE) -> np.ndarray:
    """Part of every pixel that the object covers, [n, side, side] in 0..1, for poses [n, 4] (pixels of a
    SIDE picture)."""
    scale = side / SIDE
    grid = (np.arange(side, dtype=np.float32) + 0.5 - side / 2) / scale
    pose = np.asarray(pose, np.float32)[:, :, None, None]
    x, y = grid[None, None, :] - pose[:, 0], grid[None, :, None] - pose[:, 1]
    if FOLDS[shape]:
        cos, sin = np.cos(pose[:, 3]), np.sin(pose[:, 3])
        x, y = cos * x + sin * y, cos * y - sin * x
    return np.clip(0.5 - distance(shape, x, y, pose[:, 2]) * scale, 0, 1)


def render(scene: Scene, num_frames: int, start: int = 0, side: int = SIDE) -> np.ndarray:
    """Frames `start` to `start + num_frames` of a scene: uint8 [num_frames, side, side, 3]."""
    pose = poses(scene, start + num_frames)
    out = np.empty((num_frames, side, side, 3), np.float32)
    end = start + num_frames
    bounds = [min(max(s, start), end) for s, _ in scene.segments] + [end]
    for (_, now), low, high in zip(scene.segments, bounds[:-1], bounds[1:], strict=True):
        if low >= high:
            continue
        alpha = coverage(now.shape, pose[low:high], side)[..., None]
        fore, back = (
            np.asarray(rgb, np.float32) for rgb in (RGB[now.colour], BACKGROUND_RGB[now.background])
        )
        out[low - start : high - start] = back + alpha * (fore - back)
    return (out + 0.5).astype(np.uint8)


def sample_scene(
    seed: int, index: int, *, switch_frames: tuple[int, ...] = (), anywhere: bool = False
) -> Scene:
    """Scene number `index` of the endless list that `seed` names; the prompt changes at each of
    `switch_frames`.

    A change touches one attribute in most cases, otherwise each of them with probability one half.
    """
    rng = np.random.default_rng([seed, index])
    return scene_of(sample_attributes(rng), rng, switch_frames=switch_frames, anywhere=anywhere)


def scene_of(
    attributes: Attributes,
    rng: np.random.Generator,
    *,
    switch_frames: tuple[int, ...] = (),
    anywhere: bool = False,
) -> Scene:
    """A scene that begins with the given attributes, with a random shift.

    A scene begins at the start of its path, so that the caption decides how it looks; with `anywhere` it
    begins at a random place of the path instead, as a scene does that has been going on for a while.
    """
    segments = [(0, attributes)]
    for frame in switch_frames:
        segments.append((frame, change(segments[-1][1], rng)))
    angle, length = 2 * np.pi * rng.random(), JITTER * np.sqrt(rng.random())
    shift = (float(length * np.cos(angle)), float(length * np.sin(angle)))
    phase = float(rng.random() * PERIOD * 3) if anywhere else 0.0
    return Scene(tuple(segments), phase, shift)


def change(attributes: Attributes, rng: np.random.Generator) -> Attributes:
    """Another possible scene: one attribute changed in three cases of four, otherwise several."""
    while True:
        names = list(TABLES)
        if rng.random() < 0.75:
            names = [str(rng.choice(names))]
        else:
            names = [name for name in names if rng.random() < 0.5]
        new = attributes.changed(**{name: str(rng.choice(list(TABLES[name]))) for name in names})
        if new != attributes and possible(new):
            return new
