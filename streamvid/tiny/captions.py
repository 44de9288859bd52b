"""The little language of the embedded model: attributes, captions that name them, and the parser of those
captions.

One table drives three things, so they cannot disagree: the captions the model is trained on, the parser by
which the judge understands a prompt, and the vocabulary of the tokenizer. Knows words only: no pixels, no
tensors.
"""

import re
from dataclasses import dataclass, fields, replace

import numpy as np

from streamvid.errors import StreamvidError

# Each value's first word is its name; the others are synonyms that captions also use.
SHAPES: dict[str, tuple[str, ...]] = {
    "ball": ("ball", "circle", "disc"),
    "square": ("square", "box"),
    "triangle": ("triangle",),
    "star": ("star",),
    "ring": ("ring", "hoop"),
}
COLOURS: dict[str, tuple[str, ...]] = {
    "red": ("red",),
    "orange": ("orange",),
    "yellow": ("yellow",),
    "green": ("green",),
    "cyan": ("cyan", "turquoise"),
    "blue": ("blue",),
    "purple": ("purple", "violet"),
    "white": ("white",),
}
SIZES: dict[str, tuple[str, ...]] = {"big": ("big", "large"), "small": ("small", "little")}
MOTIONS: dict[str, tuple[str, ...]] = {
    "still": ("standing still", "resting", "not moving"),
    "sliding": ("sliding from side to side", "moving left and right", "sliding left and right"),
    "rising": ("rising and falling", "moving up and down", "floating up and down"),
    "bouncing": ("bouncing", "hopping", "bouncing around"),
    "orbiting": ("orbiting", "moving in a circle", "circling"),
    "spinning": ("spinning", "rotating", "turning"),
    "pulsing": ("pulsing", "growing and shrinking", "throbbing"),
}
BACKGROUNDS: dict[str, tuple[str, ...]] = {
    "black": ("black",),
    "grey": ("grey", "gray"),
    "navy": ("navy", "dark blue"),
    "brown": ("brown",),
    "teal": ("teal", "dark green"),
    "plum": ("plum", "dark purple"),
}
TABLES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "motion": MOTIONS, "background": BACKGROUNDS}
ROUND = ("ball", "ring")  # nothing to see when these spin: such captions are never made
_TEMPLATES = (
    "a {size} {colour} {shape} {motion} on a {background} background",
    "{size} {colour} {shape} {motion}, {background} background",
    "a {size} {colour} {shape} on a {background} background, {motion}",
    "on a {background} background a {size} {colour} {shape} is {motion}",
    "a {colour} {shape}, {size}, {motion} on {background} background",
    "a {size} {colour} {shape} is {motion} in front of a {background} background",
)
_FILLER = "a an the is on in of at front with against and from to side background over"


@dataclass(frozen=True)
class Attributes:
    """What a caption says. Each field is a key of the table of the same name."""

    shape: str
    colour: str
    size: str
    motion: str
    background: str

    def changed(self, **values: str) -> "Attributes":
        """A copy with some attributes replaced."""
        return replace(self, **values)

    def indices(self) -> tuple[int, ...]:
        """The position of every value in its table, in field order: labels for a classifier."""
        return tuple(list(TABLES[f.name]).index(getattr(self, f.name)) for f in fields(self))


def possible(attributes: Attributes) -> bool:
    """Whether the world can show it: a ball or a ring that spins looks like one that stands still."""
    return not (attributes.motion == "spinning" and attributes.shape in ROUND)


def sample_attributes(rng: np.random.Generator) -> Attributes:
    """A uniform draw over all attributes, redrawn until the combination can be shown."""
    while True:
        found = Attributes(**{name: str(rng.choice(list(table))) for name, table in TABLES.items()})
        if possible(found):
            return found


def caption(attributes: Attributes, rng: np.random.Generator | None = None) -> str:
    """A caption of the attributes: the plain one, or with `rng` a random paraphrase."""
    if rng is None:
        template, pick = _TEMPLATES[0], lambda words: words[0]
    else:
        template, pick = str(rng.choice(_TEMPLATES)), lambda words: words[int(rng.integers(len(words)))]
    words = {name: pick(table[getattr(attributes, name)]) for name, table in TABLES.items()}
    return template.format(**words)


def all_words() -> list[str]:
    """Every word a caption can hold, sorted: the vocabulary of the tokenizer."""
    words = set(_FILLER.split())
    for template in _TEMPLATES:
        words.update(re.findall(r"[a-z]+", re.sub(r"\{.*?\}", " ", template)))
    for table in TABLES.values():
        for synonyms in table.values():
            words.update(word for synonym in synonyms for word in synonym.split())
    return sorted(words)


def _find(text: str, table: dict[str, tuple[str, ...]]) -> tuple[str | None, str]:
    """The value whose longest synonym occurs in `text`, and the text without that synonym."""
    pairs = [(synonym, name) for name, synonyms in table.items() for synonym in synonyms]
    for synonym, name in sorted(pairs, key=lambda pair: -len(pair[0])):
        found = re.search(rf"\b{synonym}\b", text)
        if found:
            return name, text[: found.start()] + " " + text[found.end() :]
    return None, text


def parse(prompt: str) -> Attributes:
    """The attributes a prompt names; case, punctuation, articles and word order do not matter.

    A prompt that does not name a size means "big", one without a motion "still".
    Raises StreamvidError if shape, colour or background is missing.
    """
    text = " ".join(re.findall(r"[a-z]+", prompt.lower()))
    found: dict[str, str | None] = {"background": None}
    # The background goes first: "dark blue background" must not give the object its colour.
    names = sorted((s for words in BACKGROUNDS.values() for s in words), key=len, reverse=True)
    match = re.search(rf"\b({'|'.join(names)})\b(?= (?:background|backdrop))", text)
    if match:
        found["background"], _ = _find(match.group(1), BACKGROUNDS)
        text = text[: match.start()] + " " + text[match.end() :]
    for name in ("motion", "size", "shape", "colour"):
        found[name], text = _find(text, TABLES[name])
    found["size"], found["motion"] = found["size"] or "big", found["motion"] or "still"
    for name, value in found.items():
        if value is None:
            raise StreamvidError(
                f"the prompt {prompt!r} names no {name} of the tiny world; use one of "
                f"{', '.join(TABLES[name])}, as in {caption(EXAMPLE)!r}"
            )
    return Attributes(**{k: str(v) for k, v in found.items()})


EXAMPLE = Attributes("star", "red", "big", "spinning", "black")
