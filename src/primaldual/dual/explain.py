"""The derivation of an expansion, written out for a reader: text, Markdown or LaTeX."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..primal import (
    BatchNorm,
    DepthwiseConv2d,
    Exponential,
    Gated,
    Gaussian,
    KernelSum,
    Laplace,
    Polynomial,
    Primal,
    Recenter,
    Scale,
    Unit,
)
from ..primal._spec import operand
from .cost import count
from .form import form_of, pooling_of
from .render import RENDERERS, Line, Section, formula, say
from .rewrites import Reassociate, RowConstantsCancel

if TYPE_CHECKING:
    from .expansion import Expansion


def explain(expansion: Expansion, format: str, *, length: int | None, heads: int | None, head_dim: int) -> str:
    """The whole derivation in one of the formats of `RENDERERS`."""
    if format not in RENDERERS:
        raise ValueError(f"format must be one of {', '.join(RENDERERS)}; got {format!r}")
    primal = expansion.primal
    sections = [
        _layer(primal),
        _problem(primal),
        _stationarity(),
        _expansion(primal),
        _relaxed(primal),
        _rewrites(expansion),
        _cost(expansion, length, heads, head_dim),
    ]
    return RENDERERS[format](sections)


def _layer(p: Primal) -> Section:
    tail, tail_latex = " + b" + " + x" * p.residual, "+b" + "+x" * p.residual
    lines = [
        formula(f"y = f(x) = W Φ(Tx) / h(Tx){tail}", rf"y=f(x)=W\,\frac{{\Phi(Tx)}}{{h(Tx)}}{tail_latex}"),
        formula(f"Φ(x) = {p.features.text()}", rf"\Phi(x)={p.features.latex()}"),
        formula(f"h(x) = {p.normalizer.text()}", rf"h(x)={p.normalizer.latex()}"),
        formula(f"T x  = {_mapped(p, 'x')}", rf"Tx={_mapped(p, 'x', latex=True)}"),
        formula(f"S    = {p.training_set.text()}", rf"S={p.training_set.latex()}"),
    ]
    if any(m.needs != "nothing" for m in p.point_maps):
        of = "pooled keys" if pooling_of(p.training_set) else "keys"
        lines.append(say(f"The statistics of T are taken over the head's own {of}, one vote each."))
    if isinstance(p.normalizer, Gated):
        lines.append(formula("g(x) = σ(A x_in + a)", r"g(x)=\sigma(A\,x_{\mathrm{in}}+a)"))
    weights = () if p.weights is None else (p.weights,)
    lines += [formula(part.text(), part.latex()) for part in weights]
    for part in (p.features, p.normalizer, *p.inputs, p.training_set, *weights):
        lines += map(say, part.remarks(), part.remarks(latex=True))
    return Section("The primal layer", lines)


def _problem(p: Primal) -> Section:
    lines = [
        say(
            "Fit f to the pairs (k_j, y_j), j in S, with tolerance ε (Eqn. primal-opt):",
            r"Fit $f$ to the pairs $(k_j,y_j)$, $j\in S$, with tolerance $\epsilon$ (Eqn. primal-opt):",
        ),
        formula(
            "minimise    ½‖W‖² + C Σ_{j∈S} Σ_d (ξ_j(d) + ξ̃_j(d))",
            r"\min_{W,\xi,\tilde\xi}\ \tfrac12\|W\|_F^2+C\sum_{j\in S}\sum_{d}\big(\xi_j(d)+\tilde\xi_j(d)\big)",
        ),
        formula(
            "subject to  y_j(d) − f(k_j)(d) ≤ ε + ξ_j(d),   ξ_j(d) ≥ 0",
            r"\text{s.t.}\quad y_j(d)-f(k_j)(d)\le\epsilon+\xi_j(d),\quad \xi_j(d)\ge0",
        ),
        formula(
            "            f(k_j)(d) − y_j(d) ≤ ε + ξ̃_j(d),   ξ̃_j(d) ≥ 0",
            r"\phantom{\text{s.t.}}\quad f(k_j)(d)-y_j(d)\le\epsilon+\tilde\xi_j(d),\quad \tilde\xi_j(d)\ge0",
        ),
    ]
    if form_of(p).subset != "all":
        lines.append(say("Each query has its own subset S, so there is one such problem per query (Eqn. sparse-svr)."))
    elif pooling_of(p.training_set):
        lines.append(say("Each head has its own S, so there is one such problem per head, of its own size."))
    return Section("The regression", lines)


def _stationarity() -> Section:
    lines = [
        say("At the saddle point the derivatives of the Lagrangian vanish:"),
        formula(
            "∂w_d: w_d = Σ_{j∈S} (α_j(d) − α̃_j(d)) Φ(Tk_j) / h(Tk_j)                 (Eqn. dldw)",
            r"\partial_{w_d}:\quad "
            r"w_d=\sum_{j\in S}\big(\alpha_j(d)-\tilde\alpha_j(d)\big)\frac{\Phi(Tk_j)}{h(Tk_j)}",
        ),
        formula(
            "∂b(d): Σ_{j∈S} (α_j(d) − α̃_j(d)) = 0                                  (Eqn. dldb)",
            r"\partial_{b(d)}:\quad \sum_{j\in S}\big(\alpha_j(d)-\tilde\alpha_j(d)\big)=0",
        ),
        formula(
            "∂ξ_j(d): C − α_j(d) − η_j(d) = 0, likewise with tildes, so 0 ≤ α, α̃ ≤ C   (Eqn. dldxi)",
            r"\partial_{\xi_j(d)}:\quad "
            r"C-\alpha_j(d)-\eta_j(d)=0\ \Rightarrow\ 0\le\alpha_j(d),\tilde\alpha_j(d)\le C",
        ),
    ]
    return Section("Stationarity of the Lagrangian", lines)


def _expansion(p: Primal) -> Section:
    b, b_latex = (" + b", "+b") if p.bias else ("", "")
    x, x_latex = (" + x_i", "+x_i") if p.residual else ("", "")
    w = "" if p.weights is None else "w_j "
    lines = [
        say(
            "Put w_d back into f, with v_j = (α_j − α̃_j) / h(Tk_j) and x = q_i (Eqn. dual-model):",
            r"Put $w_d$ back into $f$, with $v_j=(\alpha_j-\tilde\alpha_j)/h(Tk_j)$ and $x=q_i$ (Eqn. dual-model):",
        ),
        formula(
            f"f(q_i) = Σ_{{j∈S}} {w}κ(Tq_i, Tk_j) / h(Tq_i) · v_j{b}{x},   κ(x, y) = Φ(x)·Φ(y)",
            rf"f(q_i)=\sum_{{j\in S}}\frac{{{w}\kappa(Tq_i,Tk_j)}}{{h(Tq_i)}}\,v_j{b_latex}{x_latex},"
            r"\qquad \kappa(x,y)=\Phi(x)^\top\Phi(y)",
        ),
    ]
    q, k = _mapped(p, "q_i"), _mapped(p, "k_j")
    q_latex, k_latex = _mapped(p, "q_i", latex=True), _mapped(p, "k_j", latex=True)
    if type(p.features) in (Exponential, Laplace):
        score, score_latex = f"[{q}]·[{k}]/√D", rf"[{q_latex}]^\top[{k_latex}]/\sqrt{{D}}"
        if not p.inputs:
            score, score_latex = "q_i·k_j/√D", r"q_i^\top k_j/\sqrt{D}"
        apart, apart_latex = _apart(p)
        score, score_latex = score + apart, score_latex + apart_latex
        if w:
            score, score_latex = f"{score} + log w_j", rf"{score_latex}+\log w_j"
        plain = p.normalizer == KernelSum()
        name, name_latex = ("softmax_j", r"\mathrm{softmax}_j") if plain else ("exp", r"\exp")
        over = "" if plain or type(p.normalizer) is Unit else " / h(Tq_i)"
        over_latex = rf"\,/\,{p.normalizer.latex('Tq_i')}" if over else ""
        lines += [
            say(
                f"The monomials of Φ sum to the exponential: κ(x, y) = exp(x·y/√D{apart}). Filled in:",
                rf"The monomials of $\Phi$ sum to the exponential: $\kappa(x,y)=\exp(x^\top y/\sqrt D{apart_latex})$. "
                r"Filled in:",
            ),
            formula(
                f"f(q_i) = Σ_{{j∈S}} {name}({score}){over} v_j{b}{x}",
                rf"f(q_i)=\sum_{{j\in S}}{name_latex}\Big({score_latex}\Big){over_latex}\,v_j{b_latex}{x_latex}",
            ),
        ]
    else:
        if (kernel := _kernel(p)) is not None:
            lines += [say("The kernel of these features:"), kernel]
        lines += [
            say("Filled in, with Φ as above:", r"Filled in, with $\Phi$ as above:"),
            formula(
                f"f(q_i) = Σ_{{j∈S}} {w}Φ({q})·Φ({k}) / h · v_j{b}{x},   h = {p.normalizer.text('T q_i')}",
                rf"f(q_i)=\sum_{{j\in S}}\frac{{{w}\Phi({q_latex})^\top\Phi({k_latex})}}{{h}}\,v_j{b_latex}{x_latex},"
                rf"\qquad h={p.normalizer.latex('Tq_i')}",
            ),
        ]
    if pooling_of(p.training_set):
        lines.append(
            say(
                "Here k_j and v_j are those of window j of the head's own scale.",
                r"Here $k_j$ and $v_j$ are those of window $j$ of the head's own scale.",
            )
        )
    return Section("The support vector expansion", lines)


def _kernel(p: Primal) -> Line | None:
    """κ in closed form, where it has one that says more than Φ(x)·Φ(y)."""
    match p.features:
        case Gaussian(bandwidth=b):
            over, over_latex = ("2√D", r"2\sqrt{D}") if b == 1 else (f"2·{b:g}²√D", rf"2\cdot{b:g}^2\sqrt{{D}}")
            return formula(f"κ(x, y) = exp(−|x − y|²/({over}))", rf"\kappa(x,y)=e^{{-\|x-y\|^2/({over_latex})}}")
        case Polynomial(degree=degree, constant=c):
            return formula(
                f"κ(x, y) = (x·y/√D + {c:g})^{degree}", rf"\kappa(x,y)=(x^\top y/\sqrt{{D}}+{c:g})^{{{degree}}}"
            )
    return None


def _relaxed(p: Primal) -> Section:
    if p.bias:
        bias = say(
            "b is learned per head; the centring constraint Σ_j (α_j − α̃_j) = 0 that comes with it is dropped.",
            r"$b$ is learned per head; the centring constraint $\sum_j(\alpha_j-\tilde\alpha_j)=0$ "
            "that comes with it is dropped.",
        )
    else:
        bias = say(
            "b = 0, so the centring constraint Σ_j (α_j − α̃_j) = 0 is dropped too (Remark v_centered).",
            r"$b=0$, so the centring constraint $\sum_j(\alpha_j-\tilde\alpha_j)=0$ "
            r"is dropped too (Remark v\_centered).",
        )
    lines = [
        say(
            "v is learned, so its box |v_j(d)| ≤ C/h(Tk_j) is dropped (Remark v_bounded; Theorem 1).",
            r"$v$ is learned, so its box $|v_j(d)|\le C/h(Tk_j)$ is dropped (Remark v\_bounded; Theorem 1).",
        ),
        bias,
        say(
            "Queries and keys have projections of their own, where the primal has one W^proj (Eqn. dual-model-res).",
            r"Queries and keys have projections of their own, where the primal has one $W^{\mathrm{proj}}$ "
            "(Eqn. dual-model-res).",
        ),
    ]
    return Section("What is relaxed", lines)


def _rewrites(expansion: Expansion) -> Section:
    p = expansion.primal
    lines = []
    for rewrite in expansion.rewrites:
        lines += [say(f"{rewrite.name}:".capitalize()), formula(rewrite.identity, rewrite.identity_latex)]
        if rewrite is RowConstantsCancel:
            lines += [
                say("So the keys stay as they are, and the last input map becomes one of the query alone:"),
                formula(*_one_sided(p)),
            ]
        if rewrite is Reassociate:
            lines.append(say("So the cost grows with N, not with N².", r"So the cost grows with $N$, not with $N^2$."))
    return Section("Exact rewrites", lines or [say("None applies: the expansion runs as it is written.")])


def _one_sided(p: Primal) -> tuple[str, str]:
    """The rewritten expansion of a softmax head whose last map is (x − a) ⊙ c."""
    *earlier, last = p.inputs
    q, k = "q_i", "k_j"
    q_latex, k_latex = "q_i", "k_j"
    for map_ in earlier:
        q, k, q_latex, k_latex = map_.text(q), map_.text(k), map_.latex(q_latex), map_.latex(k_latex)
    if type(last) is BatchNorm:
        shift = Recenter(last.beta, last.learnable)
        q, q_latex = (
            f"({shift.text(q)}) ⊙ (σ² + {last.eps:g})^(−1)",
            rf"({shift.latex(q_latex)})\odot(\sigma^2+\epsilon)^{{-1}}",
        )
    elif type(last) is Scale:
        square, square_latex = ("c²", "c^2") if last.learnable else (f"{last.start**2:g}",) * 2
        q, q_latex = f"{square} {operand(q)}", rf"{square_latex}\,{operand(q_latex)}"
    elif type(last) is Recenter:
        q, q_latex = last.text(q), last.latex(q_latex)
    else:
        q, q_latex = f"({q} − a) ⊙ c²", rf"({q_latex}-a)\odot c^2"
    apart, apart_latex = _apart(p)
    if earlier:
        k, k_latex = f"[{k}]", f"[{k_latex}]"
    return (
        f"f(q_i) = Σ_{{j∈S}} softmax_j([{q}]·{k}/√D{apart}) v_j",
        rf"f(q_i)=\sum_{{j\in S}}\mathrm{{softmax}}_j\Big([{q_latex}]^\top {k_latex}/\sqrt{{D}}{apart_latex}\Big)\,v_j",
    )


def _apart(p: Primal) -> tuple[str, str]:
    """What positions add to a score."""
    return (" − m|i − j|", "-m|i-j|") if type(p.features) is Laplace else ("", "")


def _cost(expansion: Expansion, length: int | None, heads: int | None, head_dim: int) -> Section:
    heads, length = _example(expansion.primal, length, heads)
    before, after = (
        count(e, queries=length, keys=length, heads=heads, head_dim=head_dim) for e in (expansion.as_written, expansion)
    )
    lines = [
        say(
            f"Forward FLOPs of one layer for N = {length}, {heads} heads of dimension {head_dim} "
            "(query and output projections left out):",
            f"Forward FLOPs of one layer for $N={length}$, {heads} heads of dimension {head_dim} "
            "(query and output projections left out):",
        )
    ]
    maps = "input maps, pooling, gates" if expansion.primal.made(1, 1) else "input maps and pooling"
    rows = [
        ("key and value projections", before.projection, after.projection),
        (maps, before.maps, after.maps),
        ("scores and sums", before.attention, after.attention),
        ("together", before.total, after.total),
    ]
    for name, old, new in rows:
        share = f"{new / old:.2f} ×" if old else "–"
        text = f"{name:27} {_si(old):>9} as written, {_si(new):>9} rewritten  ({share})"
        ratio = rf"({new / old:.2f}\times)" if old else ""
        lines.append(formula(text, rf"\text{{{name}:}}\quad {_si(old, '~')}\ \to\ {_si(new, '~')}\quad {ratio}"))
    return Section("Cost", lines)


def _example(p: Primal, length: int | None, heads: int | None) -> tuple[int, int]:
    """A head count and a length that the primal accepts, where none is given."""
    pooled = pooling_of(p.training_set)
    if heads is None:
        heads = len(pooled.scales) if pooled and pooled.scales else 8
    if length is None:
        length = 1024
        for part in (pooled, *(m for m in p.inputs if isinstance(m, DepthwiseConv2d))):
            if part is not None:  # 1024 patches are a square; a grid that is given decides
                length = part.prefix + (1024 if part.grid is None else part.grid[0] * part.grid[1])
    return heads, length


def _mapped(p: Primal, x: str, latex: bool = False) -> str:
    for map_ in p.inputs:
        x = map_.latex(x) if latex else map_.text(x)
    return x


def _si(count: float, space: str = " ") -> str:
    for unit in ("", "k", "M", "G", "T"):
        if count < 1000:
            return f"{count:.3g}{space}{unit}".rstrip(space)
        count /= 1000
    return f"{count:.3g}{space}P"
