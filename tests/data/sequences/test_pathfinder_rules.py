"""Pathfinder's snakes begin, grow and are drawn by the rules of the published generator."""

from itertools import pairwise

import numpy as np
import pytest
from PIL import Image, ImageDraw

from primaldual.data.sequences import pathfinder
from primaldual.data.sequences.pathfinder import growth, layout
from primaldual.data.sequences.pathfinder.strokes import DEGREES, LENGTH, PATCH, REACH, strokes

SIDE = 32
CROSS = ((0, 0), (0, 1), (1, 0), (0, -1), (-1, 0))


@pytest.fixture(scope="module", params=list(pathfinder.LEVELS))
def level(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def scenes(level) -> layout.Scenes:
    return pathfinder.scenes(3, level=level)


@pytest.fixture(scope="module")
def pictures(scenes) -> np.ndarray:
    return pathfinder.drawn(scenes)


def angle(stroke: int) -> float:
    """That a stroke is drawn at from the cell where it starts."""
    return np.deg2rad(stroke - 180) if stroke < DEGREES else np.arctan2(*strokes().around[stroke - DEGREES]) + np.pi


def painted(stroke: int) -> tuple[np.ndarray, np.ndarray]:
    """Ink and room of a stroke by an image library: a line at twice the size, dilated by a disc, shrunk."""
    fine = 2 * REACH
    y, x = (fine + np.ceil(np.round(2 * LENGTH * f(angle(stroke)), 9)) for f in (np.sin, np.cos))
    image = Image.new("L", (2 * fine + 1, 2 * fine + 1))
    ImageDraw.Draw(image).line([(fine, fine), (x, y)], fill=255)
    thin = np.pad(np.array(image), 2)
    shifts = [(i, j) for i in range(-2, 3) for j in range(-2, 3) if i * i + j * j <= 4]
    wide = np.max([np.roll(thin, shift, (0, 1)) for shift in shifts], axis=0)[2:-2, 2:-2]
    return tuple(np.array(one.resize((PATCH, PATCH), Image.LANCZOS)) for one in (image, Image.fromarray(wide)))


def disc(y: int, x: int) -> np.ndarray:
    """A marker by an image library: a disc at twice the size, shrunk."""
    rows, columns = np.ogrid[: 2 * SIDE, : 2 * SIDE]
    fine = ((rows - 2 * y) ** 2 + (columns - 2 * x) ** 2 <= 3**2) * np.uint8(255)
    return np.array(Image.fromarray(fine).resize((SIDE, SIDE), Image.LANCZOS))


def into(canvas: np.ndarray, stroke: np.ndarray, patch: np.ndarray) -> np.ndarray:
    """The larger of a canvas and of a stroke's patch in its place, which is cut at the edges."""
    whole = np.zeros((SIDE + 2 * REACH, SIDE + 2 * REACH))
    whole[stroke[0] : stroke[0] + PATCH, stroke[1] : stroke[1] + PATCH] = patch
    return np.maximum(canvas, whole[REACH:-REACH, REACH:-REACH])


def test_strokes_are_as_an_image_library_paints_them():
    for stroke in range(len(strokes().ink)):
        ink, room = painted(stroke)
        assert np.array_equal(strokes().ink[stroke], ink), stroke
        assert np.array_equal(strokes().room[stroke], room), stroke


def test_a_picture_is_the_brightest_of_what_is_there_stretched_from_black_to_white(scenes, pictures):
    for i in range(20):
        canvas = np.zeros((SIDE, SIDE))
        for contrast, snakes in ((0.75 * 2.0, scenes.long[i]), (2.0, scenes.short[i])):
            for stroke in snakes.reshape(-1, 3):
                if stroke[2] >= 0:
                    canvas = into(canvas, stroke, contrast * painted(stroke[2])[0] / 255)
        for y, x in scenes.markers[i]:
            canvas = np.maximum(canvas, disc(y, x) / 255)
        assert np.array_equal(np.floor(np.round(canvas * 255 / canvas.max(), 9) + 0.5), pictures[i])
    assert pictures.min(axis=(1, 2)).max() == 0 and pictures.max(axis=(1, 2)).min() == 255


def test_long_snakes_begin_near_the_middle_a_fixed_distance_apart(scenes):
    first, second = scenes.long[:, 0, 0], scenes.long[:, 1, 0]
    assert first[:, :2].min() >= 14 and first[:, :2].max() <= 17
    assert np.all(np.abs(np.linalg.norm(first[:, :2] - second[:, :2], axis=1) - 7) <= np.sqrt(0.5) + 1e-9)


def test_all_but_the_second_snake_begin_at_angles_at_which_the_original_finds_places(scenes):
    short = scenes.short[scenes.short[:, :, 0, 2] >= 0]
    for seeds in (scenes.long[:, 0, 0, 2], short[:, 0, 2]):
        assert set(np.unique(seeds) - 180) <= set(range(-150, -119))
    assert len(np.unique(scenes.long[:, 1, 0, 2])) > 200


def replay(room: np.ndarray, stroke: np.ndarray, before: np.ndarray) -> np.ndarray:
    """The room taken when a stroke has followed on another: its tip had a free place, and it touched nothing."""
    y, x = stroke[:2]
    assert max(room[y + i, x + j] for i, j in CROSS) < 1
    assert (room + into(np.zeros((SIDE, SIDE)), stroke, painted(stroke[2])[1] / 255)).max() < 1.8
    return into(room, before, painted(before[2])[1] / 255)


def test_no_stroke_touches_what_was_there_when_it_was_drawn(scenes):
    for long, short in zip(scenes.long[:12], scenes.short[:12], strict=True):
        room = np.pad(np.zeros((SIDE - 2, SIDE - 2)), 1, constant_values=1)
        for step in range(1, long.shape[1]):
            for snake in long:
                room = replay(room, snake[step], snake[step - 1])
        room = into(room, long[1, -1], painted(long[1, -1, 2])[1] / 255)
        for snake in short[short[:, 0, 2] >= 0]:
            for before, stroke in pairwise(snake):
                room = replay(room, stroke, before)
            room = into(room, snake[-1], painted(snake[-1, 2])[1] / 255)


def test_tries_that_all_fail_give_no_snakes():
    found = [len(layout._pairs(np.random.default_rng(seed), 1, 14)[0]) for seed in range(40)]
    assert 0 in found and sum(found) < 10
    full = np.full_like(growth.empty(3), 255)
    assert np.all(layout._short(np.random.default_rng(0), full, 4) == -1)


def test_a_snake_turns_as_often_as_the_square_of_the_cosine_says():
    n, stroke = 40_000, DEGREES // 2 + 30
    snakes = growth.seeded(np.full((n, 2), 15), np.full(n, stroke))
    goes, longer = growth.extended(np.random.default_rng(0), growth.empty(n), snakes)
    assert len(goes) == n
    around = strokes().around
    turns = np.cos(np.arctan2(around[:, 0], around[:, 1]) - np.deg2rad(30))
    chance = np.maximum(turns, 0) ** 2 / np.sum(np.maximum(turns, 0) ** 2)
    counts = np.bincount(longer.stroke - DEGREES, minlength=len(around))
    assert counts[chance == 0].sum() == 0
    expected = n * chance[chance > 0]
    assert np.sum((counts[chance > 0] - expected) ** 2 / expected) < 50  # χ² of 9 degrees of freedom: p < 1e-6


def test_a_place_for_a_seed_is_free_at_its_whole_footprint():
    random = np.random.default_rng(0)
    taken, degrees = random.random((40, SIDE, SIDE)) < 0.2, random.integers(0, DEGREES, 40)
    possible = growth.places(taken, degrees)
    for one, angle_, given in zip(taken, degrees, possible, strict=True):
        padded = np.pad(one, 4)
        offsets = strokes().footprint[angle_] + 4
        fits = ~np.any([padded[y : y + SIDE, x : x + SIDE] for y, x in offsets], axis=0)
        assert np.array_equal(given, fits)


def test_a_seed_begins_where_some_cell_of_its_footprint_is_always_in_the_picture():
    inside = np.pad(np.ones((SIDE, SIDE), bool), 4)
    for degree, offsets in enumerate(strokes().footprint + 4):
        covered = np.any([inside[y : y + SIDE, x : x + SIDE] for y, x in offsets], axis=0).all()
        assert covered == strokes().begins[degree]


def test_cells_are_picked_alike_often():
    possible = np.zeros((30_000, SIDE, SIDE), bool)
    possible[:, [3, 3, 31], [0, 7, 31]] = True
    cells, counts = np.unique(growth.picked(np.random.default_rng(0), possible), axis=0, return_counts=True)
    assert cells.tolist() == [[3, 0], [3, 7], [31, 31]]
    assert np.abs(counts - 10_000).max() < 4 * np.sqrt(30_000 * 2 / 9)
