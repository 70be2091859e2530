"""A language model as a task: every token is predicted once, and a figure is what its formula says."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from primaldual.data.text import load
from primaldual.models import LanguageModel, LanguageSizes
from primaldual.models.language_flops import flops
from primaldual.training import Record, Store, TextTask, ensemble, key, text_recipe, train
from primaldual.training.ensemble import Ensemble
from primaldual.training.loop import Training
from training.texts import LICENSE, licence, tiny

CPU = torch.device("cpu")


def task_of(recipe=None, mechanism="softmax"):
    return TextTask.of(licence(), mechanism, recipe or tiny())


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_every_token_but_the_first_is_counted_once(part):
    task = task_of()
    tokens, counted, bytes_ = task.take(task.tensors(part, torch.float64, CPU), slice(None))
    assert tokens.shape[1] == 49 and counted.sum() == bytes_.sum() == licence().parts[part].bytes
    found = torch.cat([row[49 - many :] for row, many in zip(tokens, counted.tolist(), strict=True)])
    assert found.tolist() == licence().of(part)[1:].tolist()
    assert (tokens[1:-1, 0] == tokens[:-2, -1]).all()  # side by side


def test_bits_per_byte_are_those_of_a_direct_computation_in_float64(tmp_path):
    recipe = tiny(dtype="float32")
    task = task_of(recipe, "bn+sh")
    (record,) = train(task, recipe=recipe, folder=tmp_path)
    model = Store(tmp_path).model(record.key).double()
    text = licence().of("test").astype(np.int64)
    bits = 0.0
    for first in range(0, len(text) - 1, 48):
        begin = min(first, len(text) - 49)  # the last window ends where the text ends
        with torch.no_grad():
            scores = model(torch.from_numpy(text[None, begin : begin + 48]))[0]
        log_p = scores - scores.logsumexp(-1, keepdim=True)
        for place in range(first - begin, 48):
            bits -= log_p[place, text[begin + place + 1]].item() / math.log(2)
    assert record.selected.value == pytest.approx(bits / licence().parts["test"].bytes, rel=1e-5)
    assert type(model) is LanguageModel and record.metric == "bits per byte"


def test_a_part_in_many_pieces_is_evaluated_to_the_same_figure(monkeypatch):
    task, recipe = task_of(), tiny(dtype="float32")
    whole = Ensemble(task, recipe, [0, 1], CPU).evaluate("test")
    task.evaluated_at_once = 2
    monkeypatch.setattr(ensemble, "PIECES", 3)
    one = Ensemble(task, recipe, [0, 1], CPU)
    monkeypatch.setattr(one, "_evaluate", None)
    found = one.evaluate("test")
    assert found.dtype == torch.float64 and whole[0] != whole[1]
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=0)


def test_it_learns_real_text_with_two_seeds():
    recipe = tiny(steps=60, batch_size=8, dtype="float32", learning_rate=1e-2, evaluate_every=30)
    records = train(task_of(recipe), recipe=recipe, seeds=[0, 1])
    for record in records:
        assert record.history["loss"][0] > 5.0 > 3.2 > record.history["loss"][-1]
        assert record.last.value < 5.5 < 7.0 < record.history["validation"][0]
    assert records[0].last.value != records[1].last.value


def test_a_killed_run_of_text_goes_on_and_its_record_is_read_again(tmp_path):
    recipe = tiny()
    task = task_of(recipe, "bn+sh")
    (whole,) = train(task, recipe=recipe, seeds=[3])

    def killed(training):
        if training.step == 3:
            raise KeyboardInterrupt

    first = Training(Ensemble(task, recipe, [3], CPU))
    with pytest.raises(KeyboardInterrupt):
        first.run(save=killed, every=0.0)
    second = Training(Ensemble(task, recipe, [3], CPU))
    second.load(*first.state())
    second.run()
    assert second.history[0] == whole.history
    Store(tmp_path).add(whole)
    assert Store(tmp_path).records() == [whole]
    assert Record.from_dict(json.loads(json.dumps(whole.to_dict()))) == whole


def test_members_in_turn_are_each_what_it_is_alone():
    recipe = tiny(steps=3)
    together = train(task_of(recipe), recipe=recipe, seeds=[0, 1])
    alone = [train(task_of(recipe), recipe=recipe, seeds=[seed])[0] for seed in (0, 1)]
    for one, other in zip(together, alone, strict=True):
        assert one.history["validation"] == pytest.approx(other.history["validation"], rel=1e-12)


def test_a_batch_in_parts_gives_what_it_gives_whole():
    whole, parts = (train(task_of(tiny()), recipe=tiny(accumulate=many))[0] for many in (1, 3))
    assert parts.history["validation"] == pytest.approx(whole.history["validation"], rel=1e-10)


def test_a_record_says_what_was_trained_and_how_fast():
    recipe = tiny()
    (record,) = train(task_of(recipe, "sh"), recipe=recipe)
    assert record.data["bytes"] == {part: one.bytes for part, one in licence().parts.items()}
    assert record.data["hash"] == licence().hash and record.data["tokenizer"] == "bytes"
    step, tokens = record.speed["seconds_per_step"], record.speed["tokens_per_second"]
    assert tokens == pytest.approx(4 * 48 / step, rel=2e-3)
    assert record.task["flops_per_token"]["training"] == pytest.approx(
        flops(task_of(recipe, "sh").config).training, abs=1
    )


@pytest.mark.parametrize(
    ("name", "pairs"),
    [("softmax", [16 * 17 / 2] * 2), ("sh", [16 * 17 / 2, 2 * (8 * 9 / 2)]), ("bn", [16 * 17 / 2] * 2)],
)
def test_flops_are_those_of_the_weights_and_of_the_pairs_that_are_seen(name, pairs):
    config = LanguageSizes(8, 2, 3, 12, 16, "none").config(50, name)
    counted = flops(config)
    assert counted.products == 2 * (3 * (4 * 8 * 8 + 3 * 8 * 12) + 50 * 8)
    assert counted.attention == 3 * sum(4 * 4 * many for many in pairs) / 16
    assert counted.training == 3 * (counted.products + counted.attention + counted.maps)
    assert (counted.maps > 0) == (name != "softmax")
    assert flops(replace(config, positions="rotary")).maps > counted.maps


def test_flops_of_the_products_are_what_torch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    config = LanguageSizes(16, 2, 2, 24, 32).config(256)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        LanguageModel(config)(torch.zeros(1, 32, dtype=torch.long))
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for name, n in counts.items() if "attention" in str(name))
    assert counter.get_total_flops() - attention == 32 * flops(config).products


def test_decay_is_for_matrices_that_are_no_kernels_alone():
    task = task_of(mechanism="qk-norm")
    shapes = {name: p.shape for name, p in task.build().named_parameters()}
    decayed = {name.rpartition("layers.0.")[2] for name, shape in shapes.items() if task.decays(name, shape)}
    mine = {"self_attn.in_proj_weight", "self_attn.out_proj.weight", "gate_and_up.weight", "down.weight"}
    assert {"tokens.weight", *mine} <= decayed and not any("norm" in name or "learned" in name for name in decayed)
    assert not task.decays("layers.0.self_attn.learned.conv_kernel", torch.Size([5, 8]))
    one = Ensemble(task, tiny(), [0], CPU)
    before = {name: x.clone() for name, x in one.weights.named(one.weights.matrix)}
    for _ in range(2):  # the gradient is nothing: what changes, decays
        one.optimizer.step()
    changed = {name for name, x in one.weights.named(one.weights.matrix) if not torch.equal(x, before[name])}
    assert changed == {name for name, shape in shapes.items() if task.decays(name, shape)}


def test_in_bfloat16_it_computes_with_reduced_weights_and_exact_norms():
    recipe = tiny(dtype="bfloat16", steps=2)
    one = Ensemble(task_of(recipe), recipe, [0], CPU)
    dtypes = {name: x.dtype for name, x in one.weights.parameters.items()}
    assert dtypes["norm.weight"] == torch.float32 and dtypes["layers.0.down.weight"] == torch.bfloat16
    exact = Ensemble(task_of(recipe), tiny(dtype="float64", steps=2), [0], CPU)
    torch.testing.assert_close(one.evaluate("test"), exact.evaluate("test"), rtol=2e-3, atol=0)


def test_a_text_that_is_too_short_for_a_window_is_refused():
    with pytest.raises(ValueError, match=r"LICENSE: the validation part has 569 tokens to predict, a window 1024"):
        TextTask(licence())


def test_a_run_is_known_by_its_text_and_its_mechanism(tmp_path):
    recipe = tiny()
    keys = {key(task_of(recipe, name), recipe, 0) for name in ("softmax", "sh")}
    other = tmp_path / "other.txt"
    other.write_bytes(LICENSE.read_bytes()[::-1])
    keys.add(key(TextTask.of(load(other, cache_dir=tmp_path), "sh", recipe), recipe, 0))
    same = tmp_path / "same.txt"
    same.write_bytes(LICENSE.read_bytes())
    keys.add(key(TextTask.of(load(same, cache_dir=tmp_path), "sh", recipe), recipe, 0))
    assert len(keys) == 3


def test_an_unknown_size_is_refused_with_those_that_are_known():
    with pytest.raises(
        ValueError, match=r"unknown size 'smal'; did you mean 'small'.*tiny, small, medium, large, xlarge"
    ):
        text_recipe("smal")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["softmax", "bn", "sh", "qk-norm"])
def test_captured_steps_on_a_gpu_are_plain_ones_on_a_cpu(name, full_precision, monkeypatch):
    monkeypatch.setattr(ensemble, "PIECES", 1)
    recipe = tiny(dtype="float32", steps=8)
    found = []
    for device in ("cpu", "cuda"):
        task = task_of(recipe, name)
        task.evaluated_at_once = 4
        found.append(train(task, recipe=recipe, seeds=[0, 1], device=device))
    for plain, captured in zip(*found, strict=True):
        for part in ("loss", "validation"):
            assert captured.history[part] == pytest.approx(plain.history[part], rel=2e-3)
        assert captured.last.value == pytest.approx(plain.last.value, rel=2e-3)
    one = Ensemble(task_of(recipe, name), recipe, [0, 1], torch.device("cuda"))
    for chosen in one.batches.of_epoch(1, [0, 1], one.device)[:2]:
        one.step(chosen.rows)
    assert one.captured


@pytest.mark.gpu
def test_in_bfloat16_on_a_gpu_it_learns():
    recipe = tiny(steps=60, batch_size=8, dtype="bfloat16", learning_rate=1e-2, evaluate_every=30)
    (record,) = train(task_of(recipe, "sh"), recipe=recipe, device="cuda")
    assert record.failure is None and record.history["loss"][-1] < 3.3
