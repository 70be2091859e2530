"""What a record says of the machine, and what it does not."""

import json
import re

import pytest
import torch

from primaldual.base.environment import environment, folder_name, without_paths

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("no /usr/local/lib/x.so here", "no … here"),
        (r"no C:\Users\me\x.dll here", "no … here"),
        ("a ratio of 1/2, and TFLOP/s", "a ratio of 1/2, and TFLOP/s"),
        ("first line\nsecond", "first line"),
    ],
)
def test_messages_lose_paths(text, plain):
    assert without_paths(text) == plain


def test_the_environment_is_plain_data_that_names_versions_hardware_and_commit():
    found = environment(CPU)
    assert json.loads(json.dumps(found)) == found
    assert found["torch"] == torch.__version__ and found["threads"] == torch.get_num_threads() and found["device"]
    assert found["commit"] is None or re.fullmatch(r"[0-9a-f]{12}\+?", found["commit"])
    assert folder_name(CPU) == "cpu"
