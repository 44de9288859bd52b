"""What a comparison is to run: a TOML file turned into cells, each with a key that names all its settings.

Knows no models and no frames. An unknown key is an error that names the nearest one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamvid.errors import StreamvidError
from streamvid.eval.metrics import GROUPS
from streamvid.eval.models import files_mark
from streamvid.memory.spec import nearest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA = 1
"""Part of every key: raised when a figure changes its meaning, so that old rows are made again."""
AXES = ("model", "memory", "codec", "step_cache", "attention", "steps")
DEFAULT = "default"
PRESETS = Path(__file__).parent / "presets"


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One point of the grid. ``"default"`` leaves an axis to the checkpoint."""

    model: str = "tiny"
    memory: str = DEFAULT
    codec: str = DEFAULT
    step_cache: str = DEFAULT
    attention: str = DEFAULT
    steps: str = DEFAULT
    """Denoising steps a chunk, a whole number."""
    label: str = field(default="", compare=False)
    """How tables call it; not a setting, so it is no part of the key."""

    def __post_init__(self) -> None:
        if self.steps != DEFAULT and not (self.steps.isdecimal() and int(self.steps) > 0):
            raise StreamvidError(f"steps must be {DEFAULT!r} or a whole number above 0, got {self.steps!r}")

    def settings(self) -> dict[str, str]:
        return {axis: getattr(self, axis) for axis in AXES}

    def describe(self, hide: tuple[str, ...] = ()) -> str:
        """The label, or the settings that are not left to the checkpoint, without the axes of `hide`."""
        if self.label:
            return self.label
        shown = [value for axis, value in self.settings().items() if axis not in hide and value != DEFAULT]
        return " · ".join(shown) or DEFAULT


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One clip to make: a variant, a prompt, a seed. Cells that share prompt and seed share their noise."""

    variant: Variant
    prompt: str
    seed: int
    num_frames: int
    height: int | None = None
    width: int | None = None
    probe: bool = False
    """Also look where attention goes, in a second, untimed pass over the first chunks."""


@dataclass(frozen=True, kw_only=True)
class Final:
    """A second, longer run of the variants that came out best."""

    best: int = 5
    """How many."""
    num_frames: int = 1001
    prompts: int | None = None
    """The first so many prompts of the study; None takes all."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """A comparison as read from its file."""

    title: str = "Comparison"
    notes: str = ""
    variants: tuple[Variant, ...]
    reference: dict[str, str] = field(default_factory=dict)
    """Axes that the reference of a variant has instead of its own; an empty table means no fidelity."""
    prompts: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    num_frames: int = 81
    height: int | None = None
    width: int | None = None
    segment_frames: int = 48
    metrics: tuple[str, ...] = GROUPS
    attention_mass: bool = False
    """Measure the shares of attention by region, on the first prompt and seed."""
    judge: bool = True
    """Score prompts that the embedded model's judge understands."""
    orderings: tuple[str, ...] = ()
    """Names of published orderings to check, see `streamvid.eval.orderings`."""
    axis_x: str = "kv_bytes"
    """Cost shown first in the Pareto plot."""
    ranked: bool = False
    """Tables list the best variant first; otherwise the order is the study's."""
    final: Final | None = None
    """Made after the study, from its outcome; see `streamvid.eval.finals`."""

    def reference_of(self, variant: Variant) -> Variant | None:
        """The variant against which fidelity is taken, or None."""
        if not self.reference:
            return None
        return dataclasses.replace(variant, **self.reference, label="")

    def cells(self) -> list[Cell]:
        """Every clip once, references before what is compared with them."""
        references = [r for v in self.variants if (r := self.reference_of(v)) is not None]
        listed = {v: v for v in self.variants}  # equality ignores labels: the labelled one stays
        ordered = list(dict.fromkeys(listed.get(r, r) for r in references))
        ordered += [v for v in self.variants if v not in ordered]
        shape = {"num_frames": self.num_frames, "height": self.height, "width": self.width}
        first = (self.prompts[0], self.seeds[0])
        return [
            Cell(
                variant=variant,
                prompt=prompt,
                seed=seed,
                probe=self.attention_mass and (prompt, seed) == first,
                **shape,
            )
            for prompt, seed in itertools.product(self.prompts, self.seeds)
            for variant in ordered
        ]

    def key(self, cell: Cell) -> str:
        """16 hex digits that name the clip and how it is measured."""
        reference = self.reference_of(cell.variant)
        content = {
            "schema": SCHEMA,
            "variant": cell.variant.settings(),
            "reference": reference.settings() if reference else None,
            "clip": [cell.prompt, cell.seed, cell.num_frames, cell.height, cell.width],
            "measure": [self.segment_frames, sorted(self.metrics), self.judge],
        }
        if cell.probe:
            content["probe"] = True
        if mark := files_mark(cell.variant.model):
            content["model_files"] = mark  # other weights under the same name are another clip
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def load_study(source: str | Path) -> Study:
    """Read a study. Raises StreamvidError on a file that is not one."""
    path = Path(source)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StreamvidError(f"{path}: cannot be read ({error.strerror})") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise StreamvidError(f"{path}: is not TOML ({error})") from None
    return parse_study(values, str(path), path.parent)


def preset(name: str) -> Path:
    """The file of a preset. Raises StreamvidError naming the nearest one."""
    names = sorted(path.stem for path in PRESETS.glob("*.toml"))
    if name not in names:
        raise StreamvidError(f"unknown preset {name!r}{nearest(name, names)} (allowed: {', '.join(names)})")
    return PRESETS / f"{name}.toml"


_PLAIN = {
    "title": str,
    "notes": str,
    "num_frames": int,
    "height": int,
    "width": int,
    "segment_frames": int,
    "judge": bool,
    "attention_mass": bool,
    "axis_x": str,
    "ranked": bool,
}
_LISTS = {"prompts": str, "seeds": int, "metrics": str, "orderings": str}
_TABLES = ("grid", "reference", "variant", "final")


def _check_keys(values: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for key in values:
        if key not in allowed:
            raise StreamvidError(
                f"{where}: unknown key {key!r}{nearest(key, allowed)} (allowed: {', '.join(allowed)})"
            )


def parse_study(values: dict[str, Any], where: str = "study", folder: Path = Path()) -> Study:
    """Turn the tables of a TOML file into a study. `folder` is where a `prompts_file` is looked for."""
    _check_keys(values, (*_PLAIN, *_LISTS, "prompts_file", "tiny_prompts", *_TABLES), where)
    settings: dict[str, Any] = {}
    for key, kind in _PLAIN.items():
        if key in values:
            settings[key] = _typed(values[key], kind, f"{where}: {key}")
    for key, kind in _LISTS.items():
        if key in values:
            settings[key] = tuple(_typed(v, kind, f"{where}: {key}") for v in _listed(values[key]))
    settings["prompts"] = _prompts(values, settings.get("prompts", ()), where, folder)
    settings["variants"] = _variants(values, where)
    reference = values.get("reference", {})
    _check_keys(reference, AXES, f"{where}: [reference]")
    settings["reference"] = {axis: str(value) for axis, value in reference.items()}
    if "final" in values:
        settings["final"] = _final(values["final"], f"{where}: [final]")
    study = Study(**settings)
    _check_study(study, where)
    return study


def _final(values: dict[str, Any], where: str) -> Final:
    _check_keys(values, tuple(f.name for f in dataclasses.fields(Final)), where)
    for key, value in values.items():
        if _typed(value, int, f"{where}: {key}") < 1:
            raise StreamvidError(f"{where}: {key} must be at least 1, got {value}")
    return Final(**values)


def _prompts(values: dict[str, Any], prompts: tuple[str, ...], where: str, folder: Path) -> tuple[str, ...]:
    if "prompts_file" in values:
        path = folder / str(values["prompts_file"])
        if not path.is_file():
            raise StreamvidError(f"{where}: prompts_file {path} does not exist")
        lines = path.read_text(encoding="utf-8").splitlines()
        prompts += tuple(line.strip() for line in lines if line.strip())
    if "tiny_prompts" in values:
        prompts += tiny_prompts(_typed(values["tiny_prompts"], int, f"{where}: tiny_prompts"))
    return tuple(dict.fromkeys(prompts))


def tiny_prompts(count: int) -> tuple[str, ...]:
    """The first captions of the embedded model's held-out list, without repeats."""
    from streamvid.tiny.captions import caption
    from streamvid.tiny.evaluate import held_out_prompts

    drawn, found = count, ()
    while len(found) < count:
        found = tuple(dict.fromkeys(caption(attributes) for attributes in held_out_prompts(drawn)))
        drawn += count
    return found[:count]


def _variants(values: dict[str, Any], where: str) -> tuple[Variant, ...]:
    grid = values.get("grid", {})
    _check_keys(grid, AXES, f"{where}: [grid]")
    axes = {axis: [str(v) for v in _listed(grid[axis])] for axis in AXES if axis in grid}
    shared = {axis: options[0] for axis, options in axes.items() if len(options) == 1}
    rows = values.get("variant", [])
    variants = []
    if any(len(options) != 1 for options in axes.values()) or not rows:
        points = itertools.product(*axes.values())
        variants += [Variant(**dict(zip(axes, point, strict=True))) for point in points]
    for row in rows:
        _check_keys(row, (*AXES, "label"), f"{where}: [[variant]]")
        own = {key: str(value) for key, value in row.items()}
        variants.append(Variant(**(shared | own)))
    return tuple({variant: variant for variant in variants}.values())  # a labelled twin takes the place


def _check_study(study: Study, where: str) -> None:
    if not study.variants:
        raise StreamvidError(f"{where}: no variants; give [grid] axes without empty lists, or [[variant]]")
    if not study.prompts:
        raise StreamvidError(f"{where}: no prompts; give prompts, prompts_file or tiny_prompts")
    if not study.seeds:
        raise StreamvidError(f"{where}: no seeds; give for example seeds = [0]")
    if study.num_frames < 1:
        raise StreamvidError(f"{where}: num_frames must be at least 1, got {study.num_frames}")
    if study.segment_frames < 1:
        raise StreamvidError(f"{where}: segment_frames must be at least 1, got {study.segment_frames}")
    for group in study.metrics:
        if group not in GROUPS:
            raise StreamvidError(
                f"{where}: unknown group of metrics {group!r}{nearest(group, GROUPS)} "
                f"(allowed: {', '.join(GROUPS)})"
            )
    from streamvid.eval.orderings import ORDERINGS

    for name in study.orderings:
        if name not in ORDERINGS:
            raise StreamvidError(
                f"{where}: unknown ordering {name!r}{nearest(name, ORDERINGS)} "
                f"(allowed: {', '.join(ORDERINGS)})"
            )


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def _typed(value: Any, kind: type, where: str) -> Any:
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise StreamvidError(f"{where} must be {kind.__name__}, got {value!r}")
    return value


def quick(study: Study) -> Study:
    """A small one of the same shape: two prompts, one seed, 33 frames, at most four variants, two in the final."""
    final = study.final and Final(best=2, num_frames=min(study.final.num_frames, 65))
    return dataclasses.replace(
        study,
        title=f"{study.title} (quick)",
        variants=study.variants[:4],
        prompts=study.prompts[:2],
        seeds=study.seeds[:1],
        num_frames=min(study.num_frames, 33),
        segment_frames=12,
        final=final,
    )
