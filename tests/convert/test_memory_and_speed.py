"""Some 2 GB: what conversions and the trainer's start take in memory does not grow with the model."""

import json
import subprocess
import sys

import pytest

from tests.convert.conversions import hashes
from tests.convert.large_model import write_large_model
from tests.ranks import REPOSITORY

ALLOWED = 1 << 30
"""What a process may hold beside 1.3 times the largest layer (and the parameters of its rank): Python, torch,
Megatron."""


def measured(*arguments) -> dict:
    command = [sys.executable, "tests/convert/measured.py", *map(str, arguments)]
    done = subprocess.run(command, cwd=REPOSITORY, timeout=240, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_memory_is_bounded_by_a_layer(tmp_path, capsys):
    sizes = write_large_model(
        tmp_path / "hf", hidden_size=1024, moe_intermediate_size=512, num_experts=32, num_hidden_layers=18,
        vocab_size=32000,
    )  # fmt: skip
    assert sizes["total"] > 1.9e9 > 15 * sizes["layer"]
    bound = 1.3 * sizes["layer"] + ALLOWED
    runs = {
        "load": measured("load", tmp_path / "hf"),
        "to_megatron": measured("to_megatron", tmp_path / "hf", tmp_path / "megatron"),
        "to_hf": measured("to_hf", tmp_path / "megatron", tmp_path / "back"),
    }
    with capsys.disabled():
        for name, run in runs.items():
            peak, allowed = run["peak"] / 2**20, (bound + run["held"]) / 2**20
            speed = f"{sizes['total'] / 1e9:.2f} GB in {run['seconds']:.1f} s"
            print(f"\n{name}: {speed}, peak {peak:.0f} MiB of {allowed:.0f} MiB", end="")
    for name, run in runs.items():
        assert run["peak"] - run["held"] < bound, (name, run)
    assert hashes(tmp_path / "back") == hashes(tmp_path / "hf")
