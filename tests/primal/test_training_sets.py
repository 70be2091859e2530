"""S, the training sets: windows, poolings, clusters."""

import math
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from primaldual import Primal, attention
from primaldual.primal import AllKeys, Fixed, Pooled, Sparse, Strided, Window

TIGHT = {"rtol": 1e-12, "atol": 1e-12}
RAGGED = [1, 3, 8, 11]
HOWS = ["mean", "max", "conv", "kmeans"]


class Slow(NamedTuple):
    """One point: its tokens, key and value; None for both when no token of it is seen."""

    tokens: list[int]
    key: Tensor | None
    value: Tensor | None


def windows_of(pooled: Pooled, scale: int, length: int) -> list[list[int]]:
    """The tokens of every window, in order, by counting."""
    alone = [[t] for t in range(min(pooled.prefix, length))]
    rest = list(range(pooled.prefix, length))
    if pooled.grid is None:
        return alone + [rest[i : i + scale] for i in range(0, len(rest), scale)]
    rows, columns = pooled.grid
    blocks = []
    for top in range(0, rows, scale):
        for left in range(0, columns, scale):
            patch = [
                pooled.prefix + r * columns + c
                for r in range(top, min(top + scale, rows))
                for c in range(left, min(left + scale, columns))
            ]
            blocks.append(patch)
    return alone + blocks


def lloyd(keys: Tensor, valid: list[int], scale: int) -> list[list[int]]:
    """k-means of some tokens, starting at every scale-th of them."""
    members = [[t] for t in valid[::scale]]
    centres = [keys[m].mean(0) for m in members]
    for _ in range(Pooled.kmeans_steps):
        centres = [keys[m].mean(0) if m else c for m, c in zip(members, centres, strict=True)]
        members = [[] for _ in centres]
        for t in valid:
            distances = [float((keys[t] - c).square().sum()) for c in centres]
            members[distances.index(min(distances))].append(t)
    return members


def slowly(
    pooled: Pooled, scale: int, keys: Tensor, values: Tensor, seen: list[bool], taps: Tensor | None = None
) -> list[Slow]:
    """The points of one head and row, in plain loops."""
    length = keys.shape[0]
    groups = windows_of(pooled, scale, length)
    if pooled.how == "kmeans":
        valid = [t for t in range(pooled.prefix, length) if seen[t]]
        groups = groups[: min(pooled.prefix, length)] + lloyd(keys, valid, scale)
    points = []
    for group in groups:
        taken = [t for t in group if seen[t]]
        if not taken:
            points.append(Slow([], None, None))
        elif pooled.how == "max":
            points.append(Slow(taken, keys[taken].amax(0), values[taken].amax(0)))
        elif pooled.how == "conv" and taps is not None and not (len(group) == 1 and group[0] < pooled.prefix):
            places = [place_of(pooled, scale, t) for t in taken]
            weights = taps[places] * len(taps) / len(taken)
            points.append(Slow(taken, weights @ keys[taken], weights @ values[taken]))
        else:
            points.append(Slow(taken, keys[taken].mean(0), values[taken].mean(0)))
    return points


def place_of(pooled: Pooled, scale: int, token: int) -> int:
    after = token - pooled.prefix
    if pooled.grid is None:
        return after % scale
    row, column = divmod(after, pooled.grid[1])
    return row % scale * scale + column % scale


@pytest.mark.parametrize(
    ("heads", "scales"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (4, (1, 1, 2, 2)),
        (8, (1, 1, 2, 2, 4, 4, 8, 8)),
        (12, (1, 1, 2, 2, 4, 4, 8, 8, 8, 8, 8, 8)),
    ],
)
def test_default_scales_double_every_second_head_up_to_eight(heads, scales):
    assert Pooled().head_scales(heads) == scales
    assert Sparse(over=Pooled()).head_scales(heads) == scales


def test_unpooled_heads_have_scale_one():
    assert AllKeys().head_scales(3) == (1, 1, 1)
    assert Sparse().head_scales(3) == (1, 1, 1)


@pytest.mark.parametrize("training_set", [Pooled((1, 2)), Sparse(over=Pooled((1, 2)))], ids=repr)
def test_scales_and_heads_must_agree(training_set):
    with pytest.raises(ValueError, match=r"2 scales \(1, 2\) for 3 heads; give one scale per head"):
        training_set.head_scales(3)
    q = torch.randn(1, 3, 4, 2)
    with pytest.raises(ValueError, match="2 scales"):
        attention(q, q, q, Primal(training_set=training_set))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scales": ()}, "scales must name one scale per head, got none"),
        ({"scales": (1, 0)}, "every scale must be an integer of at least 1, got 0"),
        ({"scales": (1, 2.0)}, "every scale must be an integer of at least 1, got 2.0"),
        ({"how": "median"}, "how must be one of mean, max, conv, kmeans; got 'median'"),
        ({"prefix": -1}, "prefix must be an integer of at least 0, got -1"),
        ({"grid": (3,)}, r"grid must be a pair of positive integers, got \(3,\)"),
        ({"grid": (3, 0)}, "grid must be a pair of positive integers"),
    ],
    ids=str,
)
def test_a_pooling_that_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        Pooled(**arguments)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Sparse("strided"), "pattern must be a Pattern such as"),
        (lambda: Sparse(over=Strided()), "over must be AllKeys"),
        (lambda: Sparse(over=Sparse()), "over must be AllKeys"),
        (lambda: Sparse(over=Pooled(how="kmeans")), "clusters have no order"),
    ],
    ids=["name", "pattern for set", "sparse of sparse", "kmeans"],
)
def test_a_sparse_set_that_makes_no_sense_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scale", [1, 2, 3, 5])
@pytest.mark.parametrize("prefix", [0, 1, 20])
@pytest.mark.parametrize("length", RAGGED)
def test_tokens_fall_into_consecutive_windows_after_the_prefix(length, prefix, scale):
    pooled = Pooled((scale,), prefix=prefix)
    windows = windows_of(pooled, scale, length)
    coordinate = pooled.coordinate(torch.arange(length), scale, length).tolist()
    assert pooled.points(scale, length) == len(windows)
    assert coordinate == [w for w, members in enumerate(windows) for _ in members]
    assert Sparse(over=pooled).points(scale, length) == len(windows)


@pytest.mark.parametrize("scale", [1, 2, 3, 5])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [(1, 1), (4, 6), (5, 3), (1, 7)], ids=str)
def test_patches_fall_into_square_windows_of_the_grid(grid, prefix, scale):
    length = prefix + math.prod(grid)
    pooled = Pooled((scale,), prefix=prefix, grid=grid)
    windows = windows_of(pooled, scale, length)
    coordinate = pooled.coordinate(torch.arange(length), scale, length)
    assert pooled.points(scale, length) == len(windows)
    for w, members in enumerate(windows):
        assert (coordinate == w).nonzero().flatten().tolist() == sorted(members)


def test_a_grid_that_does_not_fit_the_tokens_is_an_error():
    q = torch.randn(1, 1, 7, 2)
    with pytest.raises(ValueError, match="grid 2×3 and 0 prefix tokens make 6 tokens, but the sequence has 7"):
        attention(q, q, q, Primal(training_set=Pooled((2,), grid=(2, 3))))


def compare_to_loops(
    pooled: Pooled, scale: int, length: int, hidden: Tensor | None, taps: Tensor | None = None
) -> None:
    """`reduce` against the loops, every row and head."""
    batch, heads = 2, 2
    keys, values = torch.randn(2, batch, heads, length, 3, dtype=torch.float64)
    seen = torch.ones(batch, length, dtype=torch.bool) if hidden is None else ~hidden
    keys, values = (x.masked_fill(~seen[:, None, :, None], 0.0) for x in (keys, values))
    parameters = {} if taps is None else {f"pool_kernel_{scale}": taps}
    points = pooled.reduce(keys, values, seen[:, None, None, :], scale, parameters)
    for b in range(batch):
        for h in range(heads):
            own_taps = None if taps is None else taps[h]
            expected = slowly(pooled, scale, keys[b, h], values[b, h], seen[b].tolist(), own_taps)
            found = points.seen.expand(batch, heads, -1, -1)[b, h, 0]
            assert found.tolist() == [bool(p.tokens) for p in expected] + [False] * (len(found) - len(expected))
            for w, point in enumerate(expected):
                if point.key is None:
                    continue
                torch.testing.assert_close(points.keys[b, h, 0, w], point.key, **TIGHT)
                torch.testing.assert_close(points.values[b, h, 0, w], point.value, **TIGHT)
                if points.share is not None:
                    share = points.share.expand(batch, heads, -1, -1, -1)[b, h, 0, w]
                    assert share.tolist() == pytest.approx(
                        [1 / len(point.tokens) if t in point.tokens else 0.0 for t in range(length)]
                    )


def some_hidden(length: int) -> Tensor:
    """A ragged end in one row, holes in the other."""
    index = torch.arange(length)
    return torch.stack([index >= max(1, length - 3), (index % 4 == 1) | (index % 4 == 2)])


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("scale", [2, 3, 8])
@pytest.mark.parametrize("length", RAGGED)
def test_pooling_is_what_the_loops_say(how, padded, prefix, scale, length):
    compare_to_loops(Pooled((scale, scale), how, prefix), scale, length, some_hidden(length) if padded else None)


@pytest.mark.parametrize("how", ["mean", "max", "conv"])
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("scale", [2, 3])
@pytest.mark.parametrize("grid", [(4, 4), (3, 5)], ids=str)
def test_pooling_over_a_grid_is_what_the_loops_say(how, padded, prefix, scale, grid):
    length = prefix + math.prod(grid)
    hidden = some_hidden(length) if padded else None
    compare_to_loops(Pooled((scale, scale), how, prefix, grid), scale, length, hidden)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("grid", [None, (3, 4)], ids=str)
def test_convolutional_pooling_weighs_the_places_of_a_window(grid, prefix, padded):
    scale, length = 2, prefix + 12 if grid else 11
    pooled = Pooled((scale, scale), "conv", prefix, grid)
    taps = torch.rand(2, pooled.learned(2, 3)["pool_kernel_2"].shape[1], dtype=torch.float64)
    compare_to_loops(pooled, scale, length, some_hidden(length) if padded else None, taps)


def test_convolutional_pooling_learns_a_kernel_per_head_of_each_scale_starting_as_the_mean():
    learned = Pooled((1, 2, 4, 2), how="conv").learned(4, 8)
    assert {name: tuple(x.shape) for name, x in learned.items()} == {"pool_kernel_2": (2, 2), "pool_kernel_4": (1, 4)}
    assert torch.equal(learned["pool_kernel_4"], torch.full((1, 4), 0.25))
    assert Pooled((1, 3), how="conv", grid=(6, 6)).learned(2, 8)["pool_kernel_3"].shape == (1, 9)
    assert Sparse(over=Pooled((1, 2), how="conv")).learned(2, 8).keys() == {"pool_kernel_2"}
    assert Pooled((1, 2)).learned(2, 8) == {}


def test_max_and_convolutional_pooling_do_not_share_a_weight_among_tokens():
    keys = torch.randn(1, 1, 4, 2)
    seen = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    assert Pooled((2,), "max").reduce(keys, keys, seen, 2, {}).share is None
    assert Pooled((2,), "conv").reduce(keys, keys, seen, 2, {}).share is None


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("prefix", [3, 4, 9])
@pytest.mark.parametrize("impl", ["auto", "reference"])
def test_a_prefix_longer_than_the_sequence_leaves_it_unpooled(how, prefix, impl):
    q = torch.randn(1, 1, 3, 2, dtype=torch.float64)
    pooled = attention(q, q, q, Primal(training_set=Pooled((2,), how, prefix)), impl=impl)
    torch.testing.assert_close(pooled, attention(q, q, q, "softmax"), **TIGHT)


def test_scale_one_is_no_pooling_whatever_the_way():
    keys, values = torch.randn(2, 1, 1, 5, 2)
    seen = torch.tensor([True, True, False, True, False])[None, None, None]
    for how in HOWS:
        points = Pooled((1,), how).reduce(keys, values, seen, 1, {})
        assert torch.equal(points.keys[:, :, 0], keys)
        assert torch.equal(points.values[:, :, 0], values)
        assert torch.equal(points.seen, seen)


def test_where_each_query_sees_its_own_tokens_a_window_is_the_mean_of_those():
    keys, values = torch.randn(2, 1, 1, 5, 2, dtype=torch.float64)
    seen = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    points = Pooled((2,)).reduce(keys, values, seen, 2, {})
    assert points.keys.shape == (1, 1, 5, 3, 2)
    for i in range(5):
        for w, window in enumerate([[0, 1], [2, 3], [4]]):
            visible = [t for t in window if t <= i]
            assert points.seen[0, 0, i, w].item() == bool(visible)
            if visible:
                torch.testing.assert_close(points.keys[0, 0, i, w], keys[0, 0, visible].mean(0), **TIGHT)
                torch.testing.assert_close(points.values[0, 0, i, w], values[0, 0, visible].mean(0), **TIGHT)


@given(
    seed=st.integers(0, 2**16), length=st.integers(1, 12), scale=st.integers(2, 5), prefix=st.integers(0, 3),
    hidden=st.integers(0, 2**12 - 1),
)  # fmt: skip
def test_k_means_makes_valid_over_scale_clusters_of_the_valid_keys(seed, length, scale, prefix, hidden):
    prefix = min(prefix, length - 1)
    keys = torch.randn(1, 1, length, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    seen = torch.tensor([not hidden >> t & 1 for t in range(length)])
    points = Pooled((scale,), "kmeans", prefix).reduce(keys, keys, seen[None, None, None], scale, {})
    valid = int(seen[prefix:].sum())
    assert points.seen[0, 0, 0, prefix:].sum() <= -(-valid // scale)  # a cluster can lose its keys
    if valid:
        assert points.seen[0, 0, 0, prefix:].any()
    membership = points.share[0, 0, 0] > 0
    assert torch.equal(membership.sum(0), seen.long())  # every valid token in one cluster, no other in any
    compare_to_loops_of_one(points, Pooled((scale,), "kmeans", prefix), scale, keys[0, 0], seen.tolist())


def compare_to_loops_of_one(points, pooled: Pooled, scale: int, keys: Tensor, seen: list[bool]) -> None:
    for w, point in enumerate(slowly(pooled, scale, keys, keys, seen)):
        assert points.seen[0, 0, 0, w].item() == bool(point.tokens)
        if point.key is not None:
            torch.testing.assert_close(points.keys[0, 0, 0, w], point.key, **TIGHT)


@pytest.mark.parametrize("valid", [1, 3, 4, 8, 9])
def test_well_separated_keys_make_exactly_as_many_clusters_as_there_are_groups(valid):
    # token t lies near the corner t // 3, far from the others
    keys = (torch.arange(12).div(3, rounding_mode="floor") * 100.0).double()[:, None] + torch.rand(12, 1)
    seen = torch.arange(12) < valid
    points = Pooled((3,), "kmeans").reduce(keys[None, None], keys[None, None], seen[None, None, None], 3, {})
    assert points.seen.sum() == -(-valid // 3)
    for w in range(-(-valid // 3)):
        members = [t for t in range(3 * w, 3 * w + 3) if t < valid]
        torch.testing.assert_close(points.keys[0, 0, 0, w], keys[members].mean(0), **TIGHT)


def test_every_key_of_a_settled_clustering_is_nearest_to_its_own_centre():
    keys = torch.randn(1, 1, 40, 2, dtype=torch.float64)
    seen = torch.ones(1, 1, 1, 40, dtype=torch.bool)
    points = Pooled((10,), "kmeans").reduce(keys, keys, seen, 10, {})
    centres = points.keys[0, 0, 0].masked_fill(~points.seen[0, 0, 0, :, None], torch.inf)
    nearest = torch.cdist(keys[0, 0], centres).nan_to_num(torch.inf).argmin(-1)
    assert torch.equal(nearest, points.share[0, 0, 0].argmax(0))


def test_clusters_do_not_depend_on_chance_and_pass_no_gradient_to_the_assignment():
    keys = torch.randn(1, 2, 9, 3, dtype=torch.float64, requires_grad=True)
    seen = torch.ones(1, 1, 1, 9, dtype=torch.bool)
    pooled = Pooled((3, 3), "kmeans")
    torch.manual_seed(1)
    first = pooled.reduce(keys, keys, seen, 3, {})
    torch.manual_seed(2)
    second = pooled.reduce(keys, keys, seen, 3, {})
    assert torch.equal(first.keys, second.keys)
    assert not first.share.requires_grad
    assert torch.autograd.grad(first.keys.sum(), keys)[0].isfinite().all()


@pytest.mark.parametrize("pattern", [Strided(3), Fixed(3, 1), Window(1)], ids=repr)
def test_a_sparse_pattern_is_read_in_the_coordinates_of_the_pooled_keys(pattern):
    sparse = Sparse(pattern, Pooled((2,), prefix=1))
    visible = sparse.visible(2, 8, 11, torch.device("cpu"))
    assert visible.shape == (8, 6)
    for i in range(8):
        own = 0 if i == 0 else 1 + (i - 1) // 2
        expected = [bool(pattern.allows(torch.tensor(own), torch.tensor(j), 6)) for j in range(6)]
        assert visible[i].tolist() == expected


def test_every_query_of_an_unsparse_set_sees_all():
    assert AllKeys().visible(1, 3, 4, torch.device("cpu")) is None
    assert Pooled((2,)).visible(2, 3, 4, torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("training_set", "scale", "refused"),
    [
        (AllKeys(), 1, None),
        (Pooled((2,)), 2, None),
        (Pooled((2,), prefix=3), 2, None),
        (Pooled((1,), "max"), 1, None),
        (Pooled((2,), "max"), 2, "max pooling"),
        (Pooled((2,), "conv"), 2, "conv pooling"),
        (Pooled((2,), "kmeans"), 2, "kmeans pooling"),
        (Pooled((2,), grid=(2, 2)), 2, "pooling over a grid"),
        (Sparse(over=Pooled((2,))), 2, None),
        (Sparse(over=Pooled((2,), "max")), 2, "max pooling"),
    ],
    ids=lambda x: repr(x) if not isinstance(x, int | str) else None,
)
def test_only_means_of_1d_windows_have_a_causal_form(training_set, scale, refused):
    reason = training_set.causal_refusal(scale)
    assert reason is None if refused is None else refused in reason
    q = torch.randn(1, 1, 4, 2)
    primal = Primal(training_set=training_set)
    if refused is None:
        assert attention(q, q, q, primal, is_causal=True).isfinite().all()
    else:
        with pytest.raises(ValueError, match=refused):
            attention(q, q, q, primal, is_causal=True)
