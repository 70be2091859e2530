"""Pathfinder: labels are what can be traced in the pictures; and the same seed gives the same pictures."""

import numpy as np
import pytest

from data.sequences.tracing import connected, marked
from primaldual.data.sequences import pathfinder
from primaldual.data.sequences.pathfinder import layout

SIDE = 32
LEVELS = list(pathfinder.LEVELS)


@pytest.fixture(scope="module", params=LEVELS)
def level(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def scenes(level) -> layout.Scenes:
    return pathfinder.scenes(3, level=level)


@pytest.fixture(scope="module")
def pictures(scenes) -> np.ndarray:
    return pathfinder.drawn(scenes)


def test_two_markers_are_seen_in_every_picture_and_where_they_are(scenes, pictures):
    for picture, markers in zip(pictures[:100], scenes.markers.tolist(), strict=False):
        assert sorted(marked(picture)[0]) == sorted(map(tuple, markers))


def test_the_label_is_whether_a_snake_can_be_traced_from_one_marker_to_the_other(level, scenes, pictures):
    traced = np.array([connected(picture, pathfinder.LEVELS[level]) for picture in pictures[:300]])
    labels = scenes.labels[:300]
    assert traced[labels == 1].all()
    # snakes touch at times, so that a chain of their strokes leads over: some 2 in 100, at most 4 standard errors more
    apart = traced[labels == 0]
    assert apart.mean() < 0.02 + 4 * np.sqrt(0.02 / len(apart))


def test_markers_are_at_a_tail_and_at_the_far_tip_of_the_same_snake_or_the_other(scenes):
    for snakes, markers, label in zip(scenes.long, scenes.markers, scenes.labels, strict=True):
        [first] = [s for s in (0, 1) if np.array_equal(snakes[s, 0, :2], markers[0])]
        assert np.array_equal(snakes[first if label else 1 - first, -1, :2], markers[1])


def test_a_level_says_how_long_snakes_are_and_how_many_distract(level, scenes):
    long, (count, short) = {"hard": (14, (5, 4)), "intermediate": (9, (6, 3)), "easy": (6, (10, 2))}[level]
    assert scenes.long.shape[1:] == (2, long, 3)
    assert scenes.short.shape[1:] == (count, short, 3)
    placed = (scenes.short[:, :, 0, 2] >= 0).sum(axis=1)
    assert 0 < placed.mean() < count and placed.max() > 2


def test_fewer_images_are_the_first_of_more():
    done: list[tuple[int, int]] = []
    more = pathfinder.generate(4, level="easy", images=1200, processes=1, progress=lambda *now: done.append(now))
    assert done == [(500, 1200), (1000, 1200), (1200, 1200)]
    for images in (30, 700):
        fewer = pathfinder.generate(4, level="easy", images=images, processes=1)
        assert np.array_equal(fewer.documents.raw, more.documents.raw[: images * SIDE * SIDE])


@pytest.mark.deep
def test_the_same_seed_gives_the_same_bytes_on_one_process_and_on_two(level):
    one, two = (pathfinder.generate(4, level=level, images=2200, processes=processes) for processes in (1, 2))
    assert one.hash == two.hash and one.source_hash == two.source_hash
    assert np.array_equal(one.documents.raw, two.documents.raw)


def test_pictures_are_sequences_of_grey_values_in_three_parts_of_either_label():
    data = pathfinder.generate(level="easy", images=1000, processes=1)
    assert [len(data.parts[part]) for part in ("train", "validation", "test")] == [800, 100, 100]
    used = np.concatenate([cases.documents for cases in data.parts.values()])
    assert sorted(used) == list(range(1000)) and list(used) != list(range(1000))
    assert (data.name, data.title, data.length, data.vocabulary) == (
        "lra-pathfinder-easy", "Pathfinder (easy)", 1024, 256,
    )  # fmt: skip
    labels = np.concatenate([cases.labels for cases in data.parts.values()])
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(1000)
    scenes = pathfinder.scenes(level="easy")
    picture = pathfinder.drawn(scenes)[7]
    assert data.documents[7].tolist() == picture.flatten().tolist()
    assert labels[list(used).index(7)] == scenes.labels[7]


def test_another_seed_and_another_level_give_other_pictures():
    sets = [pathfinder.generate(seed, level=level, images=10, processes=1) for seed in (0, 1) for level in LEVELS]
    assert len({data.hash for data in sets}) == len({data.source_hash for data in sets}) == 6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"level": "medium"}, "there is no level 'medium': take one of hard, intermediate, easy"),
        ({"images": 9}, "images is 9: take 10 or more"),
        ({"seed": -2}, "seed is -2"),
        ({"processes": 0}, "processes is 0"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        pathfinder.generate(**{"processes": 1} | arguments)


def test_the_sheet_of_samples_is_a_small_picture():
    pytest.importorskip("matplotlib")
    from primaldual.data.sequences.pathfinder.sheet import sheet

    picture = sheet()
    assert picture.startswith(b"\x89PNG") and len(picture) < 150_000
