"""What the sample scenes show and how their captions say it: a small grammar, drawn from a seed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

SHAPES = ("circle", "square", "triangle", "diamond", "star", "heart", "cross", "ring", "crescent")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown")
TEXTURES = ("plain", "striped", "checkered")
SIZES = ("small", "large")
BACKGROUNDS = ("white", "grey", "black", "beige", "teal")
SPLITS = ("train", "test")

_SIZE_WORDS = {"small": ("small", "little"), "large": ("large", "big")}
_TEXTURE_WORDS = {"plain": ("", "plain"), "striped": ("striped", "stripy"), "checkered": ("checkered", "chequered")}
_COUNT_WORDS = {2: ("two", "a pair of"), 3: ("three", "a trio of"), 4: ("four", "a group of four")}
_PLURALS = {"cross": "crosses"}
# One held-out scene in this many: enough left for training, and test scenes are never seen in it.
_HELD_OUT_SHARE = 8


@dataclass(frozen=True, slots=True)
class Thing:
    """One kind of object: what a caption can say of it."""

    shape: str
    colour: str
    texture: str
    size: str


@dataclass(frozen=True, slots=True)
class Scene:
    """What a picture shows: `count` equal things, or two things in a relation, before a background.

    Attributes:
        first: the thing, or in a relation the left or upper one.
        background: one of `BACKGROUNDS`.
        count: how many of `first` there are; 1 in a relation.
        second: the right or lower thing of a relation, or None.
        stacked: in a relation, whether `first` is above `second` rather than left of it.
    """

    first: Thing
    background: str
    count: int = 1
    second: Thing | None = None
    stacked: bool = False

    @property
    def split(self) -> str:
        """The only split that this scene may appear in, decided by a hash of its content."""
        digest = hashlib.blake2b(repr(self).encode(), digest_size=4).digest()
        return "test" if int.from_bytes(digest, "little") % _HELD_OUT_SHARE == 0 else "train"


def draw_scene(rng: np.random.Generator, split: str) -> Scene:
    """Draw a scene that belongs to `split`."""
    while True:
        first = _draw_thing(rng)
        background = _pick(rng, BACKGROUNDS)
        if rng.random() < 0.4:
            scene = Scene(first, background, count=int(rng.integers(1, 5)))
        else:
            scene = Scene(first, background, second=_draw_thing(rng), stacked=bool(rng.random() < 0.5))
        if scene.split == split:
            return scene


def describe(scene: Scene, rng: np.random.Generator) -> str:
    """Put a scene into words; the wording is drawn, the content is always complete."""
    first = _noun_phrase(scene.first, scene.count, rng)
    if scene.second is None:
        what = first
    else:
        second = _noun_phrase(scene.second, 1, rng)
        if scene.stacked:
            forms = (f"{first} above {second}", f"{second} below {first}", f"{second} with {first} on top")
        else:
            forms = (
                f"{first} left of {second}",
                f"{second} to the right of {first}",
                f"{first} on the left and {second} on the right",
            )
        what = _pick(rng, forms)
    ground = scene.background
    article = "an" if ground[0] in "aeiou" else "a"
    return _pick(
        rng,
        (
            f"{what} on {article} {ground} background",
            f"{what} on {ground}",
            f"a picture of {what}, {ground} behind",
            f"{article} {ground} scene showing {what}",
        ),
    )


def _draw_thing(rng: np.random.Generator) -> Thing:
    return Thing(_pick(rng, SHAPES), _pick(rng, COLOURS), _pick(rng, TEXTURES), _pick(rng, SIZES))


def _noun_phrase(thing: Thing, count: int, rng: np.random.Generator) -> str:
    size, texture = _pick(rng, _SIZE_WORDS[thing.size]), _pick(rng, _TEXTURE_WORDS[thing.texture])
    noun = thing.shape if count == 1 else _PLURALS.get(thing.shape, thing.shape + "s")
    words = [size, thing.colour, texture, noun] if rng.random() < 0.5 else [size, texture, thing.colour, noun]
    phrase = " ".join(word for word in words if word)
    return f"{_pick(rng, _COUNT_WORDS[count])} {phrase}" if count > 1 else f"a {phrase}"


def _pick(rng: np.random.Generator, options: tuple[str, ...]) -> str:
    return options[int(rng.random() * len(options))]
