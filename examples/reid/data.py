"""A small re-identification set made on the spot: figures with clothes of their own, seen by cameras that differ."""

import random
from pathlib import Path

from PIL import Image, ImageDraw, ImageEnhance, ImageFilter

WIDTH, HEIGHT = 32, 64
CAMERAS = 4
COLOURS = {
    "red": (200, 40, 40), "green": (40, 160, 60), "blue": (50, 70, 200), "yellow": (220, 200, 50),
    "white": (230, 230, 230), "black": (30, 30, 30),
}  # fmt: skip
_SKIN = ((240, 200, 170), (190, 140, 100), (110, 75, 55))
_GROUND = ((120, 120, 125), (95, 120, 90), (150, 135, 110), (80, 85, 110))
_LIGHT = ((1.0, 1.0, 1.0), (1.15, 1.0, 0.85), (0.8, 0.9, 1.15), (0.75, 0.75, 0.75))


class Person:
    """Clothes, skin, hat, bag and stripes of one identity; of everything else each picture has its own."""

    def __init__(self, number: int, seed: int) -> None:
        rng = random.Random(f"{seed} {number}")
        names = list(COLOURS)
        self.shirt, self.trousers = rng.choice(names), rng.choice(names)
        self.skin, self.hat = rng.choice(_SKIN), rng.choice((None, *names))
        self.stripes, self.bag = rng.choice((None, None, *names)), rng.choice((None, *names))

    def draw(self, camera: int, rng: random.Random) -> Image.Image:
        """Return one picture: the camera decides ground, light and sharpness, chance the pose, place and size."""
        picture = Image.new("RGB", (WIDTH * 2, HEIGHT * 2), _GROUND[camera])
        pen = ImageDraw.Draw(picture)
        for _ in range(6):  # things in the background
            x, y = rng.randint(0, WIDTH * 2), rng.randint(0, HEIGHT * 2)
            shade = tuple(max(0, c + rng.randint(-40, 40)) for c in _GROUND[camera])
            pen.rectangle((x, y, x + rng.randint(4, 30), y + rng.randint(4, 30)), fill=shade)
        tall, mid = rng.uniform(0.8, 1.0), WIDTH + rng.randint(-8, 8)
        top = rng.randint(2, 14)

        def box(left: float, up: float, right: float, low: float, colour: tuple[int, ...]) -> None:
            pen.rectangle((mid + left * tall, top + up * tall, mid + right * tall, top + low * tall), fill=colour)

        stride = rng.randint(0, 6)
        box(-10 - stride, 66, -2 - stride, 108, COLOURS[self.trousers])
        box(2 + stride, 66, 10 + stride, 108, COLOURS[self.trousers])
        box(-13, 24, 13, 68, COLOURS[self.shirt])
        if self.stripes:
            for y in (32, 44, 56):
                box(-13, y, 13, y + 4, COLOURS[self.stripes])
        arm = rng.randint(-3, 3)
        box(-18 + arm, 26, -13 + arm, 58, COLOURS[self.shirt])
        box(13 - arm, 26, 18 - arm, 58, COLOURS[self.shirt])
        if self.bag:
            left = rng.choice((-24, 14))
            box(left, 50, left + 10, 66, COLOURS[self.bag])
        box(-7, 6, 7, 24, self.skin)
        if self.hat:
            box(-9, 2, 9, 10, COLOURS[self.hat])
        if rng.random() < 0.3:  # something stands in front
            y = rng.randint(70, 110)
            pen.rectangle((0, y, WIDTH * 2, y + 14), fill=_GROUND[(camera + 1) % CAMERAS])
        return _seen(picture, camera, rng)


def _seen(picture: Image.Image, camera: int, rng: random.Random) -> Image.Image:
    picture = picture.rotate(rng.uniform(-6, 6), Image.Resampling.BILINEAR, fillcolor=_GROUND[camera])
    parts = zip(picture.split(), _LIGHT[camera], strict=True)
    bands = [band.point([min(255, int(v * factor)) for v in range(256)]) for band, factor in parts]
    picture = ImageEnhance.Brightness(Image.merge("RGB", bands)).enhance(rng.uniform(0.8, 1.2))
    if camera == 3:
        picture = picture.filter(ImageFilter.GaussianBlur(1.2))
    return picture.resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)


def write(root: Path, *, train: int, test: int, shots: int, seed: int) -> None:
    """Write ``train/ID/…`` and ``test/ID/…`` with ``shots`` pictures of each camera, no identity in both.

    Also ``shirts/{train,val}/COLOUR`` and ``trousers/{train,val}/COLOUR``: two plain classification tasks on
    pictures of other people.
    """
    for number in range(train + test):
        person, part = Person(number, seed), "train" if number < train else "test"
        folder = root / part / f"p{number:03d}"
        folder.mkdir(parents=True)
        for camera in range(CAMERAS):
            for shot in range(shots):
                rng = random.Random(f"{seed} {number} {camera} {shot}")
                person.draw(camera, rng).save(folder / f"c{camera}_{shot}.png")
    for number in range(240):
        person, part = Person(1000 + number, seed), "train" if number % 5 else "val"
        picture = person.draw(number % CAMERAS, random.Random(f"{seed} {number}"))
        for task, name in (("shirts", person.shirt), ("trousers", person.trousers)):
            folder = root / task / part / name
            folder.mkdir(parents=True, exist_ok=True)
            picture.save(folder / f"{number}.png")
