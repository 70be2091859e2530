"""Attention to prototypes: the features are the mean weights of the library's own attention."""

from dataclasses import replace

import pytest
import torch

from primaldual import attention
from primaldual.models import BankConfig, BankSizes, PrototypeBank, SolvedBank
from primaldual.models.solved_bank import bank_features
from primaldual.svr.ridge import ridge

SIZES = BankSizes(prototypes=6, widths=(3, 5), biases=2, scale=4.0)
LENGTHS = torch.tensor([20, 13, 20, 7])
PADDING = torch.arange(20) >= LENGTHS[:, None]


def series():
    return torch.randn(4, 20, 3, generator=torch.Generator().manual_seed(0)).masked_fill(PADDING.unsqueeze(-1), 0.0)


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_features_are_mean_weights_of_attention_between_a_prototype_and_the_origin(padding):
    x = series()
    bank = PrototypeBank.drawn(SIZES, x, padding, seed=1).double()
    x = x.double()
    found, at = bank(x, padding), 0
    for i, dilation in enumerate(bank.dilations):
        kernels, thresholds = bank.get_buffer(f"kernel_{i}"), bank.get_buffer(f"threshold_{i}")
        width = kernels.shape[-1]
        reach = dilation * (width // 2)
        wide = torch.nn.functional.pad(x, (0, 0, reach, reach))
        windows = torch.stack([wide[:, dilation * k :][:, : x.shape[1]] for k in range(width)], -1)  # [B, N, C, w]
        queries = windows.flatten(2).unsqueeze(1)
        for b in range(thresholds.shape[1]):
            for s in range(len(kernels)):
                keys = torch.stack([kernels[s].flatten(), torch.zeros_like(kernels[s]).flatten()])
                values = torch.tensor([[1.0], [0.0]], dtype=torch.float64)
                bias = SIZES.scale * torch.stack([torch.zeros_like(thresholds[s, b]), thresholds[s, b]])
                out = attention(
                    queries, keys.expand(4, 1, 2, -1), values.expand(4, 1, 2, 1), "softmax", scale=SIZES.scale,
                    attn_mask=bias.expand(x.shape[1], 2).contiguous(), impl="reference",
                )[:, 0, :, 0]  # fmt: skip
                seen = torch.ones_like(out) if padding is None else (~padding).double()
                expected = (out * seen).sum(1) / seen.sum(1)
                torch.testing.assert_close(found[:, at + b * len(kernels) + s], expected, rtol=1e-9, atol=1e-12)
        at += thresholds.numel()
    assert at == found.shape[1]


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_the_energy_is_the_mean_logarithm_of_the_kernel_sum_over_that_of_the_origin_alone(padding):
    x, sizes = series().double(), replace(SIZES, widths=(3,), energy=True)
    bank = PrototypeBank.drawn(sizes, x, padding, seed=1).double()
    kernels, thresholds = bank.get_buffer("kernel_0"), bank.get_buffer("threshold_0")
    found = bank(x, padding)[:, : len(kernels)]  # of the first dilation and bias
    wide = torch.nn.functional.pad(x, (0, 0, 1, 1))
    windows = torch.stack([wide[:, k : k + x.shape[1]] for k in range(3)], -1)  # [B, N, C, 3]
    scores = sizes.scale * torch.einsum("bncw,scw->bns", windows, kernels)
    origin = (sizes.scale * thresholds[:, 0]).expand_as(scores)
    log_h = torch.stack([scores, origin]).logsumexp(0) - origin
    seen = torch.ones_like(log_h) if padding is None else (~padding).unsqueeze(-1).double()
    torch.testing.assert_close(found, (log_h * seen).sum(1) / seen.expand_as(log_h).sum(1) / sizes.scale)


@pytest.mark.parametrize("level", [0.0, 0.7])
def test_a_level_that_is_added_to_a_series_is_seen_by_prototypes_with_a_level_alone(level):
    bank = PrototypeBank.drawn(replace(SIZES, level=level), series(), None, seed=1)
    sums = torch.stack([bank.get_buffer(f"kernel_{i}").sum(-1).abs().amax(1).min() for i in range(len(bank.dilations))])
    assert (sums.min() > 1e-4) == (level > 0)


@pytest.mark.parametrize("field", [{"level": -1.0}, {"windows": 2.0}, {"scale": 0.0}, {"widths": (4,)}], ids=str)
def test_sizes_that_cannot_be_are_refused(field):
    with pytest.raises(ValueError, match=next(iter(field))):
        BankSizes(**field)


def test_padded_steps_do_not_matter():
    x = series()
    bank = PrototypeBank.drawn(SIZES, x, PADDING, seed=1)
    short = torch.cat([bank(x[i : i + 1, : LENGTHS[i]]) for i in range(4)])
    torch.testing.assert_close(bank(x, PADDING), short)


@pytest.mark.parametrize("steps", [2, 5, 8, 9, 40])
def test_short_series_and_one_case_are_drawn_from(steps):
    x = torch.randn(1, steps, 1)
    bank = PrototypeBank.drawn(BankSizes(prototypes=16), x, None, seed=0)
    assert bank(x).isfinite().all()


def test_prototypes_can_be_windows_of_the_training_series():
    x = series()
    bank = PrototypeBank.drawn(replace(SIZES, windows=1.0), x, PADDING, seed=1)
    kernels = bank.get_buffer("kernel_0")  # width 3, dilation 1
    whole = [one[:length].T.unfold(1, 3, 1) for one, length in zip(x, LENGTHS.tolist(), strict=True)]
    windows = torch.cat([w - w.mean(-1, keepdim=True) for w in whole], 1).transpose(0, 1)  # [windows, channels, 3]
    for kernel in kernels:
        seen = kernel.abs().amax(1) > 0
        alike = torch.nn.functional.cosine_similarity(windows[:, seen].flatten(1), kernel[seen].flatten()[None])
        assert seen.any() and alike.max() > 1 - 1e-5


def test_a_channel_that_stands_still_has_no_window_of_zeros():
    bank = PrototypeBank.drawn(replace(SIZES, windows=1.0), torch.zeros(4, 20, 3), None, seed=1)
    assert all(bank.get_buffer(f"kernel_{i}").abs().amax((1, 2)).min() > 0 for i in range(len(bank.dilations)))


@pytest.mark.parametrize("padding", [None, PADDING], ids=["whole", "padded"])
def test_a_solved_bank_says_what_the_regression_on_its_features_says(padding, monkeypatch):
    monkeypatch.setattr("primaldual.models.solved_bank.CACHED", 40)  # two series at a time
    x = series()
    bank = PrototypeBank.drawn(SIZES, x, padding, seed=1)
    values = ridge(bank(x, padding), torch.eye(4)[:, :3], [1e-2])
    steps = 20 if padding is None else 15
    config = BankConfig.of(bank, channels=3, length=20, steps=steps, outputs=3, task="classification")
    model = SolvedBank.of(config, bank, values, 2.0)
    torch.testing.assert_close(model(x, padding), 2 * values(bank_features(bank, x, padding)).float())


def test_a_config_of_too_many_places_is_refused_before_memory_is_taken():
    with pytest.raises(ValueError, match="more than 1024"):
        BankConfig(widths=(3,) * 500, channels=1, length=10, steps=100, outputs=2)
