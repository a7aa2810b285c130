"""What every loss of the registry must hold: splits, context parallelism, precision, bounds, and its own formula."""

import ast
import dataclasses
import inspect
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gspo_megatron.algorithm import group_losses, losses, sequence_losses, token_losses
from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import LOSSES, check_finite, from_lists, reduce_metrics
from gspo_megatron.algorithm_config import GROUP_LOSSES, ROLLOUT_ANCHORED_LOSSES, TOKEN_ADVANTAGE_LOSSES
from tests.algorithm.loss_cases import (
    assert_parts_of,
    context_parallel_batches,
    evaluate,
    flat,
    make_batch,
    random_sequences,
    run_ranks,
)

NAMES = list(LOSSES)
AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")
TOKEN_LOSSES = [n for n in NAMES if n not in ("gspo", "gspo_token") and hasattr(LOSSES[n][0], "aggregation")]
CHOICES = [(name, None) for name in NAMES] + [(name, choice) for name in TOKEN_LOSSES for choice in AGGREGATIONS]


def config_of(name, aggregation=None):
    """The defaults, with the clip range of sequence ratios as wide as that of the random batches."""
    config = LOSSES[name][0]()
    if name in ("gspo", "gspo_token", "luspo"):
        config = dataclasses.replace(config, clip_low=0.01, clip_high=0.012)
    if name == "vespo":
        config = dataclasses.replace(config, rollout_correction=True)
    return config if aggregation is None else dataclasses.replace(config, aggregation=aggregation)


def groups_of(sequences):
    return [[s for s in sequences if s["group"] == group] for group in sorted({s["group"] for s in sequences})]


@pytest.mark.parametrize("name, aggregation", CHOICES)
def test_micro_batches_add_up(name, aggregation):
    sequences, config = random_sequences(3, num_sequences=8, width=0.3, gap=0.1), config_of(name, aggregation)
    loss, gradient = evaluate(name, config, make_batch(sequences))
    metrics = reduce_metrics(LOSSES[name][1](config, make_batch(sequences)).metrics)
    parts = groups_of(sequences) if name in GROUP_LOSSES else [sequences[:1], sequences[1:2], sequences[2:]]
    batches = [make_batch(part) for part in parts]
    outs = [LOSSES[name][1](config, batch) for batch in batches]
    count, sums = sum(out.count for out in outs), {}
    for out in outs:
        sums = add_metrics(sums, out.metrics)
    gradients = [torch.autograd.grad(o.loss_sum / count, b.log_probs)[0] for o, b in zip(outs, batches, strict=True)]
    assert float(sum(out.loss_sum.detach() for out in outs) / count) == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(torch.cat(gradients), gradient, rtol=1e-12, atol=1e-15)
    assert reduce_metrics(sums) == pytest.approx(metrics, rel=1e-12)


@pytest.mark.parametrize("name, aggregation", CHOICES)
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_parallel_equals_whole(name, aggregation, num_ranks):
    """Token t on rank t mod R: short sequences leave some ranks without any token of theirs."""
    sequences, config = random_sequences(num_ranks, width=0.3, gap=0.1), config_of(name, aggregation)
    loss, gradient = evaluate(name, config, make_batch(sequences))
    metrics = reduce_metrics(LOSSES[name][1](config, make_batch(sequences)).metrics)
    batches = context_parallel_batches(sequences, num_ranks, lambda t, length: t % num_ranks)
    cp_loss, cp_gradients, cp_metrics = run_ranks(name, config, batches)
    assert cp_loss == pytest.approx(loss, rel=1e-12)
    assert cp_metrics == pytest.approx(metrics, rel=1e-12)
    assert_parts_of(gradient, sequences, batches, cp_gradients)


def test_prefix_sums_of_zigzag_pieces():
    """Rank r of 2 holds pieces r and 3 - r of 4, as Megatron cuts a sequence."""
    sequences = random_sequences(5, num_sequences=3)
    for s in sequences:
        for key in ("new", "old", "mask", "rollout"):
            s[key] = (s[key] * 8)[:8]
    whole = make_batch(sequences)
    values = torch.stack([whole.log_probs.detach(), whole.mask], dim=1)
    expected = torch.cat([values[8 * k : 8 * k + 8].cumsum(0) for k in range(3)])
    torch.testing.assert_close(whole.sequence_prefix_sums(values), expected)
    for rank in (0, 1):
        mine = [t for t in range(24) if t % 8 // 2 in (rank, 3 - rank)]
        batch = make_batch([{k: v[0:4] if isinstance(v, list) else v for k, v in s.items()} for s in sequences])
        batch.token_chunk, batch.num_chunks = torch.tensor([rank, rank, 3 - rank, 3 - rank] * 3), 4
        # the other rank's part of the sums, as an all-reduce would bring it
        columns = torch.zeros(24, 4, 3, dtype=torch.float64)
        columns[torch.arange(24), torch.arange(24) % 8 // 2] = torch.cat([values, values.new_ones(24, 1)], 1)
        totals = columns.view(3, 8, 12).sum(1)
        batch.sequence_sums = lambda local, totals=totals: totals
        torch.testing.assert_close(batch.sequence_prefix_sums(values[mine]), expected[mine])


def test_a_prefix_over_ranks_of_unknown_order_is_refused():
    batch = make_batch(random_sequences(0))
    batch.sequence_sums = lambda values: 2 * values.new_ones(batch.num_sequences, values.shape[1])
    with pytest.raises(ValueError, match="in which order: give token_chunk"):
        LOSSES["ctpo"][1](config_of("ctpo"), batch)


TRUE_GRADIENTS = ["gspo", "luspo", "gmpo", "fspo", "grpo", "dcpo", "sapo", "cfpo", "pspo", "real"]
"""Losses whose gradient is the derivative of their value: no stop-gradient but the clip."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", TRUE_GRADIENTS)
def test_the_gradient_is_that_of_the_value(name, seed):
    sequences, config = random_sequences(seed, num_sequences=4, width=0.4), config_of(name)
    if name == "gspo" and seed == 2:
        config = dataclasses.replace(config, log_ratio="sum")
    batch = make_batch(sequences)
    _, gradient = evaluate(name, config, batch)
    new = batch.log_probs.detach()
    for t in range(len(new)):
        values = []
        for step in (1e-6, -1e-6):
            batch.log_probs = new.clone()
            batch.log_probs[t] += step
            batch.log_probs.requires_grad_()
            values.append(evaluate(name, config, batch)[0])
        assert float(gradient[t]) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-6, abs=1e-8)


def term(name, new, old, adv):
    """(value, slope) of one token, of the two losses that the vectors don't have, in plain Python."""
    ratio = math.exp(new - old)
    if name == "aspo":
        kept = ratio <= 1.2 if adv > 0 else ratio >= 0.8
        weight = (1 / ratio if adv > 0 else ratio) * kept
        return weight * adv, weight * adv
    probability = math.exp(old)
    low = 0.5 + 0.5 * math.sqrt(max(1 - 4 * 0.16 / probability, 0))
    high = min(0.5 + 0.5 * math.sqrt(1 + 4 * 0.2 / probability), 10)
    bounded = min(max(ratio, low), high)
    return min(ratio * adv, bounded * adv), ratio * adv if ratio * adv <= bounded * adv else 0.0


@pytest.mark.parametrize("name", ["aspo", "dcpo"])
@pytest.mark.parametrize("seed", range(4))
def test_formula(name, seed):
    sequences = random_sequences(seed, num_sequences=6, width=0.9)
    sequences[0]["old"][0], sequences[0]["new"][0], sequences[0]["mask"][0] = -9.0, -6.0, 1
    expected, gradient = 0.0, []
    for s in sequences:
        length, terms = max(sum(s["mask"]), 1), []
        for new, old, mask in zip(s["new"], s["old"], s["mask"], strict=True):
            value, slope = term(name, new, old, s["adv"]) if mask else (0.0, 0.0)
            terms.append(-slope / length / len(sequences))
            expected -= value / length / len(sequences)
        gradient.append(terms)
    loss, found = evaluate(name, LOSSES[name][0](), make_batch(sequences))
    assert loss == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(found, flat(gradient), rtol=1e-12, atol=1e-15)


def test_the_cap_of_aspo_bounds_the_weight_and_keeps_the_gradient():
    batch = from_lists([[-3.0]], [[-1.0]], [[1]], [1.0], [0])
    assert evaluate("aspo", LOSSES["aspo"][0](weight_cap=3.0), batch)[1].item() == pytest.approx(-3.0)
    assert evaluate("aspo", LOSSES["aspo"][0](), batch)[1].item() == pytest.approx(-math.exp(2.0))


def on_policy(name, **settings):
    return evaluate(name, LOSSES[name][0](**settings), make_batch(random_sequences(11, width=0.0)))[1]


def test_on_policy_gradients_are_the_published_identities():
    sequences = random_sequences(11, width=0.0)
    mean = on_policy("gspo")
    for name in ("gspo_token", "grpo", "sapo", "cfpo", "gmpo", "dcpo", "aspo"):
        torch.testing.assert_close(on_policy(name), mean, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(on_policy("pspo", alpha=0.3), 0.7 * mean, rtol=1e-12, atol=1e-15)
    lengths = torch.tensor([sum(s["mask"]) for s in sequences for _ in s["new"]], dtype=torch.float64)
    torch.testing.assert_close(on_policy("luspo"), lengths * mean, rtol=1e-12, atol=1e-15)
    for name in ("fspo", "minirl"):
        torch.testing.assert_close(on_policy(name), lengths * mean, rtol=1e-12, atol=1e-15)
    by_token = on_policy("grpo", aggregation="token-mean")
    for name in ("cispo", "dppo_tv", "ctpo", "vespo"):
        torch.testing.assert_close(on_policy(name), by_token, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [30.0, 1000.0])
def test_huge_log_ratios_stay_finite(name, dtype, size):
    for adv in (1.0, -1.0, 0.0):
        for new, old in ((-size, -0.1), (-0.1, -size)):
            batch = from_lists([[new, -1.0]], [[old, -1.0]], [[1, 1]], [adv], [0], [[old, -1.0]])
            for field in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages"):
                setattr(batch, field, getattr(batch, field).detach().to(dtype))
            batch.log_probs.requires_grad_()
            loss, gradient = evaluate(name, LOSSES[name][0](), batch)
            assert math.isfinite(loss) and torch.isfinite(gradient).all()
            assert all(map(math.isfinite, reduce_metrics(LOSSES[name][1](LOSSES[name][0](), batch).metrics).values()))


@pytest.mark.parametrize("name", NAMES)
def test_float32_follows_float64(name):
    sequences = random_sequences(7, num_sequences=40, width=2e-3, longest=200, gap=1e-3)
    config, batch = LOSSES[name][0](), make_batch(sequences)
    loss, gradient = evaluate(name, config, batch)
    for field in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages"):
        setattr(batch, field, getattr(batch, field).detach().float())
    batch.log_probs.requires_grad_()
    loss32, gradient32 = evaluate(name, config, batch)
    assert gradient32.dtype == torch.float32
    assert loss32 == pytest.approx(loss, rel=2e-5, abs=1e-6)
    torch.testing.assert_close(gradient32.double(), gradient, rtol=2e-5, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_masked_infinities_and_empty_sequences_are_harmless(name):
    clean = [
        {"new": [-1.0, -0.5], "old": [-1.01, -0.5], "mask": [1, 1], "adv": 0.7, "group": 0, "rollout": [-1.0, -0.5]},
        {"new": [-1.0], "old": [-1.0], "mask": [0], "adv": -5.0, "group": 0, "rollout": [-1.0]},
        {"new": [], "old": [], "mask": [], "adv": 5.0, "group": 1, "rollout": []},
    ]
    dirty = [{key: list(v) if isinstance(v, list) else v for key, v in s.items()} for s in clean]
    for key in ("new", "old", "rollout"):
        dirty[0][key] += [-math.inf, math.nan]
        dirty[1][key] = [-math.inf]
    dirty[0]["mask"] += [0, 0]
    loss, gradient = evaluate(name, LOSSES[name][0](), make_batch(clean))
    batch = make_batch(dirty)
    check_finite(batch)
    dirty_loss, dirty_gradient = evaluate(name, LOSSES[name][0](), batch)
    assert dirty_loss == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(dirty_gradient, torch.cat([gradient[:2], torch.zeros(3, dtype=torch.float64)]))


@pytest.mark.parametrize("name", NAMES)
def test_a_micro_batch_of_nothing(name):
    out = LOSSES[name][1](LOSSES[name][0](), from_lists([], [], [], [], [], []))
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0 and float(out.count) == 0 and reduce_metrics(out.metrics) == {}


@pytest.mark.parametrize("name", NAMES)
def test_advantages_of_zero_teach_nothing(name):
    sequences = random_sequences(1, width=0.3, gap=0.1)
    for s in sequences:
        s["adv"] = 0.0
    assert not evaluate(name, config_of(name), make_batch(sequences))[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_token_advantages(name):
    """Taken where the configuration says so, and then equal ones are as good as one a sequence."""
    sequences, config = random_sequences(4, width=0.3, gap=0.1), config_of(name)
    expected = evaluate(name, config, make_batch(sequences))
    for s in sequences:
        s["adv"] = [s["adv"]] * len(s["new"])
    if name not in TOKEN_ADVANTAGE_LOSSES:
        with pytest.raises(ValueError, match=f"loss.name={name} takes one advantage a sequence"):
            evaluate(name, config, make_batch(sequences))
        return
    loss, gradient = evaluate(name, config, make_batch(sequences))
    assert loss == pytest.approx(expected[0], rel=1e-12)
    torch.testing.assert_close(gradient, expected[1], rtol=1e-12, atol=1e-15)


def test_as_many_tokens_as_sequences_are_no_token_advantages():
    """Lengths 0 and 2: two tokens and two sequences, so that the size alone does not tell."""
    lists = [[], [-1.0, -1.0]]
    one_each = from_lists(lists, lists, [[], [1, 1]], [5.0, 1.0], [0, 0])
    a_token = from_lists(lists, lists, [[], [1, 1]], [[], [5.0, 1.0]], [0, 0])
    assert evaluate("grpo", LOSSES["grpo"][0](), one_each)[0] == pytest.approx(-0.5)
    assert evaluate("grpo", LOSSES["grpo"][0](), a_token)[0] == pytest.approx(-1.5)


@pytest.mark.parametrize("name", [*sorted(ROLLOUT_ANCHORED_LOSSES), "vespo"])
def test_losses_against_the_rollout_policy_need_its_log_probs(name):
    batch = make_batch(random_sequences(0))
    batch.rollout_log_probs = None
    with pytest.raises(ValueError, match="needs the rollout engine's log-probs"):
        LOSSES[name][1](config_of(name), batch)


def test_vespo_with_the_correction_has_the_rollout_policy_below_its_weight():
    sequences = random_sequences(9, width=0.2, gap=0.2)
    corrected = evaluate("vespo", config_of("vespo"), make_batch(sequences))
    for s in sequences:
        s["old"] = s["rollout"]
    plain = evaluate("vespo", LOSSES["vespo"][0](), make_batch(sequences))
    assert corrected[0] == pytest.approx(plain[0], rel=1e-12)
    torch.testing.assert_close(corrected[1], plain[1])


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="loss.aggregation=sum: use seq-mean-token-mean, token-mean or seq-"):
        evaluate("grpo", LOSSES["grpo"][0](aggregation="sum"), make_batch(random_sequences(0)))


def test_gspo_of_its_guards():
    """What the guards refuse is computed once they are off: the token mean, and the plain importance weight."""
    new, old = [[-1.0], [-1.0, -1.1, -1.2]], [[-1.0], [-1.1, -1.2, -1.3]]
    batch = from_lists(new, old, [[1], [1, 1, 1]], [1.0, -1.0], [0, 0])
    config = LOSSES["gspo"][0](clip_low=0.5, clip_high=0.5, aggregation="token-mean", i_know_what_i_do=("token_mean",))
    assert evaluate("gspo", config, batch)[0] == pytest.approx((-1 + 3 * math.exp(0.1)) / 4)
    config = LOSSES["gspo"][0](clip_low=0.5, clip_high=0.5, log_ratio="sum")
    loss, gradient = evaluate("gspo", config, batch)
    assert loss == pytest.approx((-1 + math.exp(0.3)) / 2)
    torch.testing.assert_close(gradient, flat([[-0.5], [math.exp(0.3) / 2] * 3]))


def test_a_loss_is_one_function_of_at_most_40_lines_with_its_source():
    for module in (losses, sequence_losses, token_losses, group_losses):
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.FunctionDef):
                assert node.end_lineno - node.lineno < 40, node.name
    for name, (_, function) in LOSSES.items():
        assert "arXiv" in function.__doc__ or "Eq. 13-17" in function.__doc__, name
    assert len({function for _, function in LOSSES.values()}) == len(LOSSES)


def test_the_page_is_what_its_script_writes():
    """The table; the picture is drawn by the same script."""
    docs = Path(__file__).parents[2] / "docs"
    command = [sys.executable, docs / "make_algorithms.py", "--check"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert answer.returncode == 0, answer.stderr
    page = (docs / "algorithms.md").read_text()
    assert [name for name in NAMES if f"| `{name}` |" not in page] == [] and "(loss_weights.png)" in page
