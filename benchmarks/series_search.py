"""Which recipe for time series: candidates and rivals on parts of training files alone; test files are never opened.

    python benchmarks/series_search.py prepare --data-dir uea --data-dir tser --cache search-cache   # training series
    python benchmarks/series_search.py run --cache search-cache --out found.jsonl --jobs 16 --minutes 9
    python benchmarks/series_search.py run … --candidates minirocket,multirocket-hydra,forest        # needs aeon
    python benchmarks/series_search.py table found.jsonl --blend bank+members --blend bank+members+bn

Every set is divided into folds, stratified and the same for all, several times where it is small. A candidate's
predictions for each fold are a line of JSON; what is there is not done again. A blend is the mean of the probabilities
of several candidates, so that members and banks are measured alone and put together afterwards. `run` needs no more
than torch, numpy and scikit-learn, and `prepare`'s folder.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from primaldual.data import Dataset, Split, cache, load
from primaldual.data.archive import manifest
from primaldual.models import BankSizes
from primaldual.primal import Spec
from primaldual.training import ModernRecipe, fit

FOLDS = 4
FEW, MANY = 50, 1000
"""Series: below FEW a set is divided SMALL times; above MANY so many are trained on, and one fold is enough."""
SMALL = 6
BYTES = 10_000_000
"""Of the prepared series of a set; of a larger set some are left out."""


class Unit(NamedTuple):
    """One candidate on one fold."""

    candidate: str
    set: str
    repeat: int
    fold: int


def changed(spec: Any, **changes: Any) -> Any:
    """A spec with other fields; `members__heads=8` is a field of every member."""
    for name, value in changes.items():
        first, _, rest = name.partition("__")
        if rest:
            inner = getattr(spec, first)
            one = isinstance(inner, Spec)
            value = changed(inner, **{rest: value}) if one else tuple(changed(x, **{rest: value}) for x in inner)
        spec = replace(spec, **{first: value})
    return spec


DEFAULT = ModernRecipe(calibration=0.0)
BANKS, MEMBERS = replace(DEFAULT, members=()), replace(DEFAULT, banks=())
BANK = replace(BANKS, banks=(BankSizes(),))
CANDIDATES: dict[str, ModernRecipe] = {
    "default": DEFAULT,
    "banks": BANKS,
    "bank": BANK,
    "bank-energy": changed(BANK, banks__energy=True, banks__prototypes=2048),
    "members": MEMBERS,
    "bank-1024": changed(BANK, banks__prototypes=1024),
    "bank-8192": changed(BANK, banks__prototypes=8192),
    "bank-soft": changed(BANK, banks__scale=3.0),
    "bank-hard": changed(BANK, banks__scale=30.0),
    "bank-widths": changed(BANK, banks__widths=(5, 9, 15)),
    "bank-instance": changed(BANK, banks__instance=True),
    "bank-level": changed(BANK, banks__level=0.7),
    "bank-level-windows": changed(BANK, banks__level=0.7, banks__windows=0.3),
    "bank-windows": changed(BANK, banks__windows=1.0),
    "bank-half-windows": changed(BANK, banks__windows=0.5),
    "bank-one-bias": changed(BANK, banks__biases=1, banks__prototypes=3 * BankSizes().prototypes),
    "no-attention": changed(MEMBERS, members__layers=0),
    "one-layer": changed(MEMBERS, members__layers=1),
    "bn": changed(MEMBERS, mechanism="bn"),
    "sh": changed(MEMBERS, mechanism="sh"),
    "bn-sh": changed(MEMBERS, mechanism="bn+sh"),
    "linear": changed(MEMBERS, mechanism="linear"),
    "wide": changed(MEMBERS, members__d_model=128, members__feedforward=256, work=1e9),
    "narrow": changed(MEMBERS, members__d_model=32, members__feedforward=64),
    "short-stem": changed(MEMBERS, members__widths=(3, 5, 7)),
    "long-stem": changed(MEMBERS, members__widths=(7, 15, 39)),
    "no-blocks": changed(MEMBERS, members__blocks=0),
    "three-blocks": changed(MEMBERS, members__blocks=3),
    "tokens-128": changed(MEMBERS, members__tokens=128),
    "tokens-32": changed(MEMBERS, members__tokens=32),
    "pool-attention": changed(MEMBERS, members__pooling=("attention",)),
    "pool-mean": changed(MEMBERS, members__pooling=("mean",)),
    "no-positions": changed(MEMBERS, members__positions=False),
    "instance": changed(MEMBERS, members__instance=True),
    "dropout-0.3": changed(MEMBERS, members__dropout=0.3),
    "no-mix": changed(MEMBERS, augmentation__mix=0.0),
    "mix-0.5": changed(MEMBERS, augmentation__mix=0.5),
    "no-warp": changed(MEMBERS, augmentation__warp=0.0),
    "warp-0.4": changed(MEMBERS, augmentation__warp=0.4),
    "no-noise": changed(MEMBERS, augmentation__jitter=0.0, augmentation__scaling=0.0),
    "more-noise": changed(MEMBERS, augmentation__jitter=0.3, augmentation__scaling=0.4),
    "no-drop": changed(MEMBERS, augmentation__drop=0.0),
    "cut": changed(MEMBERS, augmentation__cut=0.4),
    "no-smoothing": changed(MEMBERS, smoothing=0.0),
    "steps-200": changed(MEMBERS, steps=200),
    "steps-800": changed(MEMBERS, steps=800, work=1e9),
    "rate-5e-3": changed(MEMBERS, learning_rate=5e-3),
    "rate-1e-3": changed(MEMBERS, learning_rate=1e-3),
    "decay-0.2": changed(MEMBERS, weight_decay=0.2),
}
RIVALS = ("minirocket", "multirocket-hydra", "forest")


def prepare(directories: list[str], folder: Path, names: list[str] | None) -> None:
    """Keep the training series of every set that is in the directories."""
    total = 0
    for directory in directories:
        for name in names or sorted({p.stem for p in Path(directory).iterdir()} & set(manifest())):
            data = load(name, directory, offline=True)
            keep = min(len(data.train), BYTES // (4 * data.length * data.channels))
            rows = torch.from_numpy(np.random.RandomState(0).permutation(len(data.train))[:keep]).sort().values
            data = replace(data, train=of_rows(data.train, rows), test=of_rows(data.train, rows[:0]), origin="")
            cache.write(data, path := cache.cache_file(name, folder))
            total += path.stat().st_size
            print(f"{name}: {keep} series, {path.stat().st_size >> 10} KiB", flush=True)
    print(f"{total / 1e6:.1f} MB")


def of_rows(split: Split, rows: Any) -> Split:
    """Some of the series."""
    return Split(split.x[rows], split.lengths[rows], split.y[rows])


def read(name: str, folder: Path) -> Dataset:
    """A set as `prepare` left it, with the mean for channels without values and standardised targets."""
    return cache.read(cache.cache_file(name, folder)).filled().standardised()


def divisions(data: Dataset) -> dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]:
    """Rows to train on and rows to predict, by repeat and fold."""
    from sklearn.model_selection import KFold, StratifiedKFold

    y, cases = data.train.y.numpy(), len(data.train)
    kind = StratifiedKFold if data.classes else KFold
    found = {}
    for repeat in range(SMALL if cases < FEW else 1):
        folds = kind(FOLDS, shuffle=True, random_state=repeat).split(np.zeros(cases), y)
        found |= {(repeat, i): rows for i, rows in enumerate(folds)}
    if cases > MANY:
        train, held = found[0, 0]
        chosen = np.random.RandomState(0).permutation(train)[:MANY]
        found = {(0, 0): (np.sort(chosen), held)}
    return found


def ours(data: Dataset, recipe: ModernRecipe, seed: int, device: str) -> tuple[np.ndarray, dict[str, Any]]:
    """What a recipe predicts for the test part."""
    model = fit(data, recipe, seed, device)
    steps = [recipe.training(data, sizes).steps for sizes in recipe.members]
    return model.predict(data.test, device).numpy(), {"recipe": recipe.to_dict(), "steps": steps}


def rival(name: str, data: Dataset, seed: int) -> np.ndarray:
    """What aeon's classifier or regressor, or a forest on flattened series, predicts for the test part."""
    x, held = (raw(part, data) for part in (data.train, data.test))
    y = data.train.y.numpy()
    if name == "forest":
        from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

        forest = (RandomForestClassifier if data.classes else RandomForestRegressor)(200, random_state=seed)
        model, x, held = forest, x.reshape(len(x), -1), held.reshape(len(held), -1)
    else:
        import numba
        from aeon.classification import convolution_based as classifiers
        from aeon.regression import convolution_based as regressors

        numba.set_num_threads(1)
        kind = {"minirocket": "MiniRocket", "multirocket-hydra": "MultiRocketHydra"}[name]
        made = getattr(
            classifiers if data.classes else regressors, kind + ("Classifier" if data.classes else "Regressor")
        )
        model = made(random_state=seed, n_jobs=1)
    model.fit(x, y)
    found = model.predict(held)
    return np.eye(data.outputs)[found] if data.classes else found[:, None]


def raw(split: Split, data: Dataset) -> np.ndarray:
    """[cases, channels, length] in the archive's own units; padded steps are 0."""
    x = split.x.double() * data.std.nan_to_num(nan=1.0) + data.mean.nan_to_num(nan=0.0)
    if split.padding is not None:
        x = x.masked_fill(split.padding.unsqueeze(-1), 0.0)
    return np.ascontiguousarray(x.numpy().transpose(0, 2, 1))


def measure(unit: Unit, recipe: ModernRecipe | None, folder: str, device: str, seconds: int) -> dict[str, Any]:
    """A line for the results."""
    torch.set_num_threads(1)
    data = read(unit.set, Path(folder))
    train, held = divisions(data)[unit.repeat, unit.fold]
    data = replace(data, train=of_rows(data.train, train), test=of_rows(data.train, held))
    since, busy = time.perf_counter(), time.process_time()
    line = unit._asdict() | {"kind": data.kind}
    signal.signal(signal.SIGALRM, _late)
    signal.alarm(seconds)
    try:
        seed = 100 * unit.repeat + 10 * unit.fold
        if recipe is None:
            found = rival(unit.candidate, data, seed)
        else:
            found, about = ours(data, recipe, seed, device)
            line |= about
        line |= {"truth": data.test.y.tolist(), "found": np.round(found, 4).tolist(), "scale": data.target_std}
    except Exception as error:  # what one candidate does to one set must not end the search
        line["error"] = f"{type(error).__name__}: {error}"[:500]
    finally:
        signal.alarm(0)
    seconds, busy = time.perf_counter() - since, time.process_time() - busy
    return line | {"seconds": round(seconds, 2), "cpu": round(busy, 2), "device": device}


def _late(*_: Any) -> None:
    raise TimeoutError("the time limit of a fold")


def _measure(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return measure(*arguments)


def search(out: Path, candidates: dict[str, ModernRecipe | None], options: argparse.Namespace) -> None:
    """Measure what is not in the file yet, until the time is over."""
    known = {(key(line), json.dumps(line.get("recipe"))) for line in lines(out)} if out.is_file() else set()
    folder = Path(options.cache)
    units = []
    for name in options.sets.split(",") if options.sets else cache.cached_names(folder):
        for repeat, fold in divisions(read(name, folder)):
            if repeat < options.repeats and fold < options.folds:
                units += [Unit(candidate, name, repeat, fold) for candidate in candidates]
    # the first fold of every set for every candidate, then the second: whenever it ends there is something to compare
    units.sort(key=lambda unit: (unit.repeat, unit.fold))
    tasks = []
    for unit in units:
        recipe = candidates[unit.candidate]
        if (unit, json.dumps(recipe.to_dict() if recipe else None)) not in known:
            tasks.append((unit, recipe, options.cache, options.device, options.seconds))
    end = time.monotonic() + 60 * options.minutes
    print(f"{len(tasks)} of {len(units)} are left to do", flush=True)
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool, out.open("a") as stream:
        found = pool.imap_unordered(_measure, tasks)
        for done in range(len(tasks)):
            try:
                line = found.next(timeout=max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"the time is over: {done} of {len(tasks)} done", flush=True)
                break
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            if "error" in line:
                print(f"{line['set']} {line['candidate']}: {line['error']}", flush=True)


def key(line: dict[str, Any]) -> Unit:
    """What a line is of."""
    return Unit(line["candidate"], line["set"], line["repeat"], line["fold"])


def lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; one that was cut off by a kill is left out."""
    for text in path.read_text().splitlines():
        try:
            yield json.loads(text)
        except json.JSONDecodeError:
            continue


def table(paths: list[Path], blends: list[str], against: str) -> None:
    """Accuracy in % (or −RMSE) per set over the folds that every candidate shown has, and CPU seconds."""
    found: dict[str, dict[Unit, dict[str, Any]]] = defaultdict(dict)
    for path in paths:
        for line in lines(path):
            if "error" not in line:
                found[line["candidate"]][key(line)._replace(candidate="")] = line
    for blend in blends:
        terms = [term.rpartition("*") for term in blend.split("+")]
        parts = [found[name] for *_, name in terms if name in found] or [{}]
        weights = [float(weight or 1) for weight, _, name in terms if name in found] or None
        for unit in set.intersection(*map(set, parts)):
            mean = np.average([part[unit]["found"] for part in parts], axis=0, weights=weights)
            busy = sum(part[unit]["cpu"] for part in parts)
            found[blend][unit] = parts[0][unit] | {"found": mean, "cpu": busy}
    sets = sorted({unit.set for of in found.values() for unit in of})
    rows = []
    for name, of in found.items():
        both = {unit: of[unit] for unit in of if not against or unit in found[against]}
        each = {s: [quality(line) for unit, line in both.items() if unit.set == s] for s in sets}
        rival = {s: [quality(found[against][unit]) for unit in both if unit.set == s] for s in sets} if against else {}
        mean = np.mean([np.mean(x) for x in each.values() if x]) if both else math.nan
        gain = np.mean([np.mean(x) - np.mean(rival[s]) for s, x in each.items() if x]) if rival and both else 0.0
        seconds = np.mean([line["cpu"] for line in both.values()]) if both else math.nan
        rows.append((gain, name, mean, seconds, [f"{np.mean(each[s]):6.1f}" if each[s] else "     –" for s in sets]))
    print(f"{'candidate':24s} {'gain':>6s} {'mean':>6s} {'s':>6s}  " + " ".join(f"{s[:6]:>6s}" for s in sets))
    for gain, name, mean, seconds, cells in sorted(rows, reverse=True):
        print(f"{name:24s} {gain:6.2f} {mean:6.2f} {seconds:6.1f}  " + " ".join(cells))


def quality(line: dict[str, Any]) -> float:
    """Accuracy in percent; minus the root mean squared error for a regression."""
    truth, found = np.array(line["truth"]), np.array(line["found"])
    if line["kind"] == "classification":
        return 100.0 * float((found.argmax(1) == truth).mean())
    return -line["scale"] * math.sqrt(float(np.square(found[:, 0] - truth).mean()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    preparing = commands.add_parser("prepare")
    preparing.add_argument("--data-dir", action="append", required=True)
    preparing.add_argument("--cache", type=Path, required=True)
    preparing.add_argument("--sets")
    running = commands.add_parser("run")
    running.add_argument("--cache", required=True)
    running.add_argument("--out", type=Path, required=True)
    running.add_argument("--candidates", help="names with commas; all of ours unless given")
    running.add_argument("--recipes", type=Path, help="JSON: more candidates, each a name and what it changes")
    running.add_argument("--sets", help="names with commas")
    running.add_argument("--repeats", type=int, default=SMALL)
    running.add_argument("--folds", type=int, default=FOLDS)
    running.add_argument("--jobs", type=int, default=1)
    running.add_argument("--minutes", type=float, default=9.0)
    running.add_argument("--seconds", type=int, default=240, help="of one fold at most")
    running.add_argument("--device", default="cpu")
    showing = commands.add_parser("table")
    showing.add_argument("files", type=Path, nargs="+")
    showing.add_argument("--blend", action="append", default=[], help="names with + between, as in bank+3*members")
    showing.add_argument("--against", default="", help="a candidate: only its folds count, and gains are over it")
    options = parser.parse_args()
    if options.command == "prepare":
        prepare(options.data_dir, options.cache, options.sets.split(",") if options.sets else None)
    elif options.command == "table":
        table(options.files, options.blend, options.against)
    else:
        known: dict[str, ModernRecipe] = dict(CANDIDATES)
        if options.recipes:
            given = json.loads(options.recipes.read_text())
            known |= {
                name: changed(known[changes.pop("from", "members")], **changes) for name, changes in given.items()
            }
        names = options.candidates.split(",") if options.candidates else list(known)
        if unknown := [name for name in names if name not in known and name not in RIVALS]:
            parser.error(f"there is no candidate {', '.join(unknown)}; there are {', '.join([*known, *RIVALS])}")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        search(options.out, {name: known.get(name) for name in names}, options)


if __name__ == "__main__":
    main()
