"""The command line: `python -m gspo_megatron check CONFIG`, and `torchrun ... -m gspo_megatron train CONFIG`; and
`python -m gspo_megatron compare RUN_A RUN_B`, which exits with 1 where two runs differ.

The first two exit with 2 and print every fault, one a line on stderr, when the configuration cannot run. `train` goes
on from the last checkpoint in run.dir; SIGTERM or SIGUSR1 have it finish the step, save, and exit with 75.
"""

import argparse
import os
import sys
from pathlib import Path

from gspo_megatron.checks import check_config
from gspo_megatron.compare import TOLERANCE, compare_runs, comparison_text
from gspo_megatron.config import Config, ConfigError
from gspo_megatron.config_loader import read_config
from gspo_megatron.layout import layout_of, layout_text, world_step
from gspo_megatron.memory import memory_text
from gspo_megatron.model_files import read_model

REFUSED = 2
"""Exit status of a configuration that cannot run."""
STOPPED = 75
"""Exit status of a rank that SIGTERM or SIGUSR1 ended early, with a checkpoint: start again to go on (EX_TEMPFAIL)."""


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    options, rest = parser.parse_known_args(arguments)
    if any(argument.startswith("-") for argument in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "compare":
        if rest:
            parser.error(f"unrecognized arguments: {' '.join(rest)}")
        return compare(options.run_a, options.run_b, options.tolerance)
    options.overrides += rest  # overrides that follow an option, which argparse does not put with the others
    if options.command == "check":
        return check(options.config, options.overrides, options.world_size)
    return train(options.config, options.overrides)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gspo_megatron", description="GSPO with Megatron-Core and SGLang")
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser(
        "check", help="judge a configuration without GPUs or processes; exit 0, or 2 with faults"
    )
    checker.add_argument("--world-size", type=int, help="ranks that the run will have; default: the fewest that work")
    trainer = commands.add_parser("train", help="train; start it with torchrun, one process a rank")
    comparer = commands.add_parser("compare", help="say where two runs part; exit 0, 1 beyond the tolerance, or 2")
    comparer.add_argument("run_a", metavar="RUN_A", help="directory of a run")
    comparer.add_argument("run_b", metavar="RUN_B", help="directory of another")
    comparer.add_argument(
        "--tolerance", type=_tolerance, default=TOLERANCE,
        help=f"largest difference allowed: absolute, or relative to values above 1 (default {TOLERANCE:g})",
    )  # fmt: skip
    for command in (checker, trainer):
        command.add_argument("config", metavar="CONFIG", help="YAML file")
        command.add_argument(
            "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
        )
    return parser


def find_faults(
    path: str, overrides: list[str], world_size: int | None, earlier_run: bool = True
) -> tuple[Config, list[str]]:
    """The configuration, and every fault of the file and of the rules."""
    config, faults = read_config(path, overrides)
    # A key that could not be read is at its default by now: what the rules say of it would mislead.
    unread = {fault.split(":")[0] for fault in faults}
    faults += [fault for fault in check_config(config, world_size, earlier_run) if fault.split(":")[0] not in unread]
    return config, faults


def check(path: str, overrides: list[str], world_size: int | None) -> int:
    config, faults = find_faults(path, overrides, world_size)
    if faults:
        return _refuse(faults)
    layout = layout_of(config, world_size or world_step(config.parallel))
    if world_size is None:
        print(f"no --world-size given: this is for the fewest ranks that work, {layout.world}")
    model, _ = read_model(Path(config.model.hf))
    print(layout_text(config, layout))
    print(memory_text(config, model, layout))
    print("ok")
    return 0


def train(path: str, overrides: list[str]) -> int:
    """Every rank judges the configuration for itself, before a process group starts, so that none waits for another;
    only what run.dir holds is for rank 0, which writes there as soon as it has looked."""
    first = os.environ.get("RANK", "0") == "0"
    config, faults = find_faults(path, overrides, int(os.environ.get("WORLD_SIZE", "1")), earlier_run=first)
    if faults:
        return _refuse(faults) if first else REFUSED
    import torch  # here, because `check` does without

    from gspo_megatron.notices import hide_known_notices

    hide_known_notices(on_gpu=torch.cuda.is_available())
    be_a_single_rank_without_torchrun()
    from gspo_megatron.trainer import train as run

    try:
        stopped = run(config)
    except ConfigError as error:
        return _refuse(error.faults)
    return STOPPED if stopped else 0


def compare(run_a: str, run_b: str, tolerance: float) -> int:
    try:
        found = compare_runs(run_a, run_b, tolerance)
    except ValueError as error:
        return _refuse([str(error)])
    print(comparison_text(found, tolerance))
    return 0 if found.equal else 1


def _tolerance(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} must be at least 0")
    return value


def be_a_single_rank_without_torchrun() -> None:
    """Set what torchrun would, for one process."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        # port 0: the store takes a free one as it starts; one looked up here can be gone by then
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


def _refuse(faults: list[str]) -> int:
    for fault in faults:
        print(" ".join(fault.splitlines()), file=sys.stderr)
    return REFUSED


if __name__ == "__main__":
    sys.exit(main())
