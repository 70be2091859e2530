"""The paper's settings, set by set."""

from dataclasses import replace

import pytest

from primaldual.paper import mvts, recipe_for
from training.toy import toy

# name: encoder, layers, d_model, d_ff, batch, epochs
PUBLISHED = {
    "EthanolConcentration": ("mvts", 1, 64, 256, 64, 400), "FaceDetection": ("mvts", 3, 128, 256, 64, 400),
    "Handwriting": ("mvts", 1, 128, 256, 64, 400), "Heartbeat": ("mvts", 1, 64, 256, 64, 400),
    "JapaneseVowels": ("mvts", 3, 128, 256, 64, 400), "PEMS-SF": ("flowformer", 2, 512, 2048, 16, 400),
    "SelfRegulationSCP1": ("mvts", 3, 128, 256, 64, 400), "SelfRegulationSCP2": ("flowformer", 2, 512, 2048, 16, 100),
    "SpokenArabicDigits": ("mvts", 3, 64, 256, 64, 400), "UWaveGestureLibrary": ("flowformer", 2, 512, 2048, 16, 100),
    "Libras": ("mvts", 3, 128, 256, 64, 400), "AppliancesEnergy": ("mvts", 3, 128, 512, 64, 100),
    "BenzeneConcentration": ("mvts", 3, 128, 256, 64, 100), "BeijingPM10Quality": ("mvts", 3, 64, 256, 64, 100),
    "BeijingPM25Quality": ("mvts", 3, 128, 256, 64, 100), "LiveFuelMoistureContent": ("mvts", 3, 64, 256, 64, 100),
    "IEEEPPG": ("mvts", 3, 512, 512, 64, 100),
}  # fmt: skip
REGRESSION = list(PUBLISHED)[-6:]


@pytest.mark.parametrize("name", PUBLISHED)
def test_recipes_are_those_of_the_papers_code_bases(name):
    data = replace(toy(regression=name in REGRESSION), name=name)
    recipe = recipe_for(data)
    model = recipe.model
    sizes = (model.encoder, model.layers, model.d_model, model.feedforward, recipe.batch_size, recipe.epochs)
    assert sizes == PUBLISHED[name]
    assert (model.heads, model.dropout, recipe.clip, recipe.learning_rate, recipe.optimizer) == (
        8, 0.1, 4.0, 1e-3, "radam",
    )  # fmt: skip


def test_another_encoder_has_its_own_general_recipe():
    data = toy()
    assert recipe_for(data, "flowformer").model.d_model == 512
    assert recipe_for(replace(data, name="PEMS-SF"), "mvts") == mvts()
    with pytest.raises(ValueError, match="encoder must be one of"):
        recipe_for(data, "lstm")
