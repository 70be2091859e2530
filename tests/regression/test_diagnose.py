"""Reading the regressions out of a model: the numbers are those of `recover` and `fit`, and the model is left alone."""

import math
import sys

import pytest
import torch
from rich.console import Console
from torch import nn

from primaldual import MultiheadAttention, Primal, TransformerEncoderLayer, mechanism
from primaldual.nn import ConvProjection
from primaldual.primal import Window
from primaldual.regression import fit, recover
from primaldual.regression.calls import NoAttentionError, attention_calls
from primaldual.regression.diagnosing import diagnose

E, H, N = 16, 4, 10
PADDING = torch.arange(N) >= torch.tensor([[N], [7], [4]])
CAUSAL = torch.ones(N, N, dtype=torch.bool).triu(1)
SEVERAL = ("softmax", "bn", "bn+sh", "conv1d", "linear", "sparse", "qk-norm", "alibi+sh")


class Stack(nn.Module):
    """Encoder layers of several mechanisms, one after the other."""

    def __init__(self, *mechanisms: str | Primal, dropout: float = 0.1, **options) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            TransformerEncoderLayer(E, H, 32, dropout, batch_first=True, dtype=torch.float64, mechanism=m, **options)
            for m in mechanisms
        )

    def forward(self, x, padding=None, mask=None, is_causal=False):
        for block in self.blocks:
            x = block(x, src_mask=mask, src_key_padding_mask=padding, is_causal=is_causal)
        return x


class Attend(nn.Module):
    """One attention layer, called with the arguments given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        return self.layer(x, x, x, need_weights=False, **options)[0]


def attend(primal: str | Primal = "softmax", **options) -> Attend:
    return Attend(MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, mechanism=primal, **options))


def inputs(batch: int = 3, length: int = N) -> torch.Tensor:
    return torch.randn(batch, length, E, dtype=torch.float64)


def numbers(diagnosis) -> torch.Tensor:
    return torch.tensor([[*row[4:11], *row.std] for row in diagnosis.rows], dtype=torch.float64)


def test_every_head_of_every_layer_has_a_row():
    found = diagnose(Stack(*SEVERAL), (inputs(), PADDING))
    assert [(row.layer, row.head) for row in found.rows] == [
        (f"blocks.{layer}.self_attn", head) for layer in range(len(SEVERAL)) for head in range(H)
    ]
    assert list(found.layers()) == [f"blocks.{layer}.self_attn" for layer in range(len(SEVERAL))]
    for row in found.rows:
        assert math.isfinite(row.log_C) and 0 < row.support_share <= 1 and 0 <= row.bound_share < 1
        assert 1 <= row.effective_rank <= row.rank + 1e-9 and row.rank <= row.points
        assert row.condition >= 1 and row.sequences == 3 and row.call == 0


def test_points_are_the_tokens_that_are_not_padding_pooled_by_the_scale_of_the_head():
    rows = diagnose(Stack("bn+sh"), (inputs(), PADDING)).rows
    assert [row.scale for row in rows] == [1, 1, 2, 2]
    assert [row.points for row in rows] == pytest.approx([7, 7, 11 / 3, 11 / 3])
    assert rows[0].std.points == pytest.approx(math.sqrt(6))


def test_padding_takes_no_part_whatever_it_holds_and_however_it_is_given():
    model, x = Stack("softmax", "bn+sh", "conv1d"), inputs()
    floats = torch.zeros(3, N, dtype=torch.float64).masked_fill(PADDING, -torch.inf)
    want = numbers(diagnose(model, (x, PADDING)))
    torch.testing.assert_close(numbers(diagnose(model, (x, floats))), want)
    torch.testing.assert_close(numbers(diagnose(model, (x.masked_fill(PADDING[..., None], 9.0), PADDING))), want)
    short = [diagnose(model, x[i : i + 1, : N - int(PADDING[i].sum())]) for i in range(3)]
    means = torch.stack([numbers(d)[:, :6] for d in short]).mean(0)
    torch.testing.assert_close(means, want[:, :6], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("epsilon", [0.0, 0.05])
@pytest.mark.parametrize("name", ["softmax", "bn", "bn+sh", "linear"])
def test_the_numbers_are_those_of_recover_and_fit(name, epsilon):
    model, x = attend(name), inputs(1)
    rows = diagnose(model, x, epsilon=epsilon, top=3).rows
    (call,) = attention_calls(model, x)
    found = recover(name, call.keys, call.values, epsilon=0.0)
    torch.testing.assert_close(torch.tensor([r.log_C for r in rows]), found.log_C[0].float())
    assert [r.rank for r in rows] == found.rank[0].tolist()
    assert [r.condition for r in rows] == pytest.approx(found.condition[0].tolist())
    C = found.C
    alpha = found.alpha
    if epsilon:
        solved = fit(name, call.keys, found.targets, C=C, epsilon=epsilon, tol=1e-6)
        alpha = solved.alpha - solved.alpha_tilde
    for head, row in enumerate(rows):
        own = alpha[0, head][found.seen[0, head]]
        assert row.support_share == pytest.approx(float((own != 0).double().mean()))
        assert row.bound_share == pytest.approx(float((own.abs() >= C[0, head] * (1 - 1e-6)).double().mean()))
        order = found.alpha[0, head].abs().amax(-1).argsort(descending=True)[:3]
        assert row.top_tokens == tuple(int(i) * row.scale for i in order)


def test_without_a_tube_every_token_is_a_support_vector_and_a_wide_one_needs_none():
    model, x = attend(), inputs()
    assert all(row.support_share == 1 for row in diagnose(model, x, epsilon=0).rows)
    assert all(row.bound_share == pytest.approx(1 / (N * E // H)) for row in diagnose(model, x, epsilon=0).rows)
    assert all(row.support_share == 0 for row in diagnose(model, x, epsilon=100.0).rows)
    shares = [diagnose(model, x, epsilon=e).rows[0].support_share for e in (0.01, 0.1, 0.5)]
    assert 1 > shares[0] > shares[1] > shares[2]


def test_the_effective_rank_of_keys_that_coincide_is_one():
    model = attend()
    row = diagnose(model, inputs(2, 1).expand(2, N, E)).rows[0]
    assert row.effective_rank == pytest.approx(1.0) and row.rank == 1 and row.points == N and math.isinf(row.condition)


@pytest.mark.parametrize("padded", [False, True], ids=["all tokens", "padding"])
@pytest.mark.parametrize("batch_first", [True, False])
def test_torch_encoder_gives_the_diagnosis_of_ours_with_the_same_weights(batch_first, padded):
    options = {"dim_feedforward": 32, "batch_first": batch_first, "dtype": torch.float64}
    theirs = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, **options), 2, enable_nested_tensor=batch_first)
    ours = nn.TransformerEncoder(
        TransformerEncoderLayer(E, H, mechanism="softmax", **options), 2, enable_nested_tensor=False
    )
    ours.load_state_dict(theirs.state_dict())
    x = inputs() if batch_first else inputs().transpose(0, 1)
    batch = {"src": x, "src_key_padding_mask": PADDING if padded else None}
    a, b = diagnose(theirs.eval(), batch), diagnose(ours.eval(), batch)
    torch.testing.assert_close(numbers(a), numbers(b))
    assert [r[:4] for r in a.rows] == [r[:4] for r in b.rows]
    assert [r.top_tokens for r in a.rows] == [r.top_tokens for r in b.rows]


@pytest.mark.parametrize("options", [{"kdim": E, "vdim": 12}, {"bias": False}, {"add_bias_kv": True}], ids=str)
def test_torch_attention_with_its_options_is_read_as_ours(options):
    theirs = nn.MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    ours = MultiheadAttention(E, H, batch_first=True, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    batch = (inputs(), inputs(3, 6), inputs(3, 6)[..., : options.get("vdim", E)])
    torch.testing.assert_close(numbers(diagnose(theirs, batch)), numbers(diagnose(ours, batch)))
    points = 7 if "add_bias_kv" in options else 6
    assert all(row.points == points for row in diagnose(theirs, batch).rows)


def trained(*mechanisms: str) -> Stack:
    """Learns to tell whether the first channel's mean is positive."""
    model = Stack(*mechanisms, dropout=0.0)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(40):
        x = inputs(16)
        loss = nn.functional.binary_cross_entropy_with_logits(
            model(x).mean((1, 2)) * 10, (x[..., 0].mean(1) > 0).double()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def test_the_recovered_regressions_of_a_trained_model_give_its_head_outputs():
    model, x, outputs = trained("softmax", "bn", "bn+sh", "linear", "conv1d"), inputs(2), []
    for block in model.blocks:
        block.self_attn.out_proj.register_forward_pre_hook(lambda m, args: outputs.append(args[0]))
    calls = attention_calls(model, x)
    for call, wanted in zip(calls, outputs, strict=True):
        found = recover(call.primal, call.keys, call.values, epsilon=0.01, parameters=call.parameters)
        solved = fit(
            call.primal, call.keys, found.targets, C=found.C, epsilon=0.01, parameters=call.parameters
        )  # fmt: skip
        heads = wanted.unflatten(-1, (H, -1)).transpose(1, 2)
        torch.testing.assert_close(solved.predict(call.queries), heads, rtol=0, atol=1e-6)
    assert all(row.note == "" for row in diagnose(model, x).rows)


@pytest.mark.parametrize(
    "options",
    [{"is_causal": True}, {"mask": CAUSAL}, {"mask": CAUSAL, "is_causal": True}],
    ids=["flag", "mask", "both"],
)
def test_causal_heads_are_diagnosed_at_the_last_valid_query(options):
    model, x = Stack("softmax"), inputs()
    for row in diagnose(model, {"x": x, "padding": PADDING, **options}).rows:
        assert "one regression per query, here that of the last valid query" in row.note and row.points == 7


def test_a_causal_head_of_a_full_sequence_is_at_its_end_the_head_that_sees_everything():
    model, x = attend(), inputs()
    want = numbers(diagnose(model, x))
    torch.testing.assert_close(numbers(diagnose(model, {"x": x, "is_causal": True})), want)
    torch.testing.assert_close(numbers(diagnose(model, {"x": x, "attn_mask": CAUSAL})), want)


def test_an_attention_mask_hides_keys_from_the_last_query():
    mask = torch.zeros(N, N, dtype=torch.bool)
    mask[-1, :6] = True
    rows = diagnose(attend("bn"), {"x": inputs(), "attn_mask": mask}).rows
    assert all(row.points == N - 6 and min(row.top_tokens) >= 6 and row.note.startswith("masked") for row in rows)


def test_sparse_heads_are_diagnosed_at_the_last_valid_query():
    rows = diagnose(Stack(mechanism("sparse-bn", pattern=Window(3))), (inputs(), PADDING)).rows
    assert all(row.note.startswith("sparse: one regression per query") for row in rows)
    assert rows[0].points == 4  # |i − j| ≤ 3


def test_a_module_that_is_used_twice_is_reported_for_each_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.block = attend("bn")

        def forward(self, x):
            x = self.block(x)
            x += self.block(x)  # in place: what a call saw must have been read by then
            return self.block(x)

    found = diagnose(Twice(), inputs())
    assert [row.call for row in found.rows] == [0] * H + [1] * H + [2] * H
    assert list(found.layers()) == [f"block.layer, call {n}" for n in range(3)]
    assert len({row.log_C for row in found.rows}) == 3 * H


def test_a_bare_layer_with_unbatched_input_and_convolutional_projections():
    layer = MultiheadAttention(
        E, H, dtype=torch.float64, mechanism="bn", projection=ConvProjection(3, dims=1), batch_first=True
    )
    nn.init.normal_(layer.convolutions["k"].kernel)
    x = inputs(1)
    alone = diagnose(layer, (x[0],) * 3)
    torch.testing.assert_close(numbers(alone), numbers(diagnose(layer, {"query": x, "key": x, "value": x})))
    assert {row.layer for row in alone.rows} == {"MultiheadAttention"}


def test_the_model_is_left_as_it_was():
    model = Stack("bn", "linear").train()
    model.blocks[1].eval()
    modes = [m.training for m in model.modules()]
    fused = torch.backends.mha.get_fastpath_enabled()
    diagnose(model, inputs())
    with pytest.raises(ValueError, match=r"query is torch.float32, the layer's parameters are torch.float64"):
        diagnose(model, torch.randn(3, N, E))  # float32 into a float64 model
    assert [m.training for m in model.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert torch.is_grad_enabled()


@pytest.mark.parametrize(
    ("model", "options", "reason"),
    [
        (attend(), {"attn_mask": torch.ones(N, N, dtype=torch.float64)}, "attn_mask adds finite numbers"),
        (attend(), {"key_padding_mask": torch.ones(3, N, dtype=torch.float64)}, "key_padding_mask adds finite numbers"),
        (attend(), {"attn_mask": torch.rand(3 * H, N, N) > 0.5}, "different keys from different heads"),
        (attend(mechanism("sh", how="conv")), {}, "conv pooling"),
    ],
    ids=["attn bias", "key bias", "mask per head", "conv pooling"],
)
def test_a_head_that_is_no_regression_says_why(model, options, reason, tmp_path):
    found = diagnose(model, {"x": inputs(), **options})
    assert len(found.rows) == H
    assert all(reason in row.note and math.isnan(row.log_C) and row.sequences == 0 for row in found.rows)
    assert reason in " ".join(str(found).split())
    found.plot(tmp_path / "refused.png")


@pytest.mark.parametrize(("layer", "called"), [({"scale": 0.5}, {}), ({}, {"query_offset": 2})], ids=str)
def test_scores_and_places_that_a_regression_has_not_are_refused(layer, called):
    with pytest.raises(ValueError, match="read back from heads with 1/√head_dim on their scores"):
        diagnose(attend(**layer), {"x": inputs()} | called)


def test_a_sequence_without_a_token_is_left_out():
    padding = PADDING.clone()
    padding[0] = True
    rows = diagnose(attend(), {"x": inputs(), "key_padding_mask": padding}).rows
    assert all(row.sequences == 2 and "without a token" in row.note for row in rows)
    assert rows[0].points == 5.5 and len(rows[0].top_tokens) == 5


def test_scores_that_leave_float64_are_reported_as_logarithms_and_for_their_head_alone():
    model = attend()
    with torch.no_grad():
        model.layer.in_proj_weight[E : E + E // H] *= 80  # the keys of head 0
    found = diagnose(model, inputs(1))
    first, *others = found.rows
    assert first.log_C > 709 and math.isfinite(first.log_C) and "leaves float64" in first.note
    assert math.isnan(first.support_share) and len(first.top_tokens) == 5
    assert all(row.note == "" and 0 < row.support_share < 1 for row in others)
    assert "layer, head 0: C leaves float64" in str(found)


def test_an_unfinished_fit_is_named():
    rows = diagnose(attend(), inputs(1, 60), max_iter=1).rows
    assert any("support vectors are approximate" in row.note for row in rows)


@pytest.mark.parametrize("how", ["max", "kmeans"])
def test_top_tokens_of_pooled_points_are_tokens(how):
    rows = diagnose(attend(mechanism("sh", how=how, scales=(1, 2, 3, 3))), inputs(), top=N).rows
    for row in rows:
        assert len(row.top_tokens) == len(set(row.top_tokens)) == row.points
        assert 0 in row.top_tokens and max(row.top_tokens) < N


def test_the_table_holds_every_head_and_its_notes():
    found = diagnose(Stack("bn+sh", "sparse", "linear"), (inputs(), PADDING))
    text = str(found)
    assert all(f"blocks.{i}.self_attn" in text for i in range(3)) and "ε = 0.1" in text
    assert "blocks.1.self_attn: sparse: one regression per query" in text
    assert "∞" in text and "±" in text and ", ".join(map(str, found.rows[0].top_tokens)) in text
    assert found.table().row_count == len(found.rows) == 12
    console = Console(width=200)
    with console.capture() as captured:
        console.print(found)
    assert "blocks.2.self_attn" in captured.get()
    assert repr(found) == "Diagnosis(12 heads of 3 layers, epsilon=0.1)"


def test_the_dataframe_has_a_line_per_head():
    pandas = pytest.importorskip("pandas")
    found = diagnose(Stack("bn+sh"), (inputs(), PADDING))
    frame = found.to_dataframe()
    assert isinstance(frame, pandas.DataFrame) and frame.shape[0] == H
    assert frame["log_C"].tolist() == [row.log_C for row in found.rows]
    assert frame["points_std"].tolist() == [row.std.points for row in found.rows]
    assert frame["top_tokens"].tolist() == [row.top_tokens for row in found.rows]


def test_the_plot_has_panels_for_each_layer_and_bars_of_the_numbers(tmp_path):
    pytest.importorskip("matplotlib")
    found = diagnose(Stack("bn+sh", "linear"), (inputs(), PADDING))
    drawing = found.plot(tmp_path / "diagnosis.png")
    assert (tmp_path / "diagnosis.png").read_bytes()[:4] == b"\x89PNG"
    axes = drawing.axes
    assert len(axes) == 8
    assert [bar.get_height() for bar in axes[0].patches] == [row.log_C for row in found.rows[:H]]
    assert [bar.get_height() for bar in axes[1].patches[:H]] == [100 * row.support_share for row in found.rows[:H]]
    assert [label.get_text() for label in axes[0].get_xticklabels()] == ["0", "1", "2\n÷2", "3\n÷2"]
    assert [text.get_text() for text in axes[7].texts] == ["∞"] * H
    found.plot()


@pytest.mark.parametrize(("package", "method"), [("pandas", "to_dataframe"), ("matplotlib", "plot")])
def test_a_missing_package_is_named_with_the_extra_that_brings_it(monkeypatch, package, method):
    found = diagnose(attend(), inputs(1))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=rf'{package}: pip install "primaldual\[demo\]"'):
        getattr(found, method)()


def test_a_model_without_attention_is_an_error():
    with pytest.raises(NoAttentionError, match="Linear has no attention layer"):
        diagnose(nn.Linear(E, E), torch.randn(2, E))

    class Unused(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attend()

        def forward(self, x):
            return x

    with pytest.raises(NoAttentionError, match=r"called none of attention\.layer"):
        diagnose(Unused(), inputs())


@pytest.mark.parametrize("options", [{"epsilon": -0.1}, {"epsilon": math.nan}, {"top": -1}, {"top": 1.5}], ids=str)
def test_arguments_that_make_no_sense_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        diagnose(attend(), inputs(), **options)


def test_layers_that_solve_for_their_values_are_left_out() -> None:
    from primaldual.nn import SolvedAttention

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.solved = SolvedAttention(8, 2)
            self.learned = MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.solved(x, x, x, need_weights=False)[0]
            return self.learned(x, x, x, need_weights=False)[0]

    assert {row.layer for row in diagnose(Both(), torch.randn(2, 6, 8)).rows} == {"learned"}
    with pytest.raises(ValueError, match="has no attention layer"):
        diagnose(SolvedAttention(8, 2), tuple(torch.randn(3, 2, 6, 8)))
