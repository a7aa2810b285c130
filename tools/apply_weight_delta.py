"""Keep a checkpoint beside the engines that follows a trainer's weight versions (weights.transport=delta).

python tools/apply_weight_delta.py --weights DIR --local DIR [--once]

--weights is the trainer's weights.dir, as this machine sees it; --local its weights.engine_dir, on this machine. Every
published version is put together there from the one before it and what changed, or copied in full where that is
missing, and the trainer is told. Runs until it is ended; with --once it brings --local to the version of now.
Exit status: 0, 1 where a version could not be put together (with --once), 2 for directories that can't be used.
"""

import argparse
import json
import socket
import sys
import time
from pathlib import Path

from gspo_megatron.rollout.transports.delta import ACKNOWLEDGED, PUBLISHED, follow, write_json

POLL_S = 0.2


def apply_published(weights: Path, local: Path, last: dict | None) -> dict | None:
    """Follow what is published, unless it is `last`; tells the trainer, and returns what it was."""
    try:
        note = json.loads((weights / PUBLISHED).read_text())
    except FileNotFoundError:
        return last
    if note == last:
        return last
    error = ""
    try:
        started = time.monotonic()
        target = follow(note, local)
        how = f"from version {note['base']}" if note["delta"] else "in full"
        print(f"version {note['version']} {how}: {target}, {time.monotonic() - started:.2f} s", flush=True)
    except (OSError, ValueError) as failure:
        error = f"version {note['version']} can't be put together in {local}: {failure}"
        print(error, file=sys.stderr, flush=True)
    write_json(weights / ACKNOWLEDGED / f"{socket.gethostname()}.json", note | {"error": error})
    return note | {"failed": True} if error else note


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", type=Path, required=True, help="the trainer's weights.dir")
    parser.add_argument("--local", type=Path, required=True, help="the trainer's weights.engine_dir")
    parser.add_argument("--once", action="store_true", help="bring it to the version of now and end")
    options = parser.parse_args(arguments)
    if not options.weights.is_dir():
        print(f"--weights: {options.weights} is no directory; give the trainer's weights.dir", file=sys.stderr)
        return 2
    if options.once and not (options.weights / PUBLISHED).exists():
        print(f"--weights: {options.weights} has no {PUBLISHED}: no version is published there", file=sys.stderr)
        return 2
    last = None
    while True:
        found = apply_published(options.weights, options.local, last)
        if options.once:
            return 1 if found and found.pop("failed", False) else 0
        if found is not None:
            found.pop("failed", None)
        last = found
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main())
