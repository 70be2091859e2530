"""`primaldual generate MODEL`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import torch
import typer

from ..base.threads import on_threads
from .jobs import one_line_errors
from .main import app, errors
from .options import Device, Threads, device_option

if TYPE_CHECKING:
    from ..data.text import Tokenizer
    from ..generation import Cache, Choice
    from ..models import LanguageModel

DTYPES = ("float32", "bfloat16", "float64")


@app.command(
    epilog="**Examples**\n\n- `primaldual generate primaldual-runs --prompt 'Permission is granted'`"
    "\n\n- `primaldual generate primaldual-runs/models/0123456789abcdef0123.safetensors --temperature 0.8 --top-p 0.9`"
    "\n\n- `primaldual generate model.safetensors --tokenizer tokenizer.json --prompt 'Once' --max-tokens 500 --seed 1`"
)
def generate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            show_default=False,
            help="What `primaldual train-text` left in `models/`, or its output folder, where there is one model.",
        ),
    ],
    prompt: Annotated[str, typer.Option(show_default=False, help="What the text begins with; else nothing.")] = "",
    max_tokens: Annotated[int, typer.Option(min=1, help="So many new ones at most.")] = 256,
    temperature: Annotated[float, typer.Option(help="0: the most probable token; else tokens are drawn.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw among tokens that have this probability together.")] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, show_default=False, help="Of what is drawn; else any.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(show_default=False, help="That of the training; bytes unless given.")
    ] = None,
    device: Device = None,
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="`float32`, `bfloat16` or `float64`; else the model's.")
    ] = None,
    threads: Threads = 1,
) -> None:
    """Continue a text with a language model, letter by letter as it comes.

    The text begins where a document begins, and ends where the model ends one, or after so many tokens. The prompt and
    what follows go to standard output; how fast it was, and the size of the cache, beside that of one that keeps every
    token of every head, to standard error.
    """
    from ..generation import Choice

    with one_line_errors(2):
        chosen = device_option(device)
        choice = Choice(temperature, top_p)
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"--dtype must be one of {', '.join(DTYPES)}; got {dtype!r}")
    with one_line_errors(1), torch.inference_mode(), on_threads(threads):
        path = _file(model)
        words = _tokenizer(path, tokenizer)
        made = _model(path, words, tokenizer)
        made.to(chosen) if dtype is None else made.to(chosen, getattr(torch, dtype))
        tokens = [words.separator, *(words.encode(prompt.encode(), "the prompt").tolist() if prompt else [])]
        _check_places(made, len(tokens), max_tokens)
        cache = made.cache(1)
        sys.stdout.write(prompt)
        with _closed_line():
            stopped = _say(made, words, torch.tensor([tokens], device=chosen), max_tokens, choice, seed, cache)
    if stopped:
        raise typer.Exit(130)


def _say(
    model: LanguageModel, words: Tokenizer, tokens: torch.Tensor, max_tokens: int, choice: Choice, seed: int | None,
    cache: Cache,
) -> bool:  # fmt: skip
    """Write text as it comes, and the figures; whether it was stopped."""
    from ..generation import stream

    decoder, count, stopped = words.decoder(), 0, False
    begin = first = last = perf_counter()
    try:
        for token in stream(
            model, tokens, max_tokens=max_tokens, choice=choice, seed=seed, eos=words.separator, cache=cache
        ):  # fmt: skip
            number = int(token)
            last = perf_counter()
            first = first if count else last
            count += 1
            if number != words.separator:
                sys.stdout.write(decoder.add(number))
                sys.stdout.flush()
        sys.stdout.write(decoder.end())
    except KeyboardInterrupt:
        stopped = True
    sys.stdout.write("\n")
    sys.stdout.flush()
    speed = f", {(count - 1) / (last - first):,.0f} tokens per second" if count > 1 and last > first else ""
    errors.print(
        f"{count} tokens{speed} (prompt of {tokens.shape[1]} in {first - begin:.2f} s); cache {_size(cache.bytes)}, "
        f"{cache.bytes / max(cache.full_bytes, 1):.2f} of one of every token and head",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return stopped


@contextmanager
def _closed_line() -> Iterator[None]:
    """An error stands in a line of its own."""
    try:
        yield
    except Exception:
        sys.stdout.write("\n")
        sys.stdout.flush()
        raise


def _file(given: Path) -> Path:
    """The file of a model; that of a folder of runs where it has one."""
    if given.is_file():
        return given
    if not given.is_dir():
        raise FileNotFoundError(
            f"there is no file {given}; give one that `primaldual train-text` left in OUTPUT/models, or OUTPUT"
        )
    found = sorted(given.glob("*.safetensors")) or sorted((given / "models").glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    said = ", ".join(str(path) for path in found[:5]) + (" …" if len(found) > 5 else "")
    raise ValueError(f"{given} holds {len(found)} models{f', {said}' if found else ''}; give the file of one")


def _tokenizer(path: Path, given: Path | None) -> Tokenizer:
    """That of the training, where its record is there to say."""
    from ..data.text import Bytes, Subwords
    from ..training import Store

    words: Tokenizer = Bytes() if given is None else Subwords(given)
    record = Store(path.resolve().parent.parent).record(path.stem)
    trained = None if record is None else record.data.get("tokenizer")
    if trained is not None and trained != words.name:
        what = (
            "without --tokenizer" if trained == "bytes" else f"with the file of the tokenizer {trained} (--tokenizer)"
        )
        raise ValueError(f"{path} was trained on tokens of {trained}, not of {words.name}; call this {what}")
    return words


def _model(path: Path, words: Tokenizer, tokenizer: Path | None) -> LanguageModel:
    from ..models import LanguageConfig, LanguageModel
    from ..training.model_file import model_of, read

    held = read(path)
    config = held.configs[0]
    if not isinstance(config, LanguageConfig):
        kind = "no model of this library" if config is None else f"a model of {type(config).__name__}"
        raise ValueError(f"{path} is {kind}, and not a language model; `primaldual train-text` trains one")
    if config.vocabulary != words.vocabulary:
        hint = "the file of another tokenizer" if tokenizer else "its tokenizer (--tokenizer FILE)"
        raise ValueError(
            f"{path} knows {config.vocabulary} tokens, and {words.name} has {words.vocabulary}; give {hint}"
        )
    made = model_of(config, held.weights[0])
    assert isinstance(made, LanguageModel)
    return made


def _check_places(model: LanguageModel, prompt: int, more: int) -> None:
    """Raise where there are no positions for so many tokens; say where they are more than the model has seen."""
    context, tokens = model.config.context, prompt + more - 1
    if tokens <= context:
        return
    if model.positions is not None:
        raise ValueError(
            f"the model has learned positions for {context} tokens, and {prompt} of the prompt and {more} new ones do "
            f"not fit; give --max-tokens {max(context - prompt + 1, 1)}, or a shorter prompt"
        )
    note = f"the model was trained on {context} tokens at once; beyond them it is on its own"
    errors.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)


def _size(count: int) -> str:
    """
    >>> _size(1234), _size(12_345_678)
    ('1.2 kB', '12 MB')
    """
    from ..ops.plan import amount

    return amount(float(count), "B")
