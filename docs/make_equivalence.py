"""Writes docs/equivalence.md from a run of the equality matrix on this machine's CPU, in about ten minutes.

python docs/make_equivalence.py [--only PATTERN]    # rows that PATTERN does not match stay as they are
"""

import argparse
import os
import re
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron.core import __version__  # noqa: E402

from tests.distributed.cases import CASES, FAMILY_CASES  # noqa: E402
from tests.distributed.compare import Differences  # noqa: E402
from tests.distributed.runs import Runs  # noqa: E402

TEXT = """\
# The same gradient on every layout

This page is written by `python docs/make_equivalence.py`, which trains four-layer models of the tests, a Qwen3-MoE where
no family is named, for two steps of four mini-batches on every layout below, from one saved rollout: 32 samples a step
of 0 to 30 response tokens, one empty response, one of a single token, one with a span in the middle that is not trained
on, and a group of equal rewards. Everything is compared with one rank that takes a mini-batch of eight sequences as one
micro-batch, in fp32, with megatron-core {version}. `tests/distributed/` holds all of it to the bounds in the second line
of the table, one rank itself to transformers with a GSPO in float64, and bf16 to a bound of its own (`test_bf16.py`). DeepSeek-V2's
log-likelihoods are held to 2e-5: what its routed experts give is scaled by 2.5, with its rounding.

tp: tensor (with sequence parallelism), pp: pipeline, vpp: virtual pipeline, cp: context, ep: expert, etp: expert tensor,
dp: data parallel. Log-likelihood: largest difference of a token, nats. Loss: largest difference of an update's, relative
to the largest loss. Gradient: largest difference of a parameter's gradient over all eight updates, relative to its norm
(or to a thousandth of the whole gradient's where that is larger: an expert that hardly any token reached has nothing but
rounding). Parameters: largest difference after two steps, relative to the change; a parameter kept in fp32 is rounded by
a few 1e-4 of what an update changes. Seconds: both steps, all ranks sharing two CPU cores.

| layout | ranks | log-likelihood | loss | gradient | parameters | seconds |
| --- | --- | --- | --- | --- | --- | --- |
| *bound* | | 1e-05 | 1e-05 | 1e-05 | 1e-03 | |
{rows}

Copies of a parameter (data and context parallel, and norms and routers over tensor ranks) were equal bit for bit after
the two steps on every layout.

## Determinism

The same layout, seed and rollouts give the same bits twice on the CPU: log-likelihoods, losses, gradients and parameters
(`tests/distributed/test_determinism.py`). Another layout adds the same numbers in another order and differs by rounding,
as the table shows. On GPUs set, before the run,

    export NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 CUBLAS_WORKSPACE_CONFIG=:4096:8 NCCL_ALGO=Ring

and `megatron.transformer.deterministic_mode=true` in the configuration: Megatron-Core then chooses kernels without
atomic additions, at some cost of speed. A rollout depends on how the servers batch requests; `rollout.replay` takes that
out of a comparison.

Two runs are compared by `python -m gspo_megatron compare RUN_A RUN_B`, which names the first step and the metrics that
part.
"""


def row(found: Differences) -> str:
    numbers = (found.log_probs, found.loss, found.gradient, found.parameters)
    cells = " | ".join(f"{number:.1e}" for number in numbers)
    name = found.case.name.replace("|", "\\|")
    return f"| {name} | {found.case.world} | {cells} | {found.seconds:.1f} |"


def kept_rows(path: Path) -> dict[str, str]:
    """Layout -> its row in the page as it is."""
    rows = [line for line in path.read_text().splitlines() if line.startswith("| ")] if path.exists() else []
    return {line.split(" | ")[0].removeprefix("| ").replace("\\|", "|"): line for line in rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression on the names of layouts")
    only = re.compile(parser.parse_args().only)
    path = ROOT / "docs" / "equivalence.md"
    rows = kept_rows(path)
    with tempfile.TemporaryDirectory() as directory:
        runs = Runs(Path(directory))
        for cases in (CASES, FAMILY_CASES):
            cases = [case for case in cases if only.search(case.name)]
            for world in sorted({case.world for case in cases}):
                for found in runs.differences([case for case in cases if case.world == world]):
                    rows[found.case.name] = row(found)
    names = [case.name for case in sorted(CASES, key=lambda case: case.world) + FAMILY_CASES]
    path.write_text(TEXT.format(version=__version__, rows="\n".join(rows[name] for name in names if name in rows)))
    print(f"{path.relative_to(ROOT)}: {len(names)} layouts")


if __name__ == "__main__":
    main()
