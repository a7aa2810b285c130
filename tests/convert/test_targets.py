"""Where conversions write: what is there is never lost by accident, and two of them do not meet."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from gspo_megatron.config import ConfigError
from gspo_megatron.weights.partial import PartialDirectory
from tests.convert.conversions import hashes, leftovers, to_hf, to_megatron_here
from tests.ranks import REPOSITORY


def test_a_target_that_is_there_stays_until_it_is_replaced(megatron, hf, tmp_path):
    before = hashes(hf)
    with pytest.raises(ConfigError, match="--hf: .*hf exists; remove it, give another, or add --overwrite"):
        to_hf(megatron, hf)
    with pytest.raises(ConfigError, match="--megatron: .*megatron exists"):
        to_megatron_here(hf, megatron)
    assert hashes(hf) == before
    to_hf(megatron, hf, overwrite=True)
    assert hashes(hf) != before and leftovers(tmp_path, "hf", "megatron") == []
    (tmp_path / "empty").mkdir()
    to_hf(megatron, tmp_path / "empty")
    assert hashes(tmp_path / "empty") == hashes(hf)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match="exists"):
        to_hf(megatron, tmp_path / "file")
    with pytest.raises(ConfigError, match="is not a directory to write into"):
        to_hf(megatron, tmp_path / "file" / "out")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_target_that_holds_what_is_converted(megatron, hf, tmp_path):
    """Even with --overwrite: it would be gone, and with it what a later check could compare with."""
    before = hashes(hf)
    (tmp_path / "link").symlink_to(hf)
    for source, target in ((hf, hf), (tmp_path / "link", hf), (hf, tmp_path / "link"), (hf, tmp_path)):
        with pytest.raises(ConfigError, match="--megatron: .* holds what is converted, which would be removed; give"):
            to_megatron_here(source, target, overwrite=True)
    with pytest.raises(ConfigError, match="--hf: .* holds what is converted"):
        to_hf(megatron, megatron, reference=hf, overwrite=True)
    assert hashes(hf) == before and leftovers(tmp_path, "hf", "megatron", "link") == []


def test_a_target_by_a_link_or_a_dot_is_the_directory_that_is_meant(megatron, tmp_path, monkeypatch):
    to_hf(megatron, tmp_path / "plain")
    expected = hashes(tmp_path / "plain")
    for name, content in (("empty", None), ("full", "old"), ("gone", None)):
        (tmp_path / f"to_{name}").symlink_to(tmp_path / name)
        (tmp_path / name).mkdir() if name != "gone" else None
        (tmp_path / name / "note").write_text(content) if content else None
        to_hf(megatron, tmp_path / f"to_{name}", overwrite=True)
        assert (tmp_path / f"to_{name}").is_symlink() and hashes(tmp_path / name) == expected
        assert not (tmp_path / name / "note").exists()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    to_hf(megatron, Path("."))
    assert hashes(tmp_path / "here") == expected
    links = [f"{way}{name}" for name in ("empty", "full", "gone") for way in ("", "to_")]
    assert leftovers(tmp_path, "megatron", "plain", "here", *links) == []


def test_a_dry_run_says_that_the_target_is_in_the_way(megatron, hf, tmp_path):
    before = hashes(hf)
    said = to_hf(megatron, hf, dry_run=True)
    assert f"refused: --hf: {hf} exists; remove it, give another, or add --overwrite" in said
    assert "refused" not in to_hf(megatron, hf, dry_run=True, overwrite=True)
    assert hashes(hf) == before and leftovers(tmp_path, "hf", "megatron") == []


HOLD = """
import sys
from pathlib import Path
from gspo_megatron.weights.partial import PartialDirectory
partial = PartialDirectory(Path(sys.argv[1]), "--hf", Path("elsewhere"))
partial.begin({"of": "another"})
partial.write("a", lambda file: file.write(b"a"))
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def another(tmp_path):
    """The process of another conversion that is writing to tmp_path/out."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, tmp_path / "out"], env=environment, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.communicate()


def test_two_conversions_do_not_write_to_one_target(another, megatron, tmp_path):
    partial = tmp_path / ".out.partial"
    before = {file.name: file.read_bytes() for file in partial.iterdir()}
    with pytest.raises(ConfigError, match=f"--hf: process {another.pid} is writing .*out; wait for its end, stop it"):
        to_hf(megatron, tmp_path / "out")
    assert {file.name: file.read_bytes() for file in partial.iterdir()} == before
    another.kill()
    another.wait()
    to_hf(megatron, tmp_path / "out")
    to_hf(megatron, tmp_path / "alone")
    assert hashes(tmp_path / "out") == hashes(tmp_path / "alone")
    assert leftovers(tmp_path / "out") == leftovers(tmp_path / "alone")
    assert leftovers(tmp_path, "megatron", "out", "alone") == []


def test_a_target_that_came_meanwhile_stays(tmp_path):
    partial = PartialDirectory(tmp_path / "out", "--hf", tmp_path / "source")
    partial.begin({"of": "this"})
    partial.write("a", lambda file: file.write(b"new"))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").write_text("old")
    with pytest.raises(ConfigError, match="out exists; remove it"):
        partial.finish()
    assert (tmp_path / "out" / "a").read_text() == "old"
    shutil.rmtree(tmp_path / "out")
    assert PartialDirectory(tmp_path / "out", "--hf", tmp_path / "source").begin({"of": "this"}) == 1
    partial.finish()
    assert (tmp_path / "out" / "a").read_text() == "new" and leftovers(tmp_path) == ["out"]
    assert leftovers(tmp_path / "out") == ["a"]


def test_killed_between_the_two_renames(tmp_path):
    """What had the name before has it again, and is replaced when the conversion is whole."""
    (tmp_path / ".out.old").mkdir()
    (tmp_path / ".out.old" / "a").write_text("old")
    partial = PartialDirectory(tmp_path / "out", "--hf", tmp_path / "source", overwrite=True)
    partial.begin({"of": "this"})
    assert (tmp_path / "out" / "a").read_text() == "old"
    partial.write("a", lambda file: file.write(b"new"))
    partial.finish()
    assert (tmp_path / "out" / "a").read_text() == "new" and leftovers(tmp_path) == ["out"]


def test_a_place_without_the_right_to_write(conversions):
    root = Path(tempfile.mkdtemp())
    try:
        source = next(megatron for _, megatron in conversions if megatron.endswith("qwen3_moe-one"))
        shutil.copytree(source, root / "megatron")
        (root / "locked").mkdir()
        for path in (root, root / "locked"):
            path.chmod(0o555)
        was_root = os.geteuid() == 0
        os.seteuid(65534) if was_root else None
        try:
            with pytest.raises(ConfigError, match="--hf: .*can't be made: .*locked is not a directory to write into"):
                to_hf(root / "megatron", root / "locked" / "out")
        finally:
            os.seteuid(0) if was_root else None
        assert list((root / "locked").iterdir()) == []
    finally:
        root.chmod(0o755)
        shutil.rmtree(root)
