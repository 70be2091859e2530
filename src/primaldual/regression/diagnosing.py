"""Read the regressions out of a trained model: what every head of every attention layer solves, in a few numbers."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from ..svr.arguments import double
from ..svr.design import design
from ..svr.fit import KernelError, NotConvergedWarning, fit
from .calls import AttentionCall, attention_calls
from .diagnosis import Diagnosis, HeadRow, Numbers
from .recovery import recover
from .sequence import Notes, OneSequence, RefusalError, sequence_of

TOL = 1e-6
"""The relative duality gap to which a head is solved again, and how near to C is at the bound."""

LOG_C_LIMIT = 600.0
"""Past this, C is near the end of float64, and a head is not solved again."""


def diagnose(model: nn.Module, batch: Any, *, epsilon: float = 0.1, top: int = 5, max_iter: int = 2000) -> Diagnosis:
    """Name the regression that every attention head of a model solves on a batch, and measure it.

    Each sequence of the batch gives each head its own regression: α = v·h(k) on the head's keys. The numbers of a row
    are means over the sequences, with their standard deviation beside them (`HeadRow.std`):

    - log_C: the natural logarithm of the smallest C that allows this α.
    - support_share: of the points, how many are support vectors at ε, the mean over outputs. The head's own function
      at its keys, y = Kα, is fitted again with a tube of half-width ε at the head's own C; a point that the fit leaves
      at α = 0 is not needed to give the function to ±ε. At ε = 0 it is the share of points with α ≠ 0.
    - bound_share: the share whose |α| in that fit is within 1e-6 of C.
    - effective_rank: exp of the entropy of the kernel's eigenvalues over their sum; rank: those over rounding error.
    - points: the points of the head's training set: tokens that are not padding, or windows of them.
    - condition: the condition number of the kernel; the mean is geometric, its deviation that of log10.

    A causal, sparse or masked head is one regression per query; the one of the last valid query is diagnosed, and the
    row's note says so. A head that is no regression (a finite bias on its scores, say) has a row of NaN with the
    reason in its note.

    Args:
        model: any module with `primaldual.MultiheadAttention` or `torch.nn.MultiheadAttention` layers in it. It runs
            once, in evaluation mode and without gradients, and is left as it was.
        batch: what the model is called with: a tensor, a tuple of arguments, or a mapping of keyword arguments.
        epsilon: half-width of the tube, in units of the head's output, as in `fit`.
        top: so many tokens with the largest |α| are listed, those of the first sequence that has any.
        max_iter: steps of the solver at most; where they do not suffice the row's note says how far they came.

    >>> from primaldual import TransformerEncoderLayer
    >>> encoder = nn.TransformerEncoder(TransformerEncoderLayer(16, 2, mechanism="bn", batch_first=True), 2,
    ...                                 enable_nested_tensor=False)
    >>> found = diagnose(encoder, torch.randn(3, 10, 16))
    >>> [(row.layer, row.head, row.points) for row in found.rows][:2]
    [('layers.0.self_attn', 0, 10.0), ('layers.0.self_attn', 1, 10.0)]
    """
    if not (isinstance(epsilon, int | float) and math.isfinite(epsilon) and epsilon >= 0):
        raise ValueError(f"epsilon must be a finite number of at least 0, got {epsilon!r}")
    if isinstance(top, bool) or not isinstance(top, int) or top < 0:
        raise ValueError(f"top must be an integer of at least 0, got {top!r}")
    with torch.no_grad():
        rows = [row for call in attention_calls(model, batch) for row in _rows(call, float(epsilon), top, max_iter)]
    return Diagnosis(tuple(rows), float(epsilon))


def _rows(call: AttentionCall, epsilon: float, top: int, max_iter: int) -> list[HeadRow]:
    """A row for each head."""
    if call.scale is not None or call.query_offset:
        raise ValueError(
            f"{call.layer}: a regression is read back from heads with 1/√head_dim on their scores, whose queries begin "
            f"at the first key; this layer has scale={call.scale}, and query_offset={call.query_offset}"
        )
    heads = call.keys.shape[1]
    notes = Notes(heads)
    measured: list[Tensor] = []
    tokens: list[tuple[int, ...]] = [()] * heads
    try:
        for element in range(call.keys.shape[0]):
            sequence = sequence_of(call, element, notes)
            if bool(sequence.hidden.all()):
                notes.add("sequences without a token are left out")
                continue
            numbers, largest = _measure(call, sequence, epsilon, top, max_iter, notes)
            tokens = tokens if measured else largest
            measured.append(numbers)
    except (RefusalError, KernelError) as reason:
        measured, tokens, notes = [], [()] * heads, Notes(heads)
        notes.add(str(reason))
    scales = call.primal.training_set.head_scales(heads)
    return [
        HeadRow(call.layer, call.number, head, scale, *mean, len(measured), tokens[head], notes.of(head), std)
        for head, scale in enumerate(scales)
        for mean, std in [_summary([numbers[head] for numbers in measured])]
    ]


def _measure(
    call: AttentionCall, p: OneSequence, epsilon: float, top: int, max_iter: int, notes: Notes
) -> tuple[Tensor, list[tuple[int, ...]]]:
    """`Numbers` of every head [H, 7], and the tokens with the largest |α|."""
    primal, (_, H, S, _), Dv = call.primal, p.keys.shape, p.values.shape[-1]
    # pooled beside the values, the identity tells which tokens make up each point
    member = torch.eye(S, dtype=torch.float64, device=p.keys.device).expand(1, H, S, S)
    made = design(
        primal, p.keys, torch.cat([p.values, member], -1), p.hidden, p.query, call.is_causal, double(p.parameters)
    )
    found = recover(
        primal, p.keys, p.values, epsilon=0.0, key_padding_mask=p.hidden, query=p.query, is_causal=call.is_causal,
        parameters=p.parameters,
    )  # fmt: skip
    log_alpha = (made.targets[..., :Dv].abs().log() + made.log_h.unsqueeze(-1))[0]  # [H, W, Dv]
    log_alpha = log_alpha.masked_fill(~made.visible[0, ..., None], -torch.inf)
    first = (made.targets[0, ..., Dv:] > 0).int().argmax(-1)  # [H, W]: the first token of each point
    order = log_alpha.amax(-1).argsort(dim=-1, descending=True, stable=True)
    count = found.seen[0].sum(-1)
    largest = [tuple(int(t) for t in first[h, order[h, : min(top, int(count[h]))]]) for h in range(H)]
    spectrum = torch.linalg.eigvalsh(made.kernel[0]).clamp(min=0)
    spectrum = spectrum / spectrum.sum(-1, keepdim=True)
    effective = torch.special.entr(spectrum).sum(-1).exp()
    log_c = found.log_C[0]
    support, bound = _shares(call, p, found.targets, log_c, log_alpha, epsilon, max_iter, notes)
    numbers = (log_c, *(x.sum((-1, -2)) / (count * Dv) for x in (support, bound)))
    rest = (effective, found.rank[0].double(), count.double(), found.condition[0])
    return torch.stack([*numbers, *rest], -1).cpu(), largest


def _shares(
    call: AttentionCall, p: OneSequence, targets: Tensor, log_c: Tensor, log_alpha: Tensor, epsilon: float,
    max_iter: int, notes: Notes,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Which α [H, W, Dv] are not zero, and which are at the bound, at this ε; NaN where it cannot be solved."""
    near = math.log1p(-TOL)
    if epsilon == 0:  # the head's own α, which fits its function exactly
        return (log_alpha > -torch.inf).double(), (log_alpha >= log_c[:, None, None] + near).double()
    beyond = log_c > LOG_C_LIMIT
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvergedWarning)  # said in the note
        solved = fit(
            call.primal, p.keys, targets, C=log_c.clamp(max=LOG_C_LIMIT).exp()[None], epsilon=epsilon,
            key_padding_mask=p.hidden, query=p.query, is_causal=call.is_causal, parameters=p.parameters, tol=TOL,
            max_iter=max_iter,
        )  # fmt: skip
    notes.add("C leaves float64, so the head is not solved again at ε", beyond)
    late = ~(solved.certificate.gap[0] <= TOL) & ~beyond
    notes.add(f"support vectors are approximate: not solved to a duality gap of {TOL:g}", late)
    alpha = (solved.alpha + solved.alpha_tilde)[0]
    bound = alpha >= solved.prices[0].unsqueeze(-1) * (1 - TOL)
    support, bound = alpha > 0, bound & (alpha > 0)
    unknown = beyond[:, None, None]
    return support.double().masked_fill(unknown, torch.nan), bound.double().masked_fill(unknown, torch.nan)


def _summary(measured: list[Tensor]) -> tuple[Numbers, Numbers]:
    """Mean and standard deviation over sequences; of the condition number in the log domain."""
    if not measured:
        nothing = Numbers(*(math.nan,) * len(Numbers._fields))
        return nothing, nothing
    x = torch.stack(measured)
    x[:, -1] = x[:, -1].log10()
    mean, std = x.mean(0), x.std(0, correction=0)
    mean[-1] = 10 ** mean[-1]
    return Numbers(*mean.tolist()), Numbers(*std.tolist())
