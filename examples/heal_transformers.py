"""Give a trained model of transformers another attention, and heal it by a short training.

    python examples/heal_transformers.py                          # half a minute on a CPU
    python examples/heal_transformers.py --mechanism sink --text my.txt

A small Llama learns the characters of a text with softmax attention. `convert` keeps every weight and puts the
mechanism in place of the attention, which costs; some more steps bring it back. The healed model is saved, loaded with
what the mechanism learned, and continues the text.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from primaldual.integrations.transformers import convert, load

LICENSE = Path(__file__).parent.parent / "LICENSE"
CONTEXT, BATCH = 64, 16


class Losses(NamedTuple):
    """Nats per character of text that was held out."""

    trained: float
    converted: float
    healed: float


def main(mechanism: str = "bn+sh", text: Path = LICENSE, steps: int = 400, heal: int = 100) -> Losses:
    """Train with softmax, convert, heal, save, load, and continue the text."""
    torch.manual_seed(0)
    characters, train, test = read(text)
    config = LlamaConfig(
        vocab_size=len(characters), hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=4 * CONTEXT, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    model = LlamaForCausalLM(config)

    fit(model, train, steps, rate=3e-3)
    trained = loss_of(model, test)
    print(f"softmax, {steps} steps: {trained:.3f} nats per character")

    print(convert(model, mechanism))
    converted = loss_of(model, test)
    print(f"{mechanism}, as converted: {converted:.3f}")

    fit(model, train, heal, rate=1e-3)
    healed = loss_of(model, test)
    print(f"{mechanism}, {heal} more steps: {healed:.3f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        again = load(folder).eval()
    assert abs(loss_of(again, test) - healed) < 1e-5
    prompt = test[None, :CONTEXT]
    found = again.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=CONTEXT, do_sample=False)
    print("…" + "".join(characters[i] for i in found[0, CONTEXT:].tolist()))
    return Losses(trained, converted, healed)


def read(text: Path) -> tuple[list[str], Tensor, Tensor]:
    """The characters of a text, and its tokens: those to train on, and the last tenth."""
    content = text.read_text(encoding="utf-8")
    characters = sorted(set(content))
    place = {character: i for i, character in enumerate(characters)}
    tokens = torch.tensor([place[character] for character in content])
    end = len(tokens) * 9 // 10
    return characters, tokens[:end], tokens[end:]


def fit(model: LlamaForCausalLM, tokens: Tensor, steps: int, rate: float) -> None:
    """So many steps of AdamW on windows of the text, with a rate that falls to nothing."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=max(steps, 1))
    for _ in range(steps):
        starts = torch.randint(len(tokens) - CONTEXT, (BATCH,))
        batch = torch.stack([tokens[s : s + CONTEXT] for s in starts.tolist()])
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss_of(model: LlamaForCausalLM, tokens: Tensor) -> float:
    """The mean over windows that stand side by side."""
    model.eval()
    windows = tokens[: len(tokens) // CONTEXT * CONTEXT].view(-1, CONTEXT)
    return float(model(input_ids=windows, labels=windows).loss)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", default="bn+sh", help="a name of `primaldual mechanisms` with a causal form")
    parser.add_argument("--text", type=Path, default=LICENSE)
    parser.add_argument("--steps", type=int, default=400, help="with softmax")
    parser.add_argument("--heal", type=int, default=100, help="after the conversion")
    main(**vars(parser.parse_args()))
