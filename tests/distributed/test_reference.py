"""One rank against an independent reference: transformers' model, and GSPO and Adam written here, in float64."""

from types import SimpleNamespace

import torch

from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators
from tests.distributed.cases import case
from tests.distributed.compare import compare
from tests.distributed.rollout import LOSS, NUM_MINI_BATCHES, NUM_STEPS, OPTIMIZER, load_arrays, make_config
from tests.distributed.test_matrix import LOG_PROBS, RELATIVE

ROUNDED_PARAMETERS = 2e-2
"""Of the change over two steps. The reference does not round its parameters to fp32: a weight of a norm, near 1, is
rounded to 6e-8 in each of eight updates that move it by about 1e-5."""


def hf_tensors(named) -> dict[str, torch.Tensor]:
    """Tensors by the names of checkpoint files: transformers keeps all experts of a layer in two stacked tensors."""
    tensors = {}
    for name, stacked in named.items():
        if name.endswith("experts.gate_up_proj"):
            for expert, both in enumerate(stacked):
                for part, half in zip(("gate_proj", "up_proj"), both.chunk(2), strict=True):
                    tensors[f"{name.removesuffix('gate_up_proj')}{expert}.{part}.weight"] = half
        elif name.endswith("experts.down_proj"):
            for expert, one in enumerate(stacked):
                tensors[f"{name.removesuffix('down_proj')}{expert}.down_proj.weight"] = one
        else:
            tensors[name] = stacked
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def response_log_probs(model, temperature, prompt, response, trained):
    """[R] log-probs of a response, 0 where it is not trained on; sequences one by one, nothing packed or padded."""
    if not len(response):
        return torch.zeros(0, dtype=torch.float64)
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature
    log_probs = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return torch.where(torch.as_tensor(trained), log_probs, 0.0)


def gspo_loss(log_probs, old, trained, advantages):
    """arXiv 2507.18071 Eq. 5-7, the mean over all sequences; one without trained tokens adds 0."""
    losses = []
    for new, before, mask, advantage in zip(log_probs, old, trained, advantages, strict=True):
        length = int(mask.sum())
        if length:
            ratio = ((new - before).sum() / length).exp()
            bounded = ratio.clamp(1 - LOSS.clip_low, 1 + LOSS.clip_high)
            losses.append(-torch.minimum(ratio * advantage, bounded * advantage))
    return torch.stack(losses).sum() / len(log_probs)


def train_reference(runs):
    """The same two steps; a trace with the same fields as Megatron's."""
    ensure_torchvision_operators()
    from transformers import Qwen3MoeForCausalLM

    model = Qwen3MoeForCausalLM.from_pretrained(
        runs.model,
        dtype=torch.float64,
        experts_implementation="eager",  # the grouped kernel knows no float64
    )
    temperature = make_config(runs.model, case(1)).rollout.temperature
    named = dict(model.named_parameters())
    trace = SimpleNamespace(
        log_probs=[], losses=[], gradients=[], grad_norms=[], metrics=[], initial=hf_tensors(named),
        replicas={"one": 0.0}, seconds=0.0, margins=[],
    )  # fmt: skip
    adam = torch.optim.Adam(
        model.parameters(), lr=OPTIMIZER.lr, betas=(OPTIMIZER.beta1, OPTIMIZER.beta2), eps=OPTIMIZER.eps
    )
    for step in range(NUM_STEPS):
        arrays, advantages = load_arrays(runs.rollouts, step)

        def of(sample, arrays=arrays):
            parts = arrays.prompt(sample).tolist(), arrays.response(sample).tolist(), arrays.mask(sample)
            return response_log_probs(model, temperature, *parts)

        with torch.no_grad():
            old = {sample: of(sample) for sample in range(arrays.num_samples)}
        trace.log_probs.append(old)
        size = arrays.num_samples // NUM_MINI_BATCHES
        for first in range(0, arrays.num_samples, size):
            samples = range(first, first + size)
            masks = [torch.as_tensor(arrays.mask(sample)) for sample in samples]
            new, before = [of(sample) for sample in samples], [old[sample] for sample in samples]
            adam.zero_grad(set_to_none=False)
            loss = gspo_loss(new, before, masks, advantages[first : first + size].double())
            loss.backward()
            trace.losses.append(float(loss.detach()))
            trace.margins += [
                abs(float(((a - b).detach().sum() / max(int(mask.sum()), 1)).exp()) - edge)
                for a, b, mask in zip(new, before, masks, strict=True)
                for edge in (1 - LOSS.clip_low, 1 + LOSS.clip_high)
            ]
            trace.gradients.append(hf_tensors({name: param.grad for name, param in named.items()}))
            trace.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.clip_grad)))
            trace.metrics.append({})
            adam.step()
    trace.final = hf_tensors(named)
    return trace


def test_one_rank_equals_transformers_in_float64(runs):
    expected = train_reference(runs)
    # A ratio at an edge of the clip range would be clipped on one side and not on the other by rounding alone.
    assert min(expected.margins) > 2e-5
    expected.metrics = [{"loss_count": 8.0}] * len(expected.losses)
    found = compare(case(1), runs.trace, expected)
    assert found.log_probs <= LOG_PROBS
    assert found.loss <= RELATIVE
    assert found.gradient <= RELATIVE, found.gradient_name
    assert found.grad_norm <= RELATIVE
    assert found.parameters <= ROUNDED_PARAMETERS
