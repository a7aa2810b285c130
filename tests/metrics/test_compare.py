"""Comparing two runs: what counts as a difference, which step and key is named, and the exit codes."""

import json

import pytest

from gspo_megatron.__main__ import main
from gspo_megatron.compare import compare_runs


@pytest.fixture
def run(tmp_path):
    """A function: name, lines -> directory of a run with these metrics."""

    def write(name, *lines):
        directory = tmp_path / name
        directory.mkdir()
        (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return str(directory)

    return write


def test_equal_runs_whatever_the_clock_says(run, capsys):
    a = run("a", {"step": 0, "loss": 0.5, "time/step_s": 1.0, "tokens/per_s": 10}, {"step": 1, "loss": 0.25})
    b = run("b", {"step": 0, "loss": 0.5 + 1e-6, "time/step_s": 9.0, "tokens/per_s": 99}, {"step": 1, "loss": 0.25})
    assert main(["compare", a, b]) == 0
    output = capsys.readouterr().out
    assert "compared 2 steps" in output and "the runs agree" in output and "loss at step 0" in output
    assert main(["compare", a, b, "--tolerance", "1e-7"]) == 1


def test_the_first_parting_is_named_with_both_values(run, capsys):
    a = run("a", {"step": 0, "loss": 0.5, "grad_norm": 2.0}, {"step": 1, "loss": 0.5, "grad_norm": 2.0})
    b = run("b", {"step": 0, "loss": 0.5, "grad_norm": 2.0}, {"step": 1, "loss": 0.6, "grad_norm": 3.0})
    assert main(["compare", a, b]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "the runs part at step 1:"
    assert lines[2].split() == "step 1 grad_norm: 2.0 and 3.0, difference 0.333".split()
    assert "loss: 0.5 and 0.6" in lines[3]


def test_large_values_are_compared_relatively_and_small_ones_absolutely(run):
    a = run("a", {"step": 0, "large": 1e6, "small": 1e-9})
    b = run("b", {"step": 0, "large": 1e6 + 1, "small": -1e-9})
    found = compare_runs(a, b)
    assert found.equal and found.largest.key == "large" and found.largest.difference == pytest.approx(1e-6)


def test_a_metric_or_steps_that_one_run_lacks(run, capsys):
    a = run("a", {"step": 0, "loss": 0.5, "gspo/ess": 1.0})
    b = run("b", {"step": 0, "loss": 0.5}, {"step": 1, "loss": 0.5})
    assert main(["compare", a, b]) == 1
    output = capsys.readouterr().out
    assert "only run A has gspo/ess" in output and "only run B has 1 more steps" in output


def test_what_can_not_be_compared_is_refused(run, tmp_path, capsys):
    a, later, empty = run("a", {"step": 0, "loss": 1}), run("later", {"step": 7, "loss": 1}), run("empty")
    for other, message in (
        (later, "no step in common: steps 0 to 0 and steps 7 to 7"),
        (empty, "no finished step"),
        (str(tmp_path / "nowhere"), "does not exist"),
    ):
        assert main(["compare", a, other]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["compare", a, a, "--tolerance", "-1"])
