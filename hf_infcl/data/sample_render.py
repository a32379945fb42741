"""Drawing the sample scenes with NumPy, many at a time, in two looks: a flat drawing and a lit, noisy photo."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_infcl.data.sample_scenes import BACKGROUNDS, COLOURS, SHAPES, TEXTURES, Scene, Thing

DOMAINS = ("drawing", "photo")

Array = np.ndarray

# Colours as (red, green, blue) in 0..1. The photo's palette is another one: muted, darker, warmer.
_INK = {
    "drawing": dict(
        zip(
            COLOURS,
            ((0.90, 0.10, 0.12), (1.00, 0.55, 0.05), (1.00, 0.88, 0.10), (0.10, 0.70, 0.20),
             (0.10, 0.30, 0.92), (0.52, 0.12, 0.75), (1.00, 0.50, 0.75), (0.50, 0.30, 0.12)),
            strict=True,
        )
    ),
    "photo": dict(
        zip(
            COLOURS,
            ((0.62, 0.16, 0.14), (0.78, 0.42, 0.16), (0.76, 0.66, 0.22), (0.26, 0.46, 0.22),
             (0.20, 0.30, 0.56), (0.40, 0.22, 0.48), (0.80, 0.50, 0.56), (0.36, 0.25, 0.16)),
            strict=True,
        )
    ),
}  # fmt: skip
_GROUND = {
    "drawing": dict(
        zip(
            BACKGROUNDS,
            ((1.0, 1.0, 1.0), (0.66, 0.66, 0.66), (0.08, 0.08, 0.08), (0.93, 0.86, 0.70), (0.20, 0.66, 0.66)),
            strict=True,
        )
    ),
    "photo": dict(
        zip(
            BACKGROUNDS,
            ((0.86, 0.84, 0.80), (0.48, 0.48, 0.50), (0.14, 0.13, 0.14), (0.72, 0.60, 0.44), (0.16, 0.40, 0.42)),
            strict=True,
        )
    ),
}

# Radii in units of the picture's width, by how the scene is laid out.
_RADII = {
    "one": {"small": 0.17, "large": 0.36},
    "two": {"small": 0.14, "large": 0.235},
    "many": {"small": 0.13, "large": 0.215},
}
_PLACES = {
    1: ((0.5, 0.5),),
    2: ((0.27, 0.5), (0.73, 0.5)),
    3: ((0.5, 0.27), (0.27, 0.73), (0.73, 0.73)),
    4: ((0.27, 0.27), (0.73, 0.27), (0.27, 0.73), (0.73, 0.73)),
}


@dataclass(slots=True)
class _Placed:
    picture: int
    layer: int
    thing: Thing
    x: float
    y: float
    radius: float
    angle: float


def render_scenes(scenes: list[Scene], domain: str, rngs: list[np.random.Generator], image_size: int) -> Array:
    """Draw scenes.

    A picture depends on its own scene and generator only, not on what is drawn beside it.

    Args:
        scenes: what to draw.
        domain: `"drawing"` (flat colours, dark outlines) or `"photo"` (muted colours, light, shadow, blur, grain).
        rngs: one generator a scene, for positions, light and grain.
        image_size: width and height in pixels.

    Returns:
        uint8 array (scenes, image_size, image_size, 3).
    """
    photo = domain == "photo"
    placed = [item for number, scene in enumerate(scenes) for item in _place(number, scene, photo, rngs[number])]
    ground = np.array([_GROUND[domain][scene.background] for scene in scenes], np.float32)
    noise = _photo_noise(rngs, image_size) if photo else None
    canvas = np.broadcast_to(ground[:, None, None], (len(scenes), image_size, image_size, 3)).copy()
    if noise is not None:
        canvas *= noise.ground[..., None]
    for layer in range(max(item.layer for item in placed) + 1):
        _paint(canvas, [item for item in placed if item.layer == layer], domain, noise)
    if noise is not None:
        canvas = _blur(canvas) * noise.cast[:, None, None] + noise.grain
    return np.clip(canvas * 255 + 0.5, 0, 255).astype(np.uint8)


def _place(number: int, scene: Scene, photo: bool, rng: np.random.Generator) -> list[_Placed]:
    if scene.second is not None:
        layout, places = "two", _PLACES[2]
        if scene.stacked:
            places = tuple((y, x) for x, y in places)
        things = [scene.first, scene.second]
    else:
        layout, places = ("one" if scene.count == 1 else "many"), _PLACES[scene.count]
        things = [scene.first] * scene.count
    draws = rng.random((len(things), 4)) * 2 - 1
    wander, turn, stretch = (0.05, 0.35, 0.12) if photo else (0.03, 0.0, 0.05)
    return [
        _Placed(
            number,
            layer,
            thing,
            places[layer][0] + wander * dx,
            places[layer][1] + wander * dy,
            _RADII[layout][thing.size] * (1 + stretch * grow),
            turn * spin,
        )
        for layer, (thing, (dx, dy, grow, spin)) in enumerate(zip(things, draws, strict=True))
    ]


@dataclass(slots=True)
class _Noise:
    ground: Array  # (n, size, size) factors: unevenly lit material
    grain: Array  # (n, size, size, 3) added at the end
    cast: Array  # (n, 3) factors: exposure and white balance
    light: Array  # (n, 2) unit vectors: where the light comes from


def _photo_noise(rngs: list[np.random.Generator], size: int) -> _Noise:
    count = len(rngs)
    coarse = np.stack([rng.random((5, 5), np.float32) for rng in rngs])
    fine = np.stack([rng.standard_normal((size, size), np.float32) for rng in rngs])
    draws = np.stack([rng.random(4, np.float32) for rng in rngs])
    # Bilinear interpolation of the 5 x 5 grid is two small matrix products.
    at = np.linspace(0, 4, size, dtype=np.float32)
    weights = np.clip(1 - np.abs(at[:, None] - np.arange(5, dtype=np.float32)), 0, 1)
    patches = np.einsum("ya,nab,xb->nyx", weights, coarse, weights)
    turn = 2 * np.pi * draws[:, 3]
    return _Noise(
        ground=0.72 + 0.5 * patches + 0.07 * fine,
        grain=np.broadcast_to(0.035 * fine[:, ::-1, :, None], (count, size, size, 3)),
        cast=(0.8 + 0.4 * draws[:, :1]) * (0.92 + 0.16 * draws[:, :3]),
        light=np.stack([np.cos(turn), np.sin(turn)], axis=1).astype(np.float32),
    )


def _paint(canvas: Array, items: list[_Placed], domain: str, noise: _Noise | None) -> None:
    """Put one object on each of the pictures named by `items`, in place."""
    size = canvas.shape[1]
    pictures = np.array([item.picture for item in items])
    radius = np.array([item.radius for item in items], np.float32)[:, None, None]
    centre = np.array([(item.x, item.y) for item in items], np.float32)
    angle = np.array([item.angle for item in items], np.float32)[:, None, None]
    pixels = (np.arange(size, dtype=np.float32) + 0.5) / size
    # Each object's own coordinates: its centre is 0, its rim about 1, y points down.
    dx = (pixels[None, None, :] - centre[:, 0, None, None]) / radius
    dy = (pixels[None, :, None] - centre[:, 1, None, None]) / radius
    x, y = np.cos(angle) * dx + np.sin(angle) * dy, np.cos(angle) * dy - np.sin(angle) * dx
    distance = np.empty_like(x)
    for shape in SHAPES:
        chosen = np.flatnonzero([item.thing.shape == shape for item in items])
        if chosen.size:
            distance[chosen] = _distance(shape, x[chosen], y[chosen])
    other = np.zeros_like(x)[..., None]
    for texture in TEXTURES[1:]:
        chosen = np.flatnonzero([item.thing.texture == texture for item in items])
        if chosen.size:
            other[chosen, ..., 0] = _pattern(texture, x[chosen], y[chosen])
    sharpness = radius * size  # from radii to pixels, for edges one pixel soft
    cover = np.clip(0.5 - distance * sharpness, 0, 1)
    ink = np.array([_INK[domain][item.thing.colour] for item in items], np.float32)[:, None, None]
    if noise is None:
        colour = ink + other * (0.92 - ink) * 0.8
        colour = colour * np.clip(0.35 + (-0.06 - distance) * sharpness, 0.35, 1)[..., None]  # a dark outline
        under = canvas[pictures]
    else:
        light = noise.light[pictures][:, :, None, None]
        lit = 0.95 + 0.3 * np.clip(light[:, 0] * x + light[:, 1] * y, -1, 1)
        colour = ink * (1 - 0.62 * other) * lit[..., None]
        drop = max(1, size // 20)
        shade = np.zeros_like(cover)
        shade[:, drop:, drop:] = cover[:, :-drop, :-drop]
        under = canvas[pictures] * (1 - 0.5 * shade)[..., None]
    canvas[pictures] = under + cover[..., None] * (colour - under)


def _pattern(texture: str, x: Array, y: Array) -> Array:
    """1 where the second colour shows. Bands are 0.35 radii wide: at 32 pixels about two pixels on small things."""
    if texture == "striped":
        cells = np.floor((x + y) * 2)
    else:
        cells = np.floor(x * 2.4) + np.floor(y * 2.4)
    return cells - 2 * np.floor(cells * 0.5)


def _distance(shape: str, x: Array, y: Array) -> Array:
    """About the signed distance to a shape's edge, in radii; negative inside. (n, size, size) each."""
    if shape == "circle":
        return np.hypot(x, y) - 0.95
    if shape == "square":
        return np.maximum(np.abs(x), np.abs(y)) - 0.82
    if shape == "triangle":  # corners (0, -1) and (+-0.95, 0.75)
        return np.maximum(y - 0.75, 0.879 * np.abs(x) - 0.477 * (y + 1))
    if shape == "diamond":  # half axes 0.7 and 1
        return (np.abs(x) / 0.7 + np.abs(y) - 1) * 0.573
    if shape == "star":  # fold the plane onto half a point: tip (1, 0), notch 0.42 at 36 degrees
        fifth = 2 * np.pi / 5
        fold = np.abs((np.arctan2(x, -y) + fifth / 2) % fifth - fifth / 2)
        reach = np.hypot(x, y)
        return 0.35 * (reach * np.cos(fold) - 1) + 0.936 * reach * np.sin(fold)
    if shape == "heart":  # two discs, the wedge that touches them, and a disc to close the gap
        side = np.abs(x)
        wedge = np.maximum(0.035 - y, 0.74 * side + 0.67 * (y - 0.91))
        return np.minimum(np.minimum(np.hypot(side - 0.42, y + 0.3) - 0.5, wedge), np.hypot(x, y - 0.1) - 0.5)
    if shape == "cross":
        a, b = np.abs(x), np.abs(y)
        return np.maximum(np.minimum(a, b) - 0.32, np.maximum(a, b) - 0.95)
    if shape == "ring":
        return np.abs(np.hypot(x, y) - 0.68) - 0.27
    return np.maximum(np.hypot(x, y) - 0.95, 0.72 - np.hypot(x - 0.5, y))  # crescent: a disc less a disc


def _blur(canvas: Array) -> Array:
    """Average with the four neighbours, edges repeated: a lens that is not quite sharp."""
    padded = np.pad(canvas, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="edge")
    near = padded[:, :-2, 1:-1] + padded[:, 2:, 1:-1] + padded[:, 1:-1, :-2] + padded[:, 1:-1, 2:]
    return 0.5 * canvas + 0.125 * near
