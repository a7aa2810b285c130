"""Send a checkpoint's weights to running servers once, as a training run would, and print what was moved and proven.

python tools/check_weight_sync.py --config CONFIG [--version N] [section.key=value ...]
torchrun --nproc-per-node N tools/check_weight_sync.py --config CONFIG ...

The servers (`rollout.servers`) get the weights of `model.hf` in the layout and by the transport of the configuration,
as weight version N (0), and serve them afterwards. Exit status: 0 when every check passed; 1 when the sync failed, with
the servers left paused; 2 for a configuration or servers that can't work.
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from gspo_megatron.__main__ import REFUSED, be_a_single_rank_without_torchrun, find_faults  # noqa: E402
from gspo_megatron.config import Config, ConfigError  # noqa: E402

FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True, help="YAML file of a training run")
    parser.add_argument("--version", type=int, default=0, help="weight version that the servers report afterwards")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    options = parser.parse_args(arguments)
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config, faults = find_faults(options.config, options.overrides, world_size, earlier_run=False)
    if not faults and not config.rollout.servers:
        faults = ["rollout.servers: empty: this needs running servers; give their URLs, and rollout.launch=null"]
    if options.version < 0:
        faults.append(f"--version: {options.version}: give a number from 0 on")
    if faults:
        return _say(faults, REFUSED)
    be_a_single_rank_without_torchrun()
    from gspo_megatron.rollout.errors import WeightSyncError

    try:
        table = check(config, options.version)
    except ConfigError as error:
        return _say(error.faults, REFUSED)
    except (WeightSyncError, OSError) as error:
        return _say([str(error)], FAILED)
    if table:
        print(table)
    return 0


def _say(lines: list[str], status: int) -> int:
    if os.environ.get("RANK", "0") == "0":
        print("\n".join(lines), file=sys.stderr, flush=True)
    return status


def check(config: Config, version: int) -> str:
    """One sync by all ranks; the table, on rank 0."""
    from gspo_megatron.backend.mesh import Mesh
    from gspo_megatron.backend.policy import Policy
    from gspo_megatron.outgoing import bring_to_rank_zero, outgoing_weights, weights_dir
    from gspo_megatron.rollout.locks import hold_servers
    from gspo_megatron.rollout.weight_sync import WeightSync

    table = ""
    with contextlib.ExitStack() as stack:
        first = os.environ["RANK"] == "0"
        if first:
            stack.enter_context(hold_servers(config.rollout.servers, config.run.dir))
        mesh = Mesh.create(config.parallel, config.run.seed, config.train.timeout_s)
        stack.callback(mesh.close)
        policy = Policy(config, mesh, train=False)
        if first:
            sync = WeightSync(
                config.weights, config.rollout.servers, backend="nccl" if mesh.device.type == "cuda" else "gloo",
                expected=policy.hf_tensor_specs, engine_name=policy.family.engine_name,
                directory=weights_dir(config), model_dir=config.model.hf,
            )  # fmt: skip
            stack.callback(sync.close)
            sync.connect()
        tensors = outgoing_weights(policy, config, version)
        if first:
            report = sync.run(tensors(), version)
            table = table_of(config, sync, report, version, policy.reshard_plan())
        else:
            bring_to_rank_zero(policy, config)
        mesh.barrier("rank 0 checking the weights")
    return table


def table_of(config: Config, sync, report, version: int, plan) -> str:
    """What was sent, how fast, beside the least that engine ranks have to get, and what was checked."""
    least, ranks = max(1, sync.least_bytes()), sync.num_ranks
    file_transport = config.weights.transport in ("disk", "delta")
    moved = report.moved_bytes if file_transport else report.moved_bytes * ranks
    places = f"{len(sync.urls)} server(s), {ranks} engine rank(s)"
    rows = [
        ("transport", f"{config.weights.transport}, to {places}"),
        ("tensors", f"{report.num_tensors} in {report.num_buckets} bucket(s)"),
        ("bytes", f"{report.num_bytes:,}"),
        ("seconds", f"{report.seconds:.3f}, of which checks {report.check_seconds:.3f}"),
        ("GB/s", f"{report.num_bytes / report.seconds / 1e9:.3f}"),
        ("moved to engines", f"{moved:,} bytes" + (" (read from the disk by every rank)" if file_transport else "")),
        ("lower bound", f"{least:,} bytes, every engine rank its part once; moved {moved / least:.2f} times it"),
        ("between trainer ranks", f"{plan.moved_bytes:,} bytes, lower bound {plan.lower_bound_bytes:,}"),
        ("names, dtypes, shapes", f"ok, {report.num_tensors} tensors"),
        ("coverage", "ok, every engine parameter is filled"),
        ("checksums", f"ok, {report.checked} of {report.checked + report.unknown} engine parameters are what was sent"),
        ("version", f"ok, all servers report {version} and serve"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


if __name__ == "__main__":
    sys.exit(main())
