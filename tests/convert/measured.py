"""Run as a program: starts the trainer's loading, or a conversion, and prints seconds and the peak of its memory
(JSON).

    python tests/convert/measured.py load HF | to_megatron HF MEGATRON | to_hf MEGATRON HF
"""

import json
import sys
import time
from pathlib import Path

import torch


def peak_bytes() -> int:
    """Not getrusage, whose peak is inherited from the process that started this one."""
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024


def load(hf: str) -> int:
    """The model of one rank filled from files; the bytes of its parameters."""
    from gspo_megatron.__main__ import be_a_single_rank_without_torchrun
    from gspo_megatron.backend.mesh import Mesh
    from gspo_megatron.backend.model import build_model
    from gspo_megatron.backend.parameters import global_parameters, place_of_rank
    from gspo_megatron.backend.policy import open_weights
    from gspo_megatron.config import Config, ModelConfig
    from gspo_megatron.convert import read_family
    from gspo_megatron.weights.load import load_parameters
    from gspo_megatron.weights.plan import blocks_of

    be_a_single_rank_without_torchrun()
    config = Config(model=ModelConfig(hf=hf))
    values, family, shape = read_family(Path(hf), "hf")
    mesh = Mesh.create(config.parallel, 1, 60)
    chunks = build_model(values, config, mesh)
    place = place_of_rank(mesh, chunks)
    params = global_parameters(chunks, place)
    load_parameters(params, blocks_of(family, shape, place), open_weights(config, family, shape, place))
    mesh.close()
    return sum(param.nbytes for param in params.values())


def main() -> None:
    from gspo_megatron.notices import hide_known_notices

    hide_known_notices(on_gpu=False)
    torch.set_num_threads(1)
    what, *paths = sys.argv[1:]
    if what == "to_hf":
        from gspo_megatron import convert_to_hf
        from gspo_megatron.convert import Ranks
    else:
        from gspo_megatron import convert_to_megatron
    started, held = time.perf_counter(), 0
    if what == "load":
        held = load(*paths)
    elif what == "to_hf":
        convert_to_hf.convert(convert_to_hf.Options(*map(Path, paths)), Ranks())
    else:
        convert_to_megatron.convert(convert_to_megatron.Options(*map(Path, paths), tensor=2, expert=2))
    seconds = time.perf_counter() - started
    print(json.dumps({"seconds": seconds, "peak": peak_bytes(), "held": held}))


if __name__ == "__main__":
    main()
