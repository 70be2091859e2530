"""Head redundancy of trained models beside the paper's."""

import json

import pytest
import torch

from primaldual import mechanism
from primaldual.models import SequenceClassifier, SequenceConfig
from primaldual.paper.head_distance import PAPER, Redundancy, measured
from primaldual.regression import HeadDistances, LayerDistances, head_distance


def distances(*means: float, shared: bool = True) -> HeadDistances:
    """Two heads, two documents each side of the mean, and a layer for each mean; shared is half of it."""
    each = [torch.tensor([[[0.0, m + d], [m + d, 0.0]] for d in (-0.1, 0.1)], dtype=torch.float64) for m in means]
    layers = (LayerDistances("a", i, (1, 2), x / 2 if shared else None, x) for i, x in enumerate(each))
    return HeadDistances(tuple(layers))


def by_hand() -> Redundancy:
    softmax = (distances(2.0, 3.0), distances(3.0, 4.0))
    found = {"softmax": softmax, "sh": (distances(1.0, 1.0, shared=False),), "qk-norm": ()}
    return Redundancy("Retrieval (manual pages)", found, ("nothing here is the paper's",))


def test_the_papers_numbers_are_those_of_its_table():
    assert [tuple(PAPER[name]) for name in ("softmax", "bn", "sh", "bn+sh")] == [
        (2.01, 0.39), (2.45, 0.66), (3.81, 0.75), (3.19, 1.01),
    ]  # fmt: skip


def test_the_markdown_is_exactly_this():
    assert (
        by_hand().markdown().partition("\n- L2")[0]
        == """\
# table-head-distance: L2 distance between heads, Retrieval (manual pages)

|  |  | softmax | sh | qk-norm |
| :-- | :-- | --: | --: | --: |
| mean | paper | 2.01 | 3.81 | – |
|  | repeated | 3.00 ± 0.71 | 1.00 | – |
|  | shared | 1.50 ± 0.35 | – | – |
| std of layers | paper | 0.39 | 0.75 | – |
|  | repeated | 0.71 ± 0.00 | 0.00 | – |
|  | shared | 0.35 ± 0.00 | – | – |
| std in layers | paper | 0.39 | 0.75 | – |
|  | repeated | 0.14 ± 0.00 | 0.14 | – |
|  | shared | 0.07 ± 0.00 | – | – |

## Notes

- nothing here is the paper's
"""
    )


def test_the_csv_has_every_number_and_the_papers():
    lines = by_hand().csv().splitlines()
    assert lines[:4] == [
        "figure,pooling,mechanism,seeds,mean,std,paper",
        "mean,repeated,softmax,2,3,0.707107,2.01",
        "mean,repeated,sh,1,1,,3.81",
        "mean,repeated,qk-norm,0,,,",
    ]
    assert len(lines) == 1 + 3 * 2 * 3 and lines[5] == "mean,shared,sh,0,,,3.81"


def test_latex_and_json_hold_the_same():
    assert r" & repeated & 3.00 $\pm$ 0.71 & 1.00 & -- \\" in by_hand().latex()
    found = by_hand().to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["mechanisms"]["softmax"][1]["repeated"]["mean"] == 3.5


def test_it_is_measured_on_the_models_of_every_seed():
    batch = (torch.randint(1, 200, (2, 2, 24)), torch.zeros(2, 2, 24, dtype=torch.bool))
    config = {"length": 24, "outputs": 2, "pairs": True}
    models = {n: [SequenceClassifier(SequenceConfig(**config, mechanism=n)) for _ in range(2)] for n in PAPER}
    found = measured({name: iter(seeds) for name, seeds in models.items()}, batch, "Retrieval")
    assert list(found.found) == list(PAPER)
    for name, seeds in models.items():
        for pooling in ("shared", "repeated"):
            wanted = [getattr(head_distance(model, batch), pooling).mean for model in seeds]
            assert found.values(name, pooling, "mean") == pytest.approx(wanted)
        scales = mechanism(name).training_set.head_scales(2)
        assert {layer.scales for one in found.found[name] for layer in one.layers} == {scales}
