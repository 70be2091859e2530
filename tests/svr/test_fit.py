"""The solver against other people's solvers, and the optimality conditions on every solution."""

import warnings

import numpy as np
import pytest
import torch

from primaldual import Primal, attention, mechanism
from primaldual.dual import form_of
from primaldual.primal import AllKeys, EluPlusOne, Fixed, Taylor, Unit
from primaldual.regression import KernelError, NotConvergedWarning, PerQueryError, certify, fit, recover
from primaldual.svr import fit as module
from primaldual.svr.design import design
from primaldual.svr.regressions import Regressions, objectives, relative_gap
from primaldual.svr.solver import Solution, solve
from support.own import OWN

PROBLEMS = [
    # seed, points, head dimension, C over N², ε: C is of the order of h(k) ~ N and above
    (seed, n, d, factor, epsilon)
    for seed, (n, d, factor, epsilon) in enumerate(
        [
            (5, 2, 0.2, 0.1), (8, 4, 0.5, 0.05), (10, 4, 0.1, 0.1), (12, 8, 1.0, 0.2), (15, 3, 0.3, 0.0),
            (16, 8, 0.05, 0.1), (20, 4, 0.2, 0.3), (20, 16, 2.0, 0.1), (24, 8, 0.4, 0.01), (25, 5, 0.1, 0.2),
            (30, 8, 0.3, 0.1), (30, 4, 0.05, 0.0), (32, 16, 0.5, 0.05), (36, 6, 0.2, 0.5), (40, 8, 0.1, 0.1),
            (40, 12, 1.0, 0.02), (48, 8, 0.2, 0.1), (50, 16, 0.5, 0.1), (60, 8, 0.3, 0.05), (64, 16, 0.1, 0.1),
            (64, 8, 1.0, 0.2),
        ]
    )
]  # fmt: skip


def problem(seed: int, n: int, d: int, outputs: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, n, d, generator=generator, dtype=torch.float64),
        torch.randn(1, n, outputs, generator=generator, dtype=torch.float64),
    )


def kernel_of(solved) -> np.ndarray:
    return (solved.design.kernel * solved.design.log_scale.exp()[..., None, None])[0, 0].numpy()


def dual_objective(beta: np.ndarray, kernel: np.ndarray, y: np.ndarray, epsilon: float) -> float:
    return float(y @ beta - epsilon * np.abs(beta).sum() - beta @ kernel @ beta / 2)


@pytest.mark.parametrize(("seed", "n", "d", "factor", "epsilon"), PROBLEMS, ids=lambda x: str(x))
def test_the_objective_is_scikit_learn_s(seed: int, n: int, d: int, factor: float, epsilon: float) -> None:
    sklearn_svm = pytest.importorskip("sklearn.svm")
    keys, targets = problem(seed, n, d)
    c = factor * n * n
    solved = fit("softmax", keys, targets, C=c, epsilon=epsilon, bias=True)
    kernel, beta = kernel_of(solved), (solved.alpha - solved.alpha_tilde)[0].numpy()
    for output in range(targets.shape[-1]):
        y = targets[0, :, output].numpy()
        other = sklearn_svm.SVR(kernel="precomputed", C=c, epsilon=epsilon, tol=1e-8).fit(kernel, y)
        theirs = np.zeros(n)
        theirs[other.support_] = other.dual_coef_[0]
        expected = dual_objective(theirs, kernel, y, epsilon)
        assert dual_objective(beta[:, output], kernel, y, epsilon) == pytest.approx(expected, rel=1e-4)


def test_the_problems_have_points_in_all_three_states() -> None:
    zero = free = bound = 0
    for seed, n, d, factor, epsilon in PROBLEMS:
        keys, targets = problem(seed, n, d)
        solved = fit("softmax", keys, targets, C=factor * n * n, epsilon=epsilon, bias=True)
        size = (solved.alpha + solved.alpha_tilde) / (factor * n * n)
        zero, free = zero + int((size == 0).sum()), free + int(((size > 0) & (size < 1 - 1e-9)).sum())
        bound += int((size >= 1 - 1e-9).sum())
    assert min(zero, free, bound) > 50


@pytest.mark.parametrize("name", ["softmax", "bn", "linear", "qk-norm", "conv1d"])
@pytest.mark.parametrize(("n", "factor"), [(12, 0.2), (30, 1.0)])
def test_without_a_bias_the_objective_is_a_generic_solver_s(name: str, n: int, factor: float) -> None:
    cvxpy = pytest.importorskip("cvxpy")
    keys, targets = problem(n, n, 6, outputs=1)
    c, epsilon = factor * n * n, 0.1
    solved = fit(name, keys, targets, C=c, epsilon=epsilon)
    kernel, y = kernel_of(solved), targets[0, :, 0].numpy()
    scale = kernel.diagonal().max()  # in units where K is of order 1, as a generic solver needs
    values, vectors = np.linalg.eigh(kernel / scale)
    root = vectors * np.sqrt(values.clip(0))
    beta = cvxpy.Variable(n)
    objective = y @ beta - epsilon * cvxpy.norm1(beta) - cvxpy.sum_squares(root.T @ beta) / 2
    expected = cvxpy.Problem(cvxpy.Maximize(objective), [cvxpy.abs(beta) <= c * scale]).solve(solver="CLARABEL")
    mine = (solved.alpha - solved.alpha_tilde)[0, :, 0].numpy() * scale
    assert dual_objective(mine, kernel / scale, y, epsilon) == pytest.approx(expected, rel=1e-6)


MECHANISMS = [
    "softmax", "bn", "sh", "bn+sh", "conv1d", "linear", "linear-bn", "linear-sh", "linear-bn+sh", "qk-norm", "alibi+sh",
]  # fmt: skip


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("name", MECHANISMS)
def test_every_solution_is_certified_and_bounded(name: str, bias: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 4, 20, 5, generator=generator, dtype=torch.float64)
    targets = torch.randn(2, 4, 20, 3, generator=generator, dtype=torch.float64)
    solved = fit(name, keys, targets, C=80.0, epsilon=0.1, bias=bias)
    assert solved.certificate.ok(1e-6)
    assert (solved.alpha * solved.alpha_tilde == 0).all()
    assert ((solved.alpha >= 0) & (solved.alpha <= 80 * (1 + 1e-12))).all()
    # Remark v_bounded: |v_j(d)| ≤ C/|h(k_j)|
    h = solved.design.log_h.exp().reshape(*solved.seen.shape)
    assert (solved.values.abs() <= 80.0 / h.unsqueeze(-1) * (1 + 1e-9)).all()
    beta = solved.alpha - solved.alpha_tilde
    if bias:  # Eqn. dldb
        assert (beta.sum(-2).abs() <= 1e-7 * beta.abs().sum(-2).clamp(min=1)).all()
    assert (beta[~solved.seen] == 0).all()
    assert solved.certificate.condition.shape == (2, 4) and (solved.certificate.rank > 0).all()


def test_without_a_bias_the_dual_variables_need_not_sum_to_zero() -> None:
    """Remark v_centered."""
    keys, _ = problem(0, 10, 4)
    solved = fit("softmax", keys, torch.ones(1, 10, 1, dtype=torch.float64), C=1e3, epsilon=0.1)
    assert (solved.alpha - solved.alpha_tilde).sum() > 1


@pytest.mark.parametrize("features", [Taylor(2), EluPlusOne(), mechanism("linear").features], ids=repr)
@pytest.mark.parametrize("bias", [False, True])
def test_the_primal_layer_and_the_dual_layer_are_one_function(features, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, targets, x = (torch.randn(2, 3, n, 4, generator=generator, dtype=torch.float64) for n in (15, 15, 7))
    solved = fit(Primal(features=features), keys, targets, C=50.0, epsilon=0.1, bias=bias)
    by_w, by_alpha = solved.predict(x, by="primal"), solved.predict(x, by="dual")
    torch.testing.assert_close(by_w, by_alpha, rtol=0, atol=1e-9)


def test_corner_cases() -> None:
    keys, targets = problem(1, 9, 4)
    one = fit("softmax", keys[:, :1], targets[:, :1], C=10.0, epsilon=0.1)  # N = 1
    assert one.certificate.ok(1e-8)
    flat = fit("softmax", keys, targets, C=1e4, epsilon=100.0)  # ε so large that nothing is a support vector
    assert not flat.support.any() and (flat.predict(keys) == 0).all() and flat.certificate.ok(1e-12)
    tight = fit("softmax", keys, targets, C=1e-6, epsilon=0.0)  # C so small that everything is at the bound
    assert (tight.alpha + tight.alpha_tilde == pytest.approx(1e-6, rel=1e-9)) and tight.certificate.ok(1e-8)
    exact = fit("softmax", keys, targets, C=1e9, epsilon=0.0)  # ε = 0: the targets are met
    torch.testing.assert_close(exact.predict(keys), targets, rtol=0, atol=1e-6)
    single = fit("softmax", keys, targets[..., :1], C=100.0, epsilon=0.1)  # D_v = 1
    both = fit("softmax", keys, targets, C=100.0, epsilon=0.1)
    torch.testing.assert_close(single.values, both.values[..., :1], rtol=0, atol=1e-8)
    low = fit("softmax", keys.float(), targets.float(), C=100.0, epsilon=0.1)
    assert low.values.dtype == torch.float64 and low.certificate.ok(1e-6)
    torch.testing.assert_close(low.values, both.values, rtol=0, atol=1e-4)


def test_duplicate_keys_share_one_function_value() -> None:
    keys, targets = problem(2, 8, 4)
    keys, targets = torch.cat([keys, keys], 1), torch.cat([targets, targets], 1)
    solved = fit("softmax", keys, targets, C=1e3, epsilon=0.05)
    assert solved.certificate.ok(1e-6) and solved.certificate.rank == 8 and solved.certificate.condition == torch.inf
    f = solved.predict(keys)
    torch.testing.assert_close(f[:, :8], f[:, 8:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
@pytest.mark.parametrize("epsilon", [0.0, 0.05])
@pytest.mark.parametrize("name", ["softmax", "linear"])
def test_a_price_far_over_the_targets_is_solved_where_the_kernel_is_singular(
    name: str, epsilon: float, bias: bool
) -> None:
    """No function of a 1-dimensional head meets 33 random targets, so that many α are at the bound."""
    keys, targets = problem(33, 33, 1)
    solved = fit(name, keys, targets, C=1e7, epsilon=epsilon, bias=bias)
    assert solved.certificate.condition == torch.inf and solved.certificate.ok(1e-6)
    assert (solved.alpha + solved.alpha_tilde >= 1e7 * (1 - 1e-9)).any()


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_the_gap_is_that_of_the_objectives_and_never_hides_in_their_rounding(bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    root, targets, beta = (torch.randn(3, 9, n, generator=generator, dtype=torch.float64) for n in (9, 2, 2))
    one = torch.ones(3, 1, 1, dtype=torch.float64)
    beta = beta.clamp(-1, 1)
    p = Regressions(
        root @ root.mT, targets, one, 0.1 * one, torch.ones(3, 9, 1, dtype=torch.bool), one.expand(3, 9, 1), bias
    )
    b = torch.randn(3, 1, 2, generator=generator, dtype=torch.float64) if bias else torch.zeros(3, 1, 2).double()
    primal, dual = objectives(p, beta, b)
    expected = (primal - dual).abs() / (1 + primal.abs() + dual.abs())
    torch.testing.assert_close(relative_gap(p, beta, b), expected, rtol=1e-9, atol=0)


def test_masked_keys_take_no_part() -> None:
    generator = torch.Generator().manual_seed(5)
    keys, targets = (torch.randn(2, 3, 12, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    hidden = torch.arange(12) >= torch.tensor([[12], [7]])
    poisoned = keys.masked_fill(hidden[:, None, :, None], 1e3)
    for name in ("softmax", "bn", "bn+sh", "linear-bn"):
        solved = fit(name, poisoned[:, :1].expand(-1, 4, -1, -1) if "sh" in name else poisoned,
                     targets[:, :1].expand(-1, 4, -1, -1) if "sh" in name else targets,
                     C=100.0, epsilon=0.1, key_padding_mask=hidden)  # fmt: skip
        alone = fit(name, (keys[1:, :1].expand(-1, 4, -1, -1) if "sh" in name else keys[1:])[:, :, :7],
                    (targets[1:, :1].expand(-1, 4, -1, -1) if "sh" in name else targets[1:])[:, :, :7],
                    C=100.0, epsilon=0.1)  # fmt: skip
        torch.testing.assert_close(solved.values[1, :, : alone.values.shape[2]], alone.values[0], rtol=0, atol=1e-7)


def test_a_price_per_problem() -> None:
    generator = torch.Generator().manual_seed(5)
    keys, targets = (torch.randn(2, 3, 12, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    prices = torch.tensor([[1.0, 10.0, 100.0], [5.0, 50.0, 500.0]])
    together = fit("softmax", keys, targets, C=prices, epsilon=0.1)
    for b in range(2):
        for h in range(3):
            alone = fit("softmax", keys[b, h], targets[b, h], C=float(prices[b, h]), epsilon=0.1)
            torch.testing.assert_close(together.values[b, h], alone.values, rtol=0, atol=1e-8)


def test_sparse_and_causal_heads_are_one_regression_per_query() -> None:
    keys, targets = problem(4, 12, 4)
    with pytest.raises(PerQueryError, match="sparse heads are one regression per query"):
        fit("sparse", keys, targets, C=10.0, epsilon=0.1)
    with pytest.raises(PerQueryError, match="causal heads are one regression per query"):
        fit("softmax", keys, targets, C=10.0, epsilon=0.1, is_causal=True)
    causal = fit("softmax", keys, targets, C=100.0, epsilon=0.1, is_causal=True, query=6)
    first = fit("softmax", keys[:, :7], targets[:, :7], C=100.0, epsilon=0.1)
    torch.testing.assert_close(causal.values[:, :7], first.values, rtol=0, atol=1e-8)
    assert (causal.values[:, 7:] == 0).all()
    primal = mechanism("sparse", stride=3)
    sparse = fit(primal, keys, targets, C=100.0, epsilon=0.1, query=6)
    kept = primal.training_set.visible(1, 12, 12, torch.device("cpu"))[6]
    subset = fit("softmax", keys[:, kept], targets[:, kept], C=100.0, epsilon=0.1)
    torch.testing.assert_close(sparse.values[:, kept], subset.values, rtol=0, atol=1e-8)


def test_a_solver_cut_short_says_so() -> None:
    keys, targets = problem(6, 40, 3)
    with pytest.warns(NotConvergedWarning, match="duality gap"):
        from primaldual.svr import solver

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(solver, "ACTIVE_SET_STEPS", 0)
            cut = fit("softmax", keys, targets, C=1e5, epsilon=0.01, max_iter=1)
    assert not cut.certificate.ok(1e-6)


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("far", [1.0, 5.0, 30.0])
@pytest.mark.parametrize("size", [1e-9, 1.0, 1e9])
def test_a_price_that_most_targets_are_over_is_solved_in_units_of_its_own(size: float, far: float, bias: bool) -> None:
    """Of keys far from one another h(k) and C K_jj leave float64; every target in whose reach no f comes is bounded."""
    keys, targets = problem(0, 50, 16)
    solved = fit("softmax", keys * far, targets * size, C=1e4 * size, epsilon=0.1 * size, bias=bias)
    assert solved.certificate.ok(1e-6)
    beta = solved.alpha - solved.alpha_tilde
    slack = (targets * size - solved.predict(keys * far)).abs() > 0.1 * size * (1 + 1e-9)
    assert (beta.abs()[slack] >= 1e4 * size * (1 - 1e-9)).all()
    assert slack.any() == (far > 1)


def test_a_certificate_that_is_not_met_warns_whatever_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, targets = problem(6, 40, 3)

    def without_zeros(p: Regressions, tol: float, max_iter: int) -> Solution:
        found = solve(p, tol, max_iter)
        assert (found.beta == 0).any()
        return found._replace(beta=found.beta.where(found.beta != 0, 1e-12))

    monkeypatch.setattr(module, "solve", without_zeros)
    with pytest.warns(NotConvergedWarning, match="residuals of the optimality conditions up to"):
        off = fit("softmax", keys, targets, C=100.0, epsilon=0.5)
    assert off.certificate.gap.max() < 1e-7 and not off.certificate.ok(1e-6)


def test_what_is_no_tensor_or_empty_is_said_by_name() -> None:
    keys, targets = problem(7, 6, 3)
    solve = {"C": 1.0, "epsilon": 0.1}
    for call, says in (
        (lambda: fit("softmax", keys.numpy(), targets, **solve), r"keys must be a torch.Tensor, got numpy.ndarray"),
        (lambda: fit("softmax", keys, None, **solve), "targets must be a torch.Tensor, got None"),
        (lambda: recover("softmax", keys, [1.0], epsilon=0.1), "values must be a torch.Tensor, got list"),
        (lambda: fit("softmax", keys, targets, C="1", epsilon=0.1), "C must be a number or a tensor, got '1'"),
        (
            lambda: fit("softmax", keys, targets, key_padding_mask=np.zeros(6, bool), **solve),
            r"key_padding_mask must be a torch.Tensor, got numpy.ndarray",
        ),
    ):
        with pytest.raises(TypeError, match=says):
            call()
    for empty in (keys[:0], keys[:, :0]):
        with pytest.raises(ValueError, match="keys must hold at least one point of one head, got"):
            fit("softmax", empty, empty, **solve)
    with pytest.raises(ValueError, match="epsilon must be a finite number of at least 0, got True"):
        fit("softmax", keys, targets, C=1.0, epsilon=True)


def test_what_is_no_number_is_said_with_its_place() -> None:
    keys, targets = problem(7, 6, 3)
    with pytest.raises(ValueError, match="keys must be floating point, got"):
        fit("softmax", keys.long(), targets, C=1.0, epsilon=0.1)
    with pytest.raises(ValueError, match=r"targets must be floating point, got torch\.bool"):
        fit("softmax", keys, targets > 0, C=1.0, epsilon=0.1)
    wrong = targets.clone()
    wrong[0, 2, 1] = torch.inf
    with pytest.raises(ValueError, match=r"targets must be finite, got inf at \[0, 2, 1\]; hide"):
        fit("softmax", keys, wrong, C=1.0, epsilon=0.1)
    with pytest.raises(ValueError, match=r"keys must be finite, got nan at \[0, 0, 0\] and 17 more such numbers; hide"):
        fit("softmax", keys * torch.nan, targets, C=1.0, epsilon=0.1)
    with pytest.raises(ValueError, match=r"values must be finite, got inf at \[0, 2, 1\]"):
        recover("softmax", keys, wrong, epsilon=0.1)
    hidden = (torch.arange(6) == 2)[None]
    keys, wrong, hidden = keys[None], wrong[None], hidden
    fit("softmax", keys, wrong, C=1.0, epsilon=0.1, key_padding_mask=hidden)


def test_a_mask_of_another_shape_is_an_error() -> None:
    keys, targets = problem(7, 6, 3)
    for mask in (torch.zeros(1, 5, dtype=torch.bool), torch.zeros(1, 6)):
        with pytest.raises(ValueError, match=r"mask must be boolean \[..., N\] = \[1, 6\] \(no heads\), got torch"):
            fit("softmax", keys[None], targets[None], C=1.0, epsilon=0.1, key_padding_mask=mask)


def test_what_is_no_regression_is_an_error() -> None:
    keys, targets = problem(7, 6, 3)
    with pytest.raises(ValueError, match="C must be positive, got -1"):
        fit("softmax", keys, targets, C=-1.0, epsilon=0.1)
    with pytest.raises(ValueError, match=r"C must be a number, or have the leading dimensions \[1\]; got \[3\]"):
        fit("softmax", keys, targets, C=torch.ones(3), epsilon=0.1)
    with pytest.raises(ValueError, match=r"epsilon must be a finite number of at least 0, got -0.1"):
        fit("softmax", keys, targets, C=1.0, epsilon=-0.1)
    with pytest.raises(ValueError, match=r"same leading dimensions, got \(1, 6, 3\) and \(1, 5, 2\)"):
        fit("softmax", keys, targets[:, :5], C=1.0, epsilon=0.1)
    with pytest.raises(KernelError, match="not finite"):
        fit(Primal(normalizer=Unit()), keys * 1e200, targets, C=1.0, epsilon=0.1)
    with pytest.raises(ValueError, match="infinitely many features"):
        fit("softmax", keys, targets, C=1.0, epsilon=0.1).predict(keys, by="primal")


def test_heads_whose_normalisers_differ_by_many_orders_are_solved() -> None:
    keys, targets = problem(8, 10, 4)
    keys = 3 * keys
    solved = fit("softmax", keys, targets, C=float("inf"), epsilon=0.1)
    assert solved.design.log_h.max() - solved.design.log_h.min() > 30 and solved.certificate.condition > 1e12
    assert solved.certificate.ok(1e-9)
    assert (solved.predict(keys) - targets).abs().max() < 0.1 + 1e-9


def test_a_head_that_float64_cannot_solve_is_reported_as_such() -> None:
    keys, targets = problem(8, 10, 4)
    with pytest.warns(NotConvergedWarning, match="duality gap"):
        solved = fit("softmax", 40 * keys, targets, C=float("inf"), epsilon=0.1)
    assert not solved.certificate.ok(1e-3) and solved.certificate.condition == torch.inf


def test_a_kernel_that_no_features_have_is_an_error() -> None:
    class Difference(EluPlusOne):
        def kernel(self, x, y, parameters=None):
            return super().kernel(x, y, parameters) - 3.0

    keys, targets = problem(9, 12, 3)
    with pytest.raises(KernelError, match="not positive semi-definite"):
        fit(Primal(features=Difference(), normalizer=Unit()), keys, targets, C=1.0, epsilon=0.1)


@pytest.fixture(autouse=True)
def quiet() -> None:
    """cvxpy and scikit-learn may warn about their own dependencies."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)


OWN_KERNELS = [name for name, p in OWN.items() if not p.inputs and type(p.training_set) is AllKeys]


@pytest.mark.parametrize("name", OWN_KERNELS)
def test_a_regression_of_one_s_own_features_and_normalizer_is_solved_with_their_kernel(name: str) -> None:
    x, keys, values = (torch.randn(1, 2, n, 4, generator=torch.Generator().manual_seed(n)).double() for n in (3, 5, 6))
    values = values[:, :, :5]
    made = design(OWN[name], keys, values, None, None, False, {})
    expected = attention(x, keys, values, OWN[name], impl="reference")
    torch.testing.assert_close(made.weights(x) @ values, expected, atol=1e-10, rtol=1e-10)
    if form_of(OWN[name]).log_kernel:
        return
    kernel = OWN[name].features.kernel(keys, keys, made.parameters)
    h = OWN[name].normalizer.at(keys, kernel.sum(-1, keepdim=True), made.parameters)
    torch.testing.assert_close(
        made.kernel * made.log_scale.exp()[..., None, None], kernel / (h * h.mT), atol=1e-10, rtol=1e-10
    )


@pytest.mark.parametrize("name", [name for name in OWN if "learn" in name])
def test_what_is_learned_and_not_given_has_its_initial_value(name: str) -> None:
    keys, targets = (torch.randn(1, 6, 9, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(2))
    initial = OWN[name].learned(6, 4)
    found, expected = (fit(OWN[name], keys, targets, C=10.0, epsilon=0.1, parameters=p) for p in (None, initial))
    torch.testing.assert_close(found.values, expected.values)
    found, expected = (recover(OWN[name], keys, targets, epsilon=0.1, parameters=p) for p in (None, initial))
    torch.testing.assert_close(found.targets, expected.targets)


def test_a_head_whose_queries_have_sets_of_their_own_is_a_regression_per_query_at_any_scale() -> None:
    """Of these heads the first alone has scale 2, and hides points."""
    keys, targets = (torch.randn(1, 3, 9, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(2))
    primal = OWN["S with scales"]
    with pytest.raises(PerQueryError, match="sparse heads are one regression per query"):
        fit(primal, keys, targets, C=1e4, epsilon=0.1)
    solved = fit(primal, keys, targets, C=1e4, epsilon=0.1, query=3)
    out = attention(keys, keys, solved.values, primal, impl="reference")
    torch.testing.assert_close(solved.predict(keys)[:, :, 3], out[:, :, 3])
    assert certify(primal).queries


@pytest.mark.parametrize("name", ["sh", "sparse-fixed"])
def test_a_regression_of_left_padded_keys_is_that_of_the_sequence_alone(name: str) -> None:
    primal = mechanism("sh") if name == "sh" else mechanism("sparse", pattern=Fixed(4, 1))
    query = None if name == "sh" else 11
    keys, values = torch.randn(1, 4, 14, 3, dtype=torch.float64), torch.randn(1, 4, 14, 2, dtype=torch.float64)
    hidden = torch.arange(14)[None] < 5
    padded = recover(primal, keys, values, epsilon=0.0, key_padding_mask=hidden, query=query)
    alone = recover(primal, keys[:, :, 5:], values[:, :, 5:], epsilon=0.0, query=query and query - 5)
    torch.testing.assert_close(padded.targets[:, :, 5:], alone.targets)
    torch.testing.assert_close(padded.log_C, alone.log_C)
