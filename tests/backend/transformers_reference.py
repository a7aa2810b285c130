"""Log-probs and gradients by transformers in fp32, by the names that are in the checkpoint's files."""

from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file


def load(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def response_log_probs(model, prompt: list[int], response: list[int], temperature: float) -> torch.Tensor:
    """[R] nats, with gradient."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, dim=-1).gather(1, tokens[0, len(prompt) :, None])[:, 0]


def by_file_names(model, directory: Path, of) -> dict[str, torch.Tensor]:
    """`of(parameter)` by the names in the files; transformers joins the experts of a layer into one parameter.

    Checks by the values that every piece is what the file has under that name.
    """
    file, found = load_file(directory / "model.safetensors"), {}
    for name, param in model.named_parameters():
        for piece_name, piece, value in _pieces(name, of(param), param):
            assert torch.equal(value, file[piece_name]), piece_name
            found[piece_name] = piece
    assert found.keys() == file.keys()
    return found


def _pieces(name: str, *tensors: torch.Tensor):
    """(name in the file, the part of each tensor)."""
    if ".experts." not in name:
        yield name, *tensors
        return
    place, kind = name.rsplit(".", 1)
    for expert in range(tensors[0].shape[0]):
        if kind == "down_proj":
            yield f"{place}.{expert}.down_proj.weight", *(tensor[expert] for tensor in tensors)
        else:
            assert kind == "gate_up_proj"
            halves = [tensor[expert].chunk(2) for tensor in tensors]
            for half, part in enumerate(("gate_proj", "up_proj")):
                yield f"{place}.{expert}.{part}.weight", *(pair[half] for pair in halves)


def log_probs_and_gradients(directory: Path, sequences, temperature: float):
    """[R] of every sequence, and the gradient of the mean over sequences of summed log-probs, by file names."""
    model = load(directory)
    log_probs = [response_log_probs(model, prompt, response, temperature) for prompt, response in sequences]
    (sum(values.sum() for values in log_probs) / len(log_probs)).backward()
    gradients = by_file_names(
        model, directory, lambda param: torch.zeros_like(param) if param.grad is None else param.grad
    )
    return [values.detach() for values in log_probs], gradients
