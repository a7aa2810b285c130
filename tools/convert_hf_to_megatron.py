"""Write a Hugging Face checkpoint in Megatron's `torch_dist` format.

    python tools/convert_hf_to_megatron.py --hf DIR --megatron DIR [--tp N --pp N --ep N --etp N] [--dtype bf16]
    [--verify]

Any layout loads what is written, here and in Megatron; --tp and --etp cut the chunks as that layout's ranks read them,
--pp and --ep group them into files. Alone, or under torchrun, whose ranks share the files. Memory does not grow with
the model. What was interrupted goes on with the same command; the target appears when it is whole. Exit status 2:
refused.
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hf", required=True, type=Path, metavar="DIR", help="Hugging Face checkpoint (safetensors)")
    parser.add_argument("--megatron", required=True, type=Path, metavar="DIR", help="directory to write")
    for name, meaning in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        parser.add_argument(f"--{name}", type=int, default=1, metavar="N", help=f"{meaning} parallel size")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="cast; what is kept in another type stays")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--verify", action="store_true", help="read every tensor back and compare hashes")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --megatron, once all is written")
    options = parser.parse_args(arguments)

    from gspo_megatron.notices import hide_known_notices

    hide_known_notices(on_gpu=False)
    from gspo_megatron.convert import run_tool
    from gspo_megatron.convert_to_megatron import Options, convert

    return run_tool(
        lambda: convert(
            Options(
                hf=options.hf, megatron=options.megatron, tensor=options.tp, pipeline=options.pp, expert=options.ep,
                expert_tensor=options.etp, dtype=options.dtype, dry_run=options.dry_run, verify=options.verify,
                overwrite=options.overwrite,
            )
        )
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
