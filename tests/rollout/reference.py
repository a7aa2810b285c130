"""Log-probs by transformers in fp32, what the server's are held against."""

from functools import lru_cache
from pathlib import Path

import torch
import transformers


@lru_cache(maxsize=4)
def model(directory: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.no_grad()
def log_probs(directory: Path, prompt: tuple[int, ...], response: tuple[int, ...], temperature: float) -> list[float]:
    """[len(response)] nats, of the distribution at `temperature`."""
    tokens = torch.tensor([[*prompt, *response]])
    logits = model(directory)(tokens).logits[0, len(prompt) - 1 : -1] / temperature
    return torch.log_softmax(logits, -1).gather(-1, tokens[0, len(prompt) :, None])[:, 0].tolist()


@torch.no_grad()
def greedy(directory: Path, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(int(model(directory)(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])
