"""A mechanism that the library does not have, as a user writes it: fitted to overlapping windows, near ones alone."""

import json
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from primaldual import MultiheadAttention, Primal, attention, derive
from primaldual.primal import Points, Recenter, TrainingSet
from primaldual.regression import certify, diagnose, fit, recover


@dataclass(frozen=True)
class NearWindows(TrainingSet):
    """Means over windows of `size` tokens, one every `step`; a query sees those at most `reach` from its own."""

    size: int = 4
    step: int = 2
    reach: int = 2

    def points(self, scale: int, tokens: int) -> int:
        return -(-tokens // self.step)

    def coordinate(self, index: Tensor, scale: int, tokens: int) -> Tensor:
        return index // self.step

    def reduce(self, keys: Tensor, values: Tensor, seen: Tensor, scale: int, parameters) -> Points:
        first = self.step * torch.arange(self.points(scale, keys.shape[-2]), device=keys.device)[:, None]
        index = torch.arange(keys.shape[-2], device=keys.device)
        taken = (index >= first) & (index < first + self.size) & seen.unsqueeze(-2)  # [B, 1, R, W, S]
        count = taken.sum(-1, keepdim=True)
        share = taken.to(keys.dtype) / count.clamp(min=1)
        return Points(share @ keys.unsqueeze(2), share @ values.unsqueeze(2), count.squeeze(-1) > 0, share)

    def visible(self, scale: int, queries: int, tokens: int, device: torch.device) -> Tensor:
        own = self.coordinate(torch.arange(queries, device=device), scale, tokens)[:, None]
        return (own - torch.arange(self.points(scale, tokens), device=device)).abs() <= self.reach

    def causal_refusal(self, scale: int) -> None:
        """A window is the mean of what is seen of it, so it needs no later token."""

    def text(self, x: str = "x") -> str:
        return f"means of {self.size} tokens, one every {self.step}, at most {self.reach} away"


PLAIN, CENTRED = Primal(training_set=NearWindows()), Primal(inputs=(Recenter(0.5),), training_set=NearWindows(5, 2, 3))
each = pytest.mark.parametrize("primal", [PLAIN, CENTRED], ids=["plain", "centred"])
PADDING = torch.arange(13) >= torch.tensor([[13], [9]])
MASKS = {
    "all": {}, "padding": {"key_padding_mask": PADDING}, "causal": {"is_causal": True},
    "causal, padding": {"is_causal": True, "key_padding_mask": PADDING},
}  # fmt: skip


def tensors(length: int = 13) -> list[Tensor]:
    return [torch.randn(2, 4, length, 6, dtype=torch.float64, requires_grad=True) for _ in range(3)]


@each
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_it_runs_and_equals_the_reference(primal, masks):
    leaves = tensors()
    results = []
    for impl in ("auto", "reference"):
        out = attention(*leaves, primal, impl=impl, **masks)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for mine, truth in zip(*results, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-10)


def test_it_is_what_was_meant():
    q, k, v = tensors(9)
    out = attention(q, k, v, PLAIN)
    windows = [slice(w, w + 4) for w in (0, 2, 4, 6)]  # query 3 is of window 1, and sees windows 0 to 3
    keys, values = (torch.stack([x[:, :, w].mean(2) for w in windows], 2) for x in (k, v))
    weights = (q[:, :, 3:4] @ keys.transpose(-1, -2) / 6**0.5).softmax(-1)
    torch.testing.assert_close(out[:, :, 3:4], weights @ values)


@each
def test_no_later_token_moves_a_causal_output_and_no_padding_any(primal):
    q, k, v = tensors()
    cut = [x[:, :, :8] for x in (q, k, v)]
    causal = attention(q, k, v, primal, is_causal=True)[:, :, :8]
    torch.testing.assert_close(causal, attention(*cut, primal, is_causal=True), rtol=0, atol=1e-10)
    padded = attention(q, k, v, primal, key_padding_mask=(torch.arange(13) >= 8).expand(2, -1))[:, :, :8]
    torch.testing.assert_close(padded, attention(*cut, primal), rtol=0, atol=1e-10)


@each
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_it_runs_in_a_layer(primal, masks):
    torch.manual_seed(0)
    fast, slow = (
        MultiheadAttention(24, 4, batch_first=True, dtype=torch.float64, mechanism=primal, impl=impl)
        for impl in ("auto", "reference")
    )
    slow.load_state_dict(fast.state_dict())
    x = torch.randn(2, 13, 24, dtype=torch.float64)
    results = []
    for layer in (fast, slow):
        out, _ = layer(x, x, x, need_weights=False, **masks)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(layer.parameters()))))
    for mine, truth in zip(*results, strict=True):
        torch.testing.assert_close(mine, truth, rtol=0, atol=1e-10)
    out, weights = slow(x, x, x, average_attn_weights=False, **masks)
    torch.testing.assert_close(out, results[1][0])
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 13, dtype=torch.float64))


@each
def test_it_goes_to_json_and_back_and_is_explained(primal):
    assert Primal.from_dict(json.loads(json.dumps(primal.to_dict()))) == primal
    said = derive(primal).explain()
    assert primal.training_set.text() in said and "one such problem per query" in said


@each
def test_it_is_certified(primal):
    found = certify(primal, length=17)
    assert found.ok, found.failed
    assert found.queries


@each
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_its_regression_is_solved_and_read_back(primal, is_causal):
    keys, queries, values = (x.detach() for x in tensors(11))
    how = {"query": 5, "is_causal": is_causal}
    named = recover(primal, keys, values, epsilon=0.05, **how)
    again = fit(primal, keys, named.targets, C=named.C, epsilon=0.05, **how)
    assert again.certificate.ok(1e-6)
    head = attention(queries, keys, values, primal, is_causal=is_causal)[:, :, 5:6]
    torch.testing.assert_close(again.predict(queries[:, :, 5:6]), head, rtol=0, atol=1e-6)


def test_a_model_with_it_is_diagnosed():
    layer = MultiheadAttention(24, 4, batch_first=True, mechanism=CENTRED)
    x = torch.randn(2, 13, 24)
    rows = diagnose(layer, (x, x, x)).rows
    assert len(rows) == 4 and all("one regression per query" in row.note for row in rows)
