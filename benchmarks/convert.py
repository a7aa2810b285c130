"""How fast weights come from Hugging Face files and go back, on the ranks and by the tools, against mbridge and `cp`.

    pip install --target /tmp/mbridge --no-deps mbridge
    PYTHONPATH=/tmp/mbridge python benchmarks/convert.py [--repeats 5] [--work DIR]

One model of 258 MiB (bf16, 843 tensors) on 4 ranks (tensor 2, pipeline 2, expert 2) over gloo, files in the page cache;
all variants in turn in one run, so that a drift of the machine's speed hits all alike. Without mbridge importable only
ours are measured. mbridge knows Transformer Engine's parameter names: it gets the same parameters under those. The
tools are measured inside one process, without the imports that every Python program with torch has to do, on this model
and on one with larger matrices; `cp` copies the same files, and both are given with and without waiting for the
disk.
"""

import argparse
import gc
import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1])]

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn

from gspo_megatron.notices import hide_known_notices

hide_known_notices(on_gpu=torch.cuda.is_available())

from gspo_megatron import convert_to_hf, convert_to_megatron  # noqa: E402
from gspo_megatron.backend.mesh import Mesh  # noqa: E402
from gspo_megatron.backend.policy import Policy, open_weights  # noqa: E402
from gspo_megatron.config import Config, ModelConfig, ParallelConfig, WeightsConfig  # noqa: E402
from gspo_megatron.convert import Ranks  # noqa: E402
from gspo_megatron.rollout.torchvision_operators import ensure_torchvision_operators  # noqa: E402
from gspo_megatron.weights import partial  # noqa: E402
from gspo_megatron.weights.hf_writer import write_hf_checkpoint  # noqa: E402
from gspo_megatron.weights.load import load_parameters  # noqa: E402
from gspo_megatron.weights.plan import blocks_of  # noqa: E402
from gspo_megatron.weights.raw_files import as_bytes  # noqa: E402
from tests.convert.large_model import write_large_model  # noqa: E402

SIZES = dict(hidden_size=512, moe_intermediate_size=296, num_experts=32, num_hidden_layers=8, vocab_size=8192)
"""Of `weight_sync.py`'s model: matrices of 300 KiB, a tenth of those of the models that people train."""
LARGE = SIZES | dict(hidden_size=2048, moe_intermediate_size=768, num_hidden_layers=4)
"""With matrices of the size of Qwen3-30B-A3B's, 3 MiB."""
LAYOUT = ParallelConfig(tensor=2, pipeline=2, expert=2)
BUCKET_MIB = 32.0
NUM_RANKS = 4


def memory(field: str) -> int:
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) * 1024


def measured(run: Callable[[], None]) -> tuple[float, float]:
    """Seconds from the start of the first rank to the end of the last, and the most MiB that a rank held beyond what it
    held before."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from now on
    before = memory("VmRSS")
    dist.barrier()
    started = time.monotonic()  # one clock for all processes of a machine
    run()
    ended = time.monotonic()
    values = torch.tensor([-started, ended, (memory("VmHWM") - before) / 2**20], dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values[1] + values[0]), float(values[2])


def by_engine_names(chunk: nn.Module) -> nn.Module:
    """The parameters of a model of the local layer spec under Transformer Engine's names, as mbridge wants them."""
    root = nn.Module()
    for name, param in chunk.named_parameters():
        name = name.replace(".input_layernorm.weight", ".self_attention.linear_qkv.layer_norm_weight")
        name = re.sub(r"\.local_experts\.(\d+)\.(linear_fc[12])\.weight$", r".\2.weight\1", name)
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.ModuleList() if part == "layers" else nn.Module())
            module = module._modules[part]
        module.register_parameter(leaf, param)
    for own, layer in zip(root.decoder.layers, chunk.decoder.layers, strict=True):
        own.layer_number = layer.layer_number
    return root


def reading_alone(policy: Policy, config: Config) -> Callable[[], None]:
    """The floor: what a rank needs of the files, read into its parameters by one system call a block."""
    reader = open_weights(config, policy.family, policy.shape, policy._place)
    calls, strided = [], []
    for name, blocks in blocks_of(policy.family, policy.shape, policy._place).items():
        for block in blocks:
            view, raw = policy.params[name].detach()[block.param_slices], reader._tensor(block.hf)
            extent = raw.extent(block.hf_start, block.shape)
            if extent is None:
                strided.append((block.hf, block.hf_start, view))
            else:
                calls.append((os.open(raw.path, os.O_RDONLY), [as_bytes(view)], extent[0]))

    def read() -> None:
        for descriptor, buffers, offset in calls:
            os.preadv(descriptor, buffers, offset)
        for block in strided:
            reader.read_into(*block)

    return read


def slices_by_safetensors(policy: Policy, hf: str) -> Callable[[], None]:
    """Every rank reads its slices by safetensors' own reader, a tensor at a time: what slime does."""

    def load() -> None:
        weight_map = json.loads((Path(hf) / "model.safetensors.index.json").read_text())["weight_map"]
        files = {name: safe_open(Path(hf) / name, "pt") for name in set(weight_map.values())}
        with torch.no_grad():
            for param, blocks in blocks_of(policy.family, policy.shape, policy._place).items():
                for block in blocks:
                    piece = files[weight_map[block.hf]].get_slice(block.hf)[block.hf_slices]
                    policy.params[param][block.param_slices].copy_(piece)

    return load


def variants(policy: Policy, config: Config, work: Path) -> dict[str, Callable[[], None]]:
    hf = config.model.hf

    def load_ours() -> None:
        reader = open_weights(config, policy.family, policy.shape, policy._place)
        load_parameters(policy.params, blocks_of(policy.family, policy.shape, policy._place), reader)

    def save_ours(durable: bool) -> None:
        write_hf_checkpoint(
            policy.hf_tensors("all"), work / "ours", hf, writers=policy.mesh, shapes=policy.hf_shapes, durable=durable
        )

    runs = {
        "load, ours": load_ours,
        "load, its bytes read and nothing else": reading_alone(policy, config),
        "load, slices by safetensors": slices_by_safetensors(policy, hf),
        "save, ours": lambda: save_ours(False),
        "save, ours, on disk": lambda: save_ours(True),
    }
    ensure_torchvision_operators()  # which transformers looks for
    if importlib.util.find_spec("mbridge") is None:
        return runs
    from mbridge import AutoBridge

    bridge = AutoBridge.from_pretrained(hf)
    models = [by_engine_names(chunk) for chunk in policy.chunks[0].modules() if type(chunk).__name__ == "PolicyModel"]

    @torch.no_grad()
    def load_mbridge() -> None:
        bridge.load_weights(models, hf)

    @torch.no_grad()
    def save_mbridge(efficient: bool) -> None:
        bridge.save_weights(models, str(work / "mbridge"), memory_efficient=efficient)

    return runs | {
        "load, mbridge": load_mbridge,
        "save, mbridge": lambda: save_mbridge(False),
        "save, mbridge, memory_efficient": lambda: save_mbridge(True),
    }


def on_ranks(directory: str, work: str, repeats: int) -> None:
    """What torchrun starts."""
    mesh = Mesh.create(LAYOUT, seed=1, timeout_s=600)
    config = Config(model=ModelConfig(hf=directory), parallel=LAYOUT, weights=WeightsConfig(bucket_mib=BUCKET_MIB))
    policy = Policy(config, mesh, train=False)
    expected = checksum(policy)
    runs = variants(policy, config, Path(work))
    results: dict[str, list] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            if name.startswith("load"):
                with torch.no_grad():
                    for param in policy.params.values():
                        param.zero_()
            result = measured(run)
            assert checksum(policy) == expected, f"{name} does not give the model's weights"
            if turn:  # the first warms up
                results[name].append(result)
    if mesh.rank == 0:
        print(json.dumps(results))
    mesh.close()


def checksum(policy: Policy) -> list[float]:
    return [float(param.detach().double().sum()) for param in policy.params.values()]


def tools(hf: Path, work: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of both tools and of cp, with and without waiting for the disk."""
    gc.freeze()  # as the tools do
    results: dict[str, list[float]] = {}
    fsync = os.fsync

    def timed(name: str, run: Callable[[], object], made: Path, keep: bool = False) -> None:
        os.sync()
        started = time.perf_counter()
        run()
        results.setdefault(name, []).append(time.perf_counter() - started)
        if not keep:
            shutil.rmtree(made)

    for _ in range(repeats + 1):
        for on_disk in (False, True):
            partial.os.fsync = fsync if on_disk else (lambda descriptor: None)
            suffix = ", on disk" if on_disk else ""
            sync = ["-c", 'cp -r "$0" "$1" && sync -f "$1"' if on_disk else 'cp -r "$0" "$1"']
            timed(
                f"cp{suffix}",
                lambda sync=sync: subprocess.run(["sh", *sync, str(hf), str(work / "cp")], check=True),
                work / "cp",
            )
            there = convert_to_megatron.Options(hf, work / "mg", tensor=2, pipeline=2, expert=2)
            timed(
                f"hf to megatron{suffix}",
                lambda there=there: convert_to_megatron.convert(there),
                work / "mg",
                keep=True,
            )
            back = convert_to_hf.Options(work / "mg", work / "back")
            timed(f"megatron to hf{suffix}", lambda back=back: convert_to_hf.convert(back, Ranks()), work / "back")
            shutil.rmtree(work / "mg")
    return {name: seconds[1:] for name, seconds in results.items()}


def report_ranks(ranks: dict[str, list]) -> None:
    seconds = {name: [value[0] for value in values] for name, values in ranks.items()}
    for name, values in seconds.items():
        extra = max(value[1] for value in ranks[name])
        print(
            f"{name:37} {statistics.median(values):7.3f} s ({min(values):.3f} to {max(values):.3f}), "
            f"{extra:4.0f} MiB more"
        )
    for what in ("load", "save"):
        for name in seconds:
            if name.startswith(what) and not name.startswith(f"{what}, ours"):
                ratios = [b / a for a, b in zip(seconds[f"{what}, ours"], seconds[name], strict=True)]
                print(f"{name} / ours: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


def report_tools(files: dict[str, list[float]]) -> None:
    for name, values in files.items():
        base = files["cp, on disk" if "on disk" in name else "cp"]
        ratio = statistics.median(a / b for a, b in zip(values, base, strict=True))
        print(f"{name:37} {statistics.median(values):7.3f} s, {ratio:.2f} x cp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--work", type=Path, help="where to write; default: a temporary directory")
    parser.add_argument("--on-ranks", nargs=2, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.on_ranks:
        on_ranks(*options.on_ranks, options.repeats)
        return
    with tempfile.TemporaryDirectory(dir=options.work) as directory:
        work = Path(directory)
        model = write(work / "hf", SIZES)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(NUM_RANKS), "--standalone"]
        command += [__file__, "--repeats", str(options.repeats), "--on-ranks", str(model), str(work)]
        done = subprocess.run(command, check=True, timeout=1200, text=True, stdout=subprocess.PIPE)
        report_ranks(json.loads(done.stdout.splitlines()[-1]))
        report_tools(tools(model, work, options.repeats))
        report_tools(tools(write(work / "large", LARGE), work, options.repeats))


def write(directory: Path, sizes: dict[str, int]) -> Path:
    found = write_large_model(directory, shard_bytes=100 << 20, **sizes)
    print(f"{found['total'] / 2**20:.0f} MiB, the largest layer {found['layer'] / 2**20:.0f} MiB")
    return directory


if __name__ == "__main__":
    main()
