"""What log-likelihoods and the GSPO loss cost on top of a plain forward and backward pass, and what memory they take.

    python benchmarks/log_likelihood.py [--tokens 4096] [--vocab 32768] [--repeats 5]

Three passes of the same model over the same packed tokens, in turn, so that a drift of the machine's speed hits all
alike:
`body` ends in a sum over hidden states (no output layer), `plain` in Megatron's own output layer and cross entropy over
all tokens, `ours` in log-probs of the response tokens and the GSPO loss. The floor of the output layer is three matrix
products a token (logits, gradient of hidden states, gradient of the weight); ours computes logits twice, to hold no
[T, V], but only for response tokens.
"""

import argparse
import os
import socket
import statistics
import subprocess
import sys
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch

from gspo_megatron.notices import hide_known_notices

hide_known_notices(on_gpu=torch.cuda.is_available())

from megatron.core import tensor_parallel  # noqa: E402

from gspo_megatron.algorithm.losses import LOSSES  # noqa: E402
from gspo_megatron.algorithm.packing import pack  # noqa: E402
from gspo_megatron.backend.log_likelihood import VocabParallelLogProbs  # noqa: E402
from gspo_megatron.backend.mesh import Mesh  # noqa: E402
from gspo_megatron.backend.model import build_model  # noqa: E402
from gspo_megatron.backend.policy import shard_of  # noqa: E402
from gspo_megatron.config import Config, GSPOConfig, TrainConfig  # noqa: E402
from gspo_megatron.types import SequenceBatch  # noqa: E402

NUM_SEQUENCES, PROMPT_SHARE = 8, 4


def model_config(vocab: int) -> dict:
    """A dense Qwen3 of 8 layers: the output layer is a larger share of it than of any model people train."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 1536, "vocab_size": vocab,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip


def passes(model, batch, mesh: Mesh) -> dict:
    """Name -> function that runs one forward and backward pass."""
    shard = shard_of(batch, mesh.context, mesh.device)
    head, weight = model.output_layer, model.output_layer.weight

    def body():
        keep, model.post_process = model.post_process, False
        hidden = model(
            shard.input_ids, shard.position_ids, None, labels=shard.labels, loss_mask=shard.loss_mask,
            packed_seq_params=shard.packed_seq_params,
        )  # fmt: skip
        model.post_process = keep
        return hidden

    def only_body():
        body().sum().backward()

    def plain():
        logits = tensor_parallel.ColumnParallelLinear.forward(head, body())[0]
        tensor_parallel.vocab_parallel_cross_entropy(logits.float(), batch.labels[:, None]).sum().backward()

    def ours():
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(body())
        log_probs = head(hidden, batch.labels, batch.loss_mask, None, model.pg_collection.tp)
        n = batch.num_tokens
        sequences = SequenceBatch(
            log_probs=log_probs[:n], old_log_probs=log_probs.detach()[:n], rollout_log_probs=None,
            advantages=torch.linspace(-1, 1, batch.num_sequences), mask=batch.loss_mask[:n],
            cu_seqlens=batch.cu_seqlens[: batch.num_sequences + 1], groups=torch.zeros(batch.num_sequences),
        )  # fmt: skip
        LOSSES["gspo"][1](GSPOConfig(), sequences).loss_sum.backward()

    return {"body": only_body, "plain": plain, "ours": ours}


def timed(run) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def speed(tokens: int, vocab: int, repeats: int) -> None:
    mesh = Mesh.create(Config().parallel, seed=1, timeout_s=600)
    (model,) = build_model(model_config(vocab), Config(train=TrainConfig(dtype="fp32")), mesh)
    length = tokens // NUM_SEQUENCES
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocab, (NUM_SEQUENCES, length), generator=generator).tolist()
    batch = pack([(row[: length // PROMPT_SHARE], row[length // PROMPT_SHARE :]) for row in ids])
    runs = passes(model, batch, mesh)
    for run in runs.values():
        run()
    seconds = [{name: timed(run) for name, run in runs.items()} for _ in range(repeats)]
    for name in runs:
        print(f"{name:6} {statistics.median(row[name] for row in seconds):7.2f} s")
    for other in ("plain", "body"):
        ratios = sorted(row["ours"] / row[other] for row in seconds)
        print(f"ours / {other}: median {statistics.median(ratios):.3f}, from {ratios[0]:.3f} to {ratios[-1]:.3f}")
    mesh.close()


def memory(tokens: int, vocab: int, hidden: int = 256) -> None:
    """Growth of the process's peak memory over log-probs and their backward pass, against [T, V] in fp32."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(tokens, hidden, generator=generator, requires_grad=True)
    weight = (torch.randn(vocab, hidden, generator=generator) * 0.05).requires_grad_()
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    before = psutil.Process().memory_info().rss
    values = VocabParallelLogProbs.apply(states, weight, labels, 1.0, 0, torch.distributed.group.WORLD)
    values.sum().backward()
    # Not getrusage: its peak is inherited from the process that started this one.
    peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024
    extra, full = peak - before - states.nbytes - weight.nbytes, tokens * vocab * 4
    logits = states.detach()[:64].double() @ weight.detach().double().t()
    reference = logits.log_softmax(-1).gather(1, labels[:64, None])[:, 0]
    print(f"error to float64: {(values[:64] - reference).abs().max():.2g} nats")
    print(f"extra memory: {extra / full:.1%} of fp32 logits ({full / 2**20:.0f} MiB), beside the gradients")
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--memory", action="store_true", help="only the memory and the error, at T = 2,048, V = 151,936"
    )
    options = parser.parse_args()
    if options.memory:
        memory(2048, 151936)
        return
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())
    speed(options.tokens, options.vocab, options.repeats)
    # In a process of its own, whose peak nothing else has raised.
    subprocess.run([sys.executable, __file__, "--memory"], check=True, timeout=600)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


if __name__ == "__main__":
    main()
