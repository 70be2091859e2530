"""The demo's results as a page for a reader."""

from __future__ import annotations

from ..base.spread import spread
from ..paper.numbers import SCALES
from ..report.page import Page
from .figures import Figures
from .results import MEGA, Results
from .settings import BETA, PAPER, SHOWN


def page(results: Results, figures: Figures) -> str:
    """The whole report, as HTML."""
    document = Page(
        "Four attentions, derived from their primal layers",
        "Each mechanism is stated as a neural-network layer and the data it is fitted to; its attention follows. "
        "Here all four are derived, checked against the reference, and trained on BasicMotions.",
    )
    worst = max(max(one.output, one.gradient) for one in results.checks)
    ratio = results.flops("bn+sh", rewritten=True) / results.flops("softmax", rewritten=True)
    softmax, best = results.accuracy("softmax"), results.accuracy("bn+sh")
    document.cards(
        [
            (f"{best.text(1)} %", f"accuracy of BN+SH; softmax: {softmax.text(1)} %"),
            (f"{ratio:.2f} ×", "attention FLOPs of BN+SH against softmax"),
            (f"{worst:.0e}", "largest difference from the reference in float64, gradients included"),
            (
                f"{results.seconds:.0f} s",
                f"for everything, {len(results.members + results.sweep)} trained models included",
            ),
        ]
    )
    for note in results.notes:
        document.note(note)
    _accuracy(document, results, figures)
    _cost(document, results, figures)
    _heads(document, figures)
    _sweep(document, results, figures)
    _checks(document, results)
    _derivations(document, results)
    _protocol(document, results)
    return document.html()


def _accuracy(document: Page, results: Results, figures: Figures) -> None:
    document.section(
        "Accuracy",
        f"Test accuracy after the last of {_plural(results.settings.epochs, 'epoch')}, mean ± sample standard "
        f"deviation over {_plural(len(results.of('softmax')), 'seed')}. No run selects its epoch, and β = {BETA} and "
        f"the scales {', '.join(map(str, SCALES))} are the paper's, fixed beforehand.",
        "Model size, batch and number of epochs are the same for all four mechanisms. They were set for a short demo, "
        "with test curves in view, so this is a demonstration and not a benchmark. One of the 40 test series is "
        "2.5 points: differences of that size mean little.",
    )
    headings = ["mechanism\nits primal layer", "accuracy, %", "paper, %\nits own setting", "parameters"]
    document.table(
        [*headings, "distance\nof heads", "CPU s\nper seed"],
        [
            [
                f"**{name}**\n{_stated(results, name)}",
                f"**{results.accuracy(name).text()}**",
                f"{PAPER[name].mean:.2f} ± {PAPER[name].std:.2f}",
                f"{results.of(name)[0].record.parameters:,}",
                results.head_distance(name).text(),
                f"{results.cpu_seconds(name):.2f}",
            ]
            for name in results.expansions
        ],
        "The paper states neither the size of its model for this data set nor whether an epoch was selected; its "
        "numbers are there for orientation. Time is that of training and of the evaluation after every epoch, on one "
        "thread, shared among the seeds that train together. "
        "Series of 100 steps are short: what SH saves is weighed against four calls of attention instead of one.",
    )
    document.figure(
        figures.accuracy,
        "Large dot: mean ± standard deviation over seeds. Small dots: the seeds. Grey diamond: the paper.",
    )
    document.figure(figures.curves, "Mean over seeds; shaded, the range from the lowest to the highest seed.")


def _cost(document: Page, results: Results, figures: Figures) -> None:
    document.section(
        "Cost",
        "Floating-point operations of attention in a forward pass, per series and all layers together: key and value "
        "projections, input maps, pooling, the sum. **Before** is the expansion as derived, **after** follows the "
        "exact rewrites.",
    )
    softmax = results.flops("softmax", rewritten=True)
    document.table(
        ["mechanism\nrewrites", "before, MFLOPs", "after, MFLOPs", "against softmax"],
        [
            [
                f"**{name}**\n{', '.join(rewrite.name for rewrite in expansion.rewrites) or 'none needed'}",
                f"{results.flops(name, rewritten=False) / MEGA:.3f}",
                f"**{results.flops(name, rewritten=True) / MEGA:.3f}**",
                f"{results.flops(name, rewritten=True) / softmax:.2f} ×",
            ]
            for name, expansion in results.expansions.items()
        ],
    )
    document.figure(figures.cost, "Filled: after the rewrites. Dashed: before.")


def _heads(document: Page, figures: Figures) -> None:
    document.section(
        "What each head looks at",
        f"Attention weights of the last layer for the first test series of the class “{SHOWN}”, seed 0; queries from "
        "top to bottom, keys from left to right. The pooled heads of SH are fitted to means over windows of keys, "
        "and see the series as coarsely as their scale says.",
    )
    document.figure(
        figures.heads,
        "Each map has its own colour scale, from 0 to its 96 % quantile. A window's weight is shared by its tokens.",
    )
    document.text(
        "The distance of heads in the table above is the mean L2 distance between the maps of two heads, over all "
        "pairs, test series and layers: the paper's measure of redundancy. Sharing a weight among the s tokens of a "
        "window makes its L2 norm √s times smaller, which pulls the distance of pooled heads down; the paper does not "
        "say how it compares maps of different widths."
    )


def _sweep(document: Page, results: Results, figures: Figures) -> None:
    document.section(
        "How much to re-centre",
        "Attention-BN takes β times the mean key off queries and keys; β = 0 is softmax.",
    )
    found = results.by_beta()
    if figures.sweep is None:
        document.note("The sweep over β was left out: no time was left for it.")
        return
    document.table(
        ["β", *(f"{beta:g}" for beta in found)],
        [["accuracy, %", *(spread([member.accuracy for member in members]).text(1) for members in found.values())]],
    )
    document.figure(
        figures.sweep,
        f"{_plural(len(next(iter(found.values()))), 'seed')} for each β, last epoch; the line joins the means. "
        "A look at the sensitivity, not a choice of β: the results above use the paper's.",
    )


def _checks(document: Page, results: Results) -> None:
    document.section(
        "Checks",
        "The form that runs against the dense reference formula, on an attention layer of this very model and on test "
        "series, in float64: the largest absolute difference of the outputs, and of the gradients in the inputs and "
        "all weights. With padding, every series has another length, from 1 up.",
    )
    rows: dict[str, list[str]] = {}
    for one in results.checks:
        rows.setdefault(one.mechanism, [f"**{one.mechanism}**"]).extend((f"{one.output:.1e}", f"{one.gradient:.1e}"))
    document.table(["mechanism", "output", "gradients", "output, padded", "gradients, padded"], rows.values())


def _derivations(document: Page, results: Results) -> None:
    document.section(
        "Derivations",
        "From the primal layer to its attention: the regression, the stationarity conditions of its Lagrangian, the "
        "support vector expansion, and the exact rewrites that make it cheap. `primaldual explain bn+sh` prints one.",
    )
    for name, expansion in results.expansions.items():
        text = expansion.explain("text", length=results.data.length, **results.attention_shape)
        document.details(name, text)


def _protocol(document: Page, results: Results) -> None:
    recipe, model, data = results.settings.recipe, results.config, results.data
    seeds = ", ".join(str(member.seed) for member in results.of("softmax"))
    document.section("Protocol and setting")
    document.facts(
        {
            "data": f"{data.name} as shipped with aeon: {len(data.train)} training and {len(data.test)} test series of "
            f"{data.length} steps and {data.channels} channels, {len(data.classes)} classes "
            f"({', '.join(data.classes)}); each channel standardised by the training statistics",
            "model": f"the library's SeriesTransformer, encoder “{model.encoder}”: linear embedding, learned "
            f"positions, {_plural(model.layers, 'encoder layer')} (GELU, LayerNorm after each residual), LayerNorm, "
            f"flatten, linear; width {model.d_model}, {model.heads} heads, feed-forward {model.feedforward}, "
            f"dropout {model.dropout}, none on the attention weights",
            "training": f"RAdam, learning rate {recipe.learning_rate:g}, batch {recipe.batch_size}, gradients clipped "
            f"at {recipe.clip:g}, {_plural(results.settings.epochs, 'epoch')}; last epoch reported",
            "seeds": f"{seeds}; for a seed, every mechanism starts from the same weights and sees the same batches",
            "command": f"`{results.command}`",
            "started": results.started.strftime("%Y-%m-%d %H:%M UTC"),
            **{name: str(value) for name, value in results.environment.items() if value is not None},
            "data SHA-256": f"`{data.hash}`",
        }
    )
    document.text("Every number of this page is in `results.json`, per seed and per epoch.")


def _stated(results: Results, name: str) -> str:
    """The input maps and the training set, in which the four differ."""
    primal = results.expansions[name].primal
    return "; ".join([*(f"T: {map_.text()}" for map_ in primal.inputs), f"S: {primal.training_set.text()}"])


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
