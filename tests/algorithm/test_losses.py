"""Losses against hand-computed values and gradients in float64 (tests/data_files/gspo_vectors.json)."""

import json
import math

import pytest
import torch

from gspo_megatron.algorithm.loss_metrics import add_metrics
from gspo_megatron.algorithm.losses import (
    LOSSES,
    GRPOConfig,
    GSPOConfig,
    GSPOTokenConfig,
    NonFiniteError,
    check_finite,
    from_lists,
    grpo,
    gspo,
    gspo_token,
    reduce_metrics,
)
from gspo_megatron.config import LOSS_CONFIGS
from gspo_megatron.types import SequenceBatch
from tests.algorithm.loss_cases import (
    VECTORS,
    assert_parts_of,
    context_parallel_batches,
    evaluate,
    flat,
    make_batch,
    make_config,
    random_sequences,
    run_ranks,
)

CASES = [case for case in VECTORS["cases"] if case["loss_fn"] in LOSSES]


def test_every_named_loss_is_registered():
    assert {name: config_type for name, (config_type, _) in LOSSES.items()} == LOSS_CONFIGS


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_vector(case):
    config, batch = make_config(case["loss_fn"], case["config"]), make_batch(case["batch"])
    loss, gradient = evaluate(case["loss_fn"], config, batch)
    assert loss == pytest.approx(case["loss"], rel=1e-9, abs=1e-9)
    torch.testing.assert_close(gradient, flat(case["grad"]), rtol=1e-9, atol=1e-9)

    metrics = reduce_metrics(LOSSES[case["loss_fn"]][1](config, batch).metrics)
    if "extra" not in case:
        return
    ratios = case["extra"]["seq_ratio"]
    assert metrics["gspo/ratio_mean"] == pytest.approx(sum(ratios) / len(ratios), rel=1e-9)
    assert metrics["gspo/ratio_min"] == pytest.approx(min(ratios), rel=1e-9)
    assert metrics["gspo/ratio_max"] == pytest.approx(max(ratios), rel=1e-9)
    if "seq_clipfrac" in case["extra"]:
        assert metrics["gspo/clip_fraction_sequences"] == pytest.approx(case["extra"]["seq_clipfrac"])
        assert metrics["gspo/clip_fraction_tokens"] == pytest.approx(case["extra"]["token_clipfrac"])


def uneven4():
    (case,) = [case for case in VECTORS["cases"] if case["name"] == "sapo/uneven4"]
    return case["batch"]


def test_micro_batches_add_up():
    entry = VECTORS["invariance"]["microbatch"]
    config, sequences = make_config("gspo", entry["config"]), uneven4()
    whole = gspo(config, make_batch(sequences))
    assert float(whole.loss_sum.detach() / whole.count) == pytest.approx(entry["global"], rel=1e-9)
    for split in ([1, 3], [3, 1], [2, 2], [1, 1, 1, 1]):
        starts = [sum(split[:k]) for k in range(len(split))]
        outs = [gspo(config, make_batch(sequences[s : s + n])) for s, n in zip(starts, split, strict=True)]
        loss = sum(out.loss_sum for out in outs) / sum(out.count for out in outs)
        assert float(loss.detach()) == pytest.approx(entry["global"], rel=1e-12)
        metrics = {}
        for out in outs:
            metrics = add_metrics(metrics, out.metrics)
        assert reduce_metrics(metrics) == pytest.approx(reduce_metrics(whole.metrics), rel=1e-12)


def test_context_parallel_vector():
    entry = VECTORS["invariance"]["context_parallel"]
    batches = context_parallel_batches([entry["sequence"]], 2, lambda t, length: t * 2 // length)
    loss, _, metrics = run_ranks("gspo", make_config("gspo", entry["config"]), batches)
    assert loss == pytest.approx(entry["full_loss"], rel=1e-12)
    assert metrics["gspo/ratio_mean"] == pytest.approx(entry["full_seq_ratio (right)"], rel=1e-12)


@pytest.mark.parametrize("loss_name, aggregation", [
    ("gspo", "seq-mean-token-mean"), ("gspo_token", "seq-mean-token-mean"),
    ("grpo", "seq-mean-token-mean"), ("grpo", "token-mean"),
])  # fmt: skip
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_context_parallel_equals_whole(loss_name, aggregation, num_ranks):
    sequences = random_sequences(seed=num_ranks)
    config = LOSSES[loss_name][0](clip_low=0.01, clip_high=0.012, aggregation=aggregation)
    loss, gradient = evaluate(loss_name, config, make_batch(sequences))
    metrics = reduce_metrics(LOSSES[loss_name][1](config, make_batch(sequences)).metrics)
    # Token t on rank t mod R: short sequences leave some ranks without any token of theirs.
    batches = context_parallel_batches(sequences, num_ranks, lambda t, length: t % num_ranks)
    cp_loss, cp_gradients, cp_metrics = run_ranks(loss_name, config, batches)
    assert cp_loss == pytest.approx(loss, rel=1e-12)
    assert cp_metrics == pytest.approx(metrics, rel=1e-12)
    assert_parts_of(gradient, sequences, batches, cp_gradients)


def test_softmax_chain():
    entry = VECTORS["softmax_chain"]
    logits = torch.tensor(entry["logits"], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(-1).gather(1, torch.tensor(entry["tokens"])[:, None])[:, 0]
    log_probs.retain_grad()
    batch = from_lists([entry["logp"]], [entry["old"]], [[1, 1]], [entry["adv"]], [0])
    batch.log_probs = log_probs
    out = gspo(make_config("gspo", entry["config"]), batch)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == pytest.approx(entry["loss"], rel=1e-9)
    torch.testing.assert_close(log_probs.grad, torch.tensor(entry["dlogp"], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(logits.grad, torch.tensor(entry["dlogits"], dtype=torch.float64), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_and_gspo_token_have_one_gradient(seed):
    assert VECTORS["identities"]["gspo==gspo_token grad (scalar adv)"]
    sequences = random_sequences(seed)
    of_gspo = evaluate("gspo", GSPOConfig(clip_low=0.01, clip_high=0.01), make_batch(sequences))
    for sequence in sequences:
        sequence["adv"] = [sequence["adv"]] * len(sequence["new"])
    of_token = evaluate("gspo_token", GSPOTokenConfig(clip_low=0.01, clip_high=0.01), make_batch(sequences))
    assert of_gspo[0] == pytest.approx(of_token[0], rel=1e-12)
    torch.testing.assert_close(of_gspo[1], of_token[1], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_and_grpo_part_after_the_first_mini_batch(seed):
    """At pi_theta = pi_old both have gradient -A_i / (N L_i); one step away they differ."""
    sequences = random_sequences(seed, width=0.0)
    (loss, of_gspo), (_, of_grpo) = (
        evaluate(n, c(), make_batch(sequences)) for n, c in [("gspo", GSPOConfig), ("grpo", GRPOConfig)]
    )
    torch.testing.assert_close(of_gspo, of_grpo, rtol=1e-14, atol=1e-16)
    trained = [s for s in sequences if sum(s["mask"])]
    assert loss == pytest.approx(-sum(s["adv"] for s in trained) / len(sequences))
    expected = [[-s["adv"] / len(sequences) / max(sum(s["mask"]), 1) * m for m in s["mask"]] for s in sequences]
    torch.testing.assert_close(of_gspo, flat(expected), rtol=1e-12, atol=1e-15)

    sequences = random_sequences(seed, width=0.05)
    wide = {"clip_low": 0.2, "clip_high": 0.2}
    of_gspo = evaluate("gspo", GSPOConfig(**wide), make_batch(sequences))[1]
    of_grpo = evaluate("grpo", GRPOConfig(**wide), make_batch(sequences))[1]
    assert not torch.allclose(of_gspo, of_grpo, rtol=1e-3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss_name", ["gspo", "gspo_token", "grpo"])
def test_gradient_is_the_numerical_one(loss_name, seed):
    """Central differences of an independent implementation of Eq. 5 and Eq. 3 in plain Python."""
    sequences = random_sequences(seed, num_sequences=3, longest=5)
    config = LOSSES[loss_name][0](clip_low=0.3, clip_high=0.3)

    def plain(new):
        total, start = 0.0, 0
        for s in sequences:
            part = new[start : start + len(s["new"])]
            start += len(part)
            logs = [n - o for n, o, m in zip(part, s["old"], s["mask"], strict=True) if m]
            if logs and loss_name == "grpo":
                total -= sum(math.exp(value) * s["adv"] for value in logs) / len(logs)
            elif logs:
                total -= math.exp(sum(logs) / len(logs)) * s["adv"]
        return total / len(sequences)

    new = [value for s in sequences for value in s["new"]]
    loss, gradient = evaluate(loss_name, config, make_batch(sequences))
    assert loss == pytest.approx(plain(new), rel=1e-12)
    for t in range(len(new)):
        high, low = list(new), list(new)
        high[t] += 1e-6
        low[t] -= 1e-6
        assert float(gradient[t]) == pytest.approx((plain(high) - plain(low)) / 2e-6, abs=1e-8)


def as_float32(batch):
    return SequenceBatch(
        log_probs=batch.log_probs.detach().float().requires_grad_(),
        old_log_probs=batch.old_log_probs.float(),
        rollout_log_probs=None,
        advantages=batch.advantages.float(),
        mask=batch.mask.bool(),
        cu_seqlens=batch.cu_seqlens.int(),
        groups=batch.groups,
    )


@pytest.mark.parametrize("loss_name", ["gspo", "gspo_token", "grpo"])
def test_float32_follows_float64(loss_name):
    """Drift as large as the paper's clip range, 40 long sequences: same clip decisions, gradients within 1e-5."""
    sequences = random_sequences(seed=7, num_sequences=40, width=2e-3, longest=400)
    config = LOSSES[loss_name][0]()
    batch = make_batch(sequences)
    loss, gradient = evaluate(loss_name, config, batch)
    loss32, gradient32 = evaluate(loss_name, config, as_float32(batch))
    assert gradient32.dtype == torch.float32
    assert loss32 == pytest.approx(loss, rel=1e-5)
    assert torch.equal(gradient32 == 0, gradient == 0)
    torch.testing.assert_close(gradient32.double(), gradient, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("loss_name", ["gspo", "gspo_token", "grpo"])
def test_masked_infinities_and_empty_sequences_are_harmless(loss_name):
    clean = [
        {"new": [-1.0, -0.5], "old": [-1.01, -0.5], "mask": [1, 1], "adv": 0.7, "group": 0, "rollout": [-1, -1]},
        {"new": [-1.0], "old": [-1.0], "mask": [0], "adv": 5.0, "group": 0, "rollout": [-1]},
        {"new": [], "old": [], "mask": [], "adv": 5.0, "group": 0, "rollout": []},
    ]
    dirty = json.loads(json.dumps(clean))
    for key in ("new", "old", "rollout"):
        dirty[0][key] += [-math.inf, math.nan]
        dirty[1][key] = [-math.inf]
    dirty[0]["mask"] += [0, 0]
    config = LOSSES[loss_name][0]()
    loss, gradient = evaluate(loss_name, config, make_batch(clean))
    batch = make_batch(dirty)
    dirty_loss, dirty_gradient = evaluate(loss_name, config, batch)
    check_finite(batch)
    assert dirty_loss == pytest.approx(loss, rel=1e-14)
    torch.testing.assert_close(dirty_gradient, torch.cat([gradient[:2], torch.zeros(3, dtype=torch.float64)]))
    out = LOSSES[loss_name][1](config, batch)
    assert float(out.count) == 3 and float(out.metrics["num_trained_sequences"]) == 1
    assert reduce_metrics(out.metrics)["gspo/ratio_mean"] == pytest.approx(
        math.exp(0.005), rel=1e-12
    )  # the empty sequences' ratio of 1 does not pull the mean


def test_micro_batch_of_nothing():
    batch = from_lists([], [], [], [], [])
    out = gspo(GSPOConfig(), batch)
    out.loss_sum.backward()
    assert float(out.loss_sum.detach()) == 0 and float(out.count) == 0 and batch.log_probs.grad.shape == (0,)
    assert reduce_metrics(out.metrics) == {}
    full = gspo(GSPOConfig(), make_batch(random_sequences(0)))
    assert reduce_metrics(add_metrics(full.metrics, out.metrics)) == reduce_metrics(full.metrics)


@pytest.mark.parametrize("quantity", ["log_probs", "old_log_probs", "rollout_log_probs", "advantages"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_are_named(quantity, value):
    sequences = [
        {"new": [-1.0] * 3, "old": [-1.0] * 3, "mask": [0, 1, 1], "adv": 1.0, "group": 0, "rollout": [-1.0] * 3}
        for _ in range(3)
    ]
    batch = make_batch(sequences)
    check_finite(batch)
    with torch.no_grad():
        getattr(batch, quantity)[1 if quantity == "advantages" else 4] = value
    with pytest.raises(NonFiniteError, match=f"^{quantity} of sequence 1 ") as error:
        check_finite(batch)
    assert error.value.sequence == 1 and error.value.quantity == quantity


@pytest.mark.parametrize("field", ["log_probs", "old_log_probs", "advantages"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_refused(field, dtype):
    for _, loss in LOSSES.values():
        batch = make_batch(random_sequences(0))
        setattr(batch, field, getattr(batch, field).to(dtype))
        with pytest.raises(ValueError, match=f"batch.{field} is {dtype}.*float32"):
            loss(GSPOConfig() if loss is not grpo else GRPOConfig(), batch)


def test_what_is_not_gspo_is_refused():
    with pytest.raises(ValueError, match="loss.aggregation=token-mean"):
        gspo(GSPOConfig(aggregation="token-mean"), make_batch(random_sequences(0)))
    batch = from_lists([[-1.0, -1.0]], [[-1.0, -1.0]], [[1, 1]], [[1.0, 2.0]], [0])
    with pytest.raises(ValueError, match="loss.name=gspo_token"):
        gspo(GSPOConfig(), batch)
    assert float(gspo_token(GSPOTokenConfig(), batch).loss_sum.detach()) == pytest.approx(-1.5)


def test_token_mean_weighs_by_length():
    sequences = [
        {"new": [-1.0], "old": [-1.0], "mask": [1], "adv": 1.0, "group": 0, "rollout": [-1.0]},
        {"new": [-1.0] * 3, "old": [-1.0] * 3, "mask": [1] * 3, "adv": -1.0, "group": 0, "rollout": [-1.0] * 3},
    ]
    assert evaluate("grpo", GRPOConfig(), make_batch(sequences))[0] == pytest.approx(0.0)
    assert evaluate("grpo", GRPOConfig(aggregation="token-mean"), make_batch(sequences))[0] == pytest.approx(0.5)


def test_kl_and_sample_size_use_token_ratios():
    """Ratios 2 and 1/2 in one sequence: the sequence ratio is 1, the token metrics are not those of pi = pi_old."""
    log2 = math.log(2)
    metrics = reduce_metrics(gspo(GSPOConfig(), from_lists([[log2, -log2]], [[0, 0]], [[1, 1]], [1.0], [0])).metrics)
    assert metrics["gspo/ratio_mean"] == pytest.approx(1.0)
    assert metrics["gspo/kl_k1"] == pytest.approx(0.0)
    assert metrics["gspo/kl_k3"] == pytest.approx((2 - 1 - log2 + 0.5 - 1 + log2) / 2)
    assert metrics["gspo/ess"] == pytest.approx(2.5**2 / (2 * 4.25))
    assert metrics["gspo/log_ratio_std"] == pytest.approx(0.0)
