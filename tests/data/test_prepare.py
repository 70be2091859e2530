"""Series are prepared as the reference code bases prepare them."""

import numpy as np
import pytest
import torch

from data.files import text
from primaldual.data import DataFormatError, Dataset, Preparation, fill_gaps
from primaldual.data.prepare import assemble
from primaldual.data.ts import TsFile, read_ts

NAN = float("nan")


def file(*rows: str, equal: bool = False) -> TsFile:
    return read_ts(text(*rows, equal=equal).splitlines(), "toy.ts")


def toy() -> Dataset:
    return assemble("Toy", file("1,2,6:4,5,6:b", "3,?:?,?:a"), file("1,2,3,4:1,1,1,1:a"))


def test_gaps_are_filled_as_pandas_interpolates_in_both_directions():
    pandas = pytest.importorskip("pandas")
    generator = np.random.default_rng(0)
    series = generator.normal(size=(30, 5))
    series[generator.random(series.shape) < 0.4] = NAN
    series[:, 3] = NAN
    expected = pandas.DataFrame(series).interpolate(method="linear", limit_direction="both").to_numpy()
    np.testing.assert_allclose(fill_gaps(series), expected, rtol=0, atol=1e-14)
    assert np.isnan(fill_gaps(series)[:, 3]).all()


def test_channels_are_standardised_by_all_training_steps_with_the_sample_deviation():
    data = toy()
    first = np.array([1, 2, 6, 3, 3.0])  # the gap is filled before the statistics are taken
    mean, std = first.mean(), first.std(ddof=1)
    torch.testing.assert_close(data.mean, torch.tensor([mean, 5.0], dtype=torch.float64))
    torch.testing.assert_close(data.std, torch.tensor([std, 1.0], dtype=torch.float64))
    torch.testing.assert_close(
        data.train.x[0, :, 0].double(), torch.tensor((first[:3] - mean) / std), rtol=0, atol=1e-6
    )
    torch.testing.assert_close(data.test.x[0, :, 1], torch.full((3,), -4.0))


def test_a_constant_channel_becomes_zero_and_not_nan():
    series = [np.full((4, 1), 7.0)]
    assert torch.equal(Preparation.fit(series).apply(series)[0], torch.zeros(1, 4, 1))


def test_the_length_is_that_of_the_longest_training_series():
    data = toy()
    assert (data.length, data.longest) == (3, 4)
    assert data.train.lengths.tolist() == [3, 2] and data.test.lengths.tolist() == [3]
    assert torch.equal(data.train.x[1, 2], torch.zeros(2))  # padded after standardising: exactly 0
    assert data.train.padding.tolist() == [[False] * 3, [False, False, True]]
    assert data.test.padding is None


def test_classes_are_in_alphabetical_order():
    rows = [f"1,2:1,2:{label}" for label in ("10", "9", "1")]
    header = text(*rows).replace("@classLabel true b A", "@classLabel true 1 9 10")
    data = assemble("Toy", read_ts(header.splitlines(), "toy.ts"), None)
    assert data.classes == ("1", "10", "9") and data.train.y.tolist() == [1, 2, 0]
    assert (data.outputs, len(data.test)) == (3, 0)


def test_one_class_is_nothing_to_learn():
    with pytest.raises(DataFormatError, match="every series is of class 'a': there is nothing to learn"):
        assemble("Toy", file("1,2:3,4:A", "5,6:7,8:A"), file("1,2:3,4:b"))


def test_a_channel_without_any_value_stays_nan_until_it_is_filled_with_the_mean():
    data = toy()
    assert data.train.x[1, :2, 1].isnan().all() and int(data.train.x.isnan().sum()) == 2
    filled = data.filled()
    assert torch.equal(filled.train.x[1], torch.nan_to_num(data.train.x[1], 0.0))
    assert any("no value at all" in note for note in data.notes)


def test_the_hash_sees_every_value_and_nothing_else():
    same, other = toy(), toy()
    assert toy().hash == same.hash
    other.test.x[0, 0, 0] += 1e-6
    assert other.hash != same.hash


def test_moving_to_a_device_takes_all_tensors():
    moved = toy().to("meta")
    assert {part.device.type for split in (moved.train, moved.test) for part in (split.x, split.lengths, split.y)} == {
        "meta"
    }
