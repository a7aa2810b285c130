"""Write a Megatron `torch_dist` checkpoint as a Hugging Face one: safetensors shards, index, config and tokenizer.

    python tools/convert_megatron_to_hf.py --megatron DIR --hf DIR [--hf-reference DIR] [--dtype bf16] [--verify]

DIR is what tools/convert_hf_to_megatron.py wrote, a run's checkpoints/step_N, or Megatron-LM's own with --hf-reference
to take config.json and tokenizer from. Alone, or under torchrun, whose ranks share the shards. Memory does not grow
with the model. What was interrupted goes on with the same command; the target appears when it is whole. Exit status 2:
refused.
"""

import argparse
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megatron", required=True, type=Path, metavar="DIR", help="torch_dist checkpoint")
    parser.add_argument("--hf", required=True, type=Path, metavar="DIR", help="directory to write")
    parser.add_argument("--hf-reference", type=Path, metavar="DIR", help="where config.json and tokenizer come from")
    parser.add_argument("--shard-gb", type=float, default=5.0, metavar="X", help="largest shard, in 10^9 bytes (5)")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="cast; what is kept in another type stays")
    parser.add_argument("--dry-run", action="store_true", help="print what would be written, and write nothing")
    parser.add_argument("--verify", action="store_true", help="read every tensor back and compare hashes")
    parser.add_argument("--overwrite", action="store_true", help="replace what is at --hf, once all is written")
    options = parser.parse_args(arguments)
    if not 0 < options.shard_gb < float("inf"):
        parser.error(f"--shard-gb {options.shard_gb}: must be a number above 0")

    from gspo_megatron.convert import Ranks, run_tool
    from gspo_megatron.convert_to_hf import Options, convert

    def run() -> str:
        with Ranks.join() as ranks:
            return convert(
                Options(
                    megatron=options.megatron, hf=options.hf, reference=options.hf_reference, dtype=options.dtype,
                    shard_bytes=max(1, int(options.shard_gb * 1e9)), dry_run=options.dry_run, verify=options.verify,
                    overwrite=options.overwrite,
                ),
                ranks,
            )  # fmt: skip

    return run_tool(run)


if __name__ == "__main__":
    sys.exit(main())
