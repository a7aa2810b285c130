"""Weight versions as what changed since the version before, put together again beside the engines.

The trainer ranks write every version in full to `weights.dir`, a disk of theirs. What goes to the engines' machines is
the first version in full and then one delta file a version. SGLang can't apply it: an applier there keeps a checkpoint
in `weights.engine_dir`, from which the engines load. With `weights.appliers` 0 that is done by this process.
"""

import json
import os
import shutil
import time
import uuid
from pathlib import Path

from gspo_megatron.rollout.transports.base import Setting
from gspo_megatron.rollout.transports.disk import DiskTransport, remove_versions, version_dir
from gspo_megatron.weights.delta import DeltaError, apply_delta, write_delta
from gspo_megatron.weights.hf_writer import remove_half_written

PUBLISHED, ACKNOWLEDGED = "published.json", "applied"
POLL_S = 0.2


class DeltaTransport(DiskTransport):
    """`moved_bytes`: what the last version cost an engine's machine, in bytes."""

    def __init__(self, setting: Setting):
        super().__init__(setting)
        self._report, self._appliers = setting.report, setting.config.appliers
        self._engine_dir = Path(setting.config.engine_dir or self.directory / "engine").absolute()
        self._sent: Path | None = None
        """The version that the appliers hold."""
        self.moved_bytes = 0

    def load(self, directory: Path, version: int) -> None:
        """Have the engines' checkpoints brought to the one in `directory`, and loaded; then remove older ones.

        Raises RequestError, DeltaError, OSError, or TimeoutError where an applier does not answer.
        """
        if self._sent != directory:
            self._publish(directory, version)
            self._sent = directory
        self.load_everywhere(version_dir(self._engine_dir, version))
        remove_versions(directory)

    def _publish(self, directory: Path, version: int) -> None:
        note = {"id": uuid.uuid4().hex, "version": version, "full": str(directory), "delta": "", "base": -1}
        self.moved_bytes = sum(path.stat().st_size for path in directory.iterdir())
        if self._sent is not None:
            base = int(self._sent.name.rpartition("_")[2])
            path = self.directory / f"version_{version}.delta"
            delta = write_delta(self._sent, directory, path, (base, version))
            note |= {"delta": str(path), "base": base}
            self.moved_bytes = delta.file_bytes
        self._sent = None  # whatever fails now: the next version goes in full
        write_json(self.directory / PUBLISHED, note)
        if self._appliers:
            self._wait(note)
        else:
            follow(note, self._engine_dir)
        for path in self.directory.glob("*.delta"):
            path.unlink()

    def _wait(self, note: dict) -> None:
        deadline, done = time.monotonic() + self._timeout_s, {}
        while len(done) < self._appliers:
            for path in (self.directory / ACKNOWLEDGED).glob("*.json"):
                answer = json.loads(path.read_text())
                if answer["id"] == note["id"]:
                    if answer["error"]:
                        raise DeltaError(f"the applier on {path.stem}: {answer['error']}")
                    done[path.stem] = answer
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"version {note['version']}: {len(done)} of weights.appliers = {self._appliers} have it after"
                    f" {self._timeout_s:g} s ({', '.join(sorted(done)) or 'none'}); does"
                    f" `tools/apply_weight_delta.py --weights {self.directory}` run on every engine's machine?"
                )
            time.sleep(POLL_S)


def follow(note: dict, engine_dir: Path) -> Path:
    """Bring the checkpoint in `engine_dir` to a published version: by its delta where its base is there, else in full.

    Returns its directory, and removes older ones. Raises DeltaError for a delta that does not fit or is damaged,
    OSError for a disk that is full; nothing half-written stays.
    """
    engine_dir.mkdir(parents=True, exist_ok=True)
    remove_half_written(engine_dir)
    target, base = version_dir(engine_dir, note["version"]), version_dir(engine_dir, note["base"])
    if note["delta"] and base.exists():
        apply_delta(base, Path(note["delta"]), target)
    else:
        copy_whole(Path(note["full"]), target)
    remove_versions(target)
    return target


def copy_whole(source: Path, target: Path) -> None:
    """A copy that gets its name when it is whole; one that has it is replaced."""
    partial = target.with_name(f".{target.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        shutil.copytree(source, partial)
        shutil.rmtree(target, ignore_errors=True)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, values: dict) -> None:
    """Whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(values))
    os.replace(partial, path)
