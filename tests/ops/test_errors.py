"""Bad input gets an error that says what was given and what is expected."""

import pytest
import torch

from primaldual import Primal, attention, mechanism
from primaldual.ops import CausalFormError, UnsupportedError
from primaldual.primal import BatchNorm, Pooled, Recenter

q = torch.randn(2, 8, 6, 4)
mask = torch.zeros(2, 6, dtype=torch.bool)


@pytest.mark.parametrize(
    ("call", "kind", "says"),
    [
        (lambda: attention(q[0], q, q, "bn"), ValueError, r"q must be \[batch, heads, length, head_dim\].*\(8, 6, 4\)"),
        (lambda: attention(q, q[:, :4], q, "bn"), ValueError, r"k and v in length and heads.*k \(2, 4, 6, 4\)"),
        (lambda: attention(q, q[..., :2], q, "bn"), ValueError, r"q and k in head_dim"),
        (lambda: attention(q, q, q[:, :, :3], "bn"), ValueError, r"k and v in length"),
        (lambda: attention(q, q, q.double(), "bn"), ValueError, r"share dtype.*float64"),
        (lambda: attention(q.long(), q, q, "bn"), ValueError, r"floating point, got torch.int64"),
        (
            lambda: attention(q, q.to(torch.float8_e5m2), q, "bn"),
            ValueError,
            r"k must be floating .* got .*float8_e5m2",
        ),
        (lambda: attention(q.numpy(), q, q, "bn"), TypeError, r"q must be a torch.Tensor, got numpy.ndarray; torch.fr"),
        (lambda: attention(q, q, None, "bn"), TypeError, r"v must be a torch.Tensor, got None"),
        (lambda: attention(q, None, q, "bn", key_padding_mask=mask), TypeError, r"k must be a torch.Tensor, got None"),
        (
            lambda: attention(q, q, q, "bn", key_padding_mask=mask.numpy()),
            TypeError,
            r"key_padding_mask must be a torch",
        ),
        (
            lambda: attention(q, q, q, "bn", key_padding_mask=mask.to("meta")),
            ValueError,
            r"is on meta, .* on cpu; move",
        ),
        (
            lambda: attention(q, q, q, "bn", query_padding_mask=mask.to("meta")),
            ValueError,
            r"query_padding_mask is on m",
        ),
        (lambda: attention(q, q, q, "bn", attn_mask=torch.zeros(6, 6).to("meta")), ValueError, r"attn_mask is on meta"),
        (lambda: attention(q, q, q, "bn", key_padding_mask=mask[:, :5]), ValueError, r"\[2, 6\], got \[2, 5\]"),
        (lambda: attention(q, q, q, "bn", key_padding_mask=mask.int()), ValueError, r"must be boolean.*int32"),
        (lambda: attention(q, q, q, "bn", query_padding_mask=mask[:1]), ValueError, r"query_padding_mask.*\[1, 6\]"),
        (lambda: attention(q, q, q, "bn", attn_mask=torch.zeros(6, 5)), ValueError, r"\[6, 6\].*got \[6, 5\]"),
        (lambda: attention(q, q, q, "bn", attn_mask=torch.zeros(16, 6, 6)), ValueError, r"got \[16, 6, 6\]"),
        (lambda: attention(q, q, q, "sh", attn_mask=torch.zeros(6, 6)), ValueError, r"pooled ones.*is_causal"),
        (lambda: attention(q, q, q, mechanism("sh", scales=(1, 2))), ValueError, r"2 scales \(1, 2\) for 8 heads"),
        (lambda: attention(q, q, q, "bn", dropout_p=1.0), ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
        (lambda: attention(q, q, q, "bnn"), ValueError, r"unknown mechanism 'bnn'; did you mean 'bn'"),
        (lambda: attention(q, q, q, None), TypeError, r"a Primal or the name of a mechanism, got None"),
        (lambda: attention(q, q, q, "bn", impl="flash"), ValueError, r"impl must be one of auto, .*got 'flash'"),
        (lambda: attention(q, q, q, "bn", impl="linear"), UnsupportedError, r"not finite; impl='sdpa' can"),
        (lambda: attention(q, q, q, "linear", impl="sdpa"), UnsupportedError, r"exponential kernel.*impl='linear' can"),
        (lambda: attention(q, q, q, "bn", impl="block_sparse"), UnsupportedError, r"not Sparse"),
        (lambda: attention(q, q, q, "bn", impl="sdpa", need_weights=True), UnsupportedError, r"'dense' can"),
        (lambda: attention(q, q, q, "conv1d", is_causal=True), CausalFormError, r"looks ahead.*causal=True"),
        (lambda: attention(q, q, q, "conv2d", is_causal=True), CausalFormError, r"later ones"),
        (lambda: attention(q, q, q, "linear-bn", is_causal=True), CausalFormError, r"does not re-associate"),
        (lambda: attention(q, q, q, mechanism("sh", how="max"), is_causal=True), CausalFormError, r"max pooling"),
        (lambda: attention(q, q, q, "conv2d"), ValueError, r"6 tokens .* not a square; give grid"),
        (
            lambda: attention(q, q, q, Primal(training_set=Pooled((2,) * 8, grid=(2, 2)))),
            ValueError,
            r"grid 2×2 .* 4 tokens, but the sequence has 6",
        ),
        (lambda: attention(q, q, q, Primal(residual=True)), ValueError, r"residual.*MultiheadAttention"),
        (lambda: attention(q, q, q, "bn", parameters={"betta": q}), ValueError, r"no 'betta'\. It takes: none"),
        (
            lambda: attention(q, q, q, mechanism("bn", learnable=True), parameters={"betta": q}),
            ValueError,
            r"no 'betta'; did you mean 'beta'\? It takes: beta \(8,\)",
        ),
        (
            lambda: attention(q, q, q, mechanism("bn", learnable=True), parameters={"beta": 0.5}),
            TypeError,
            r"parameters\['beta'\] must be a torch.Tensor, got 0.5",
        ),
        (
            lambda: attention(q, q, q, "bn", attn_mask=torch.zeros(6, 6).to(torch.float8_e5m2)),
            ValueError,
            r"attn_mask must be boolean .* or floating point .* got torch.float8_e5m2",
        ),
        (
            lambda: attention(q, q, q, mechanism("bn", learnable=True), parameters={"beta": torch.ones(3)}),
            ValueError,
            r"parameters\['beta'\] must have shape \(8,\), got \(3,\)",
        ),
        (lambda: Recenter(float("nan")), ValueError, r"Recenter: beta must be a finite number, got nan"),
        (lambda: BatchNorm(eps=-1.0), ValueError, r"eps must be a finite number of at least 0, got -1.0"),
        (lambda: Pooled((1, 0)), ValueError, r"every scale must be an integer of at least 1, got 0"),
        (lambda: Primal(inputs=Recenter()), TypeError, r"inputs must be a tuple"),
    ],
)
def test_error(call, kind: type[Exception], says: str) -> None:
    with pytest.raises(kind, match=says):
        call()
