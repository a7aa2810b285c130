"""The files that pin versions agree with each other, with setup.py, with the image, and with what is installed."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = ["cpu.txt", "sglang-cpu.txt", "sglang-cpu-nodeps.txt", "constraints.txt"]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(file: str) -> dict[str, str]:
    """Package -> version, of the lines for this Python."""
    found = {}
    for line in (ROOT / "requirements" / file).read_text().splitlines():
        requirement, _, marker = line.partition(";")
        if not requirement.strip() or requirement.startswith(("#", "-c")):
            continue
        if marker and ("<" in marker) != (sys.version_info < (3, 12)):
            continue
        name, version = re.fullmatch(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", requirement.strip()).groups()
        assert normal(name) not in found, f"{file}: {name} twice"
        found[normal(name)] = version
    return found


def test_a_package_in_several_files_has_one_version():
    versions: dict[str, set[str]] = {}
    for file in FILES:
        for name, version in pins(file).items():
            versions.setdefault(name, set()).add(version)
    assert {name: found for name, found in versions.items() if len(found) > 1} == {}


@pytest.mark.parametrize("file", FILES[:3])
def test_what_is_installed_is_what_is_pinned(file):
    installed = {name: importlib.metadata.version(name).partition("+")[0] for name in pins(file)}
    assert installed == pins(file)


def test_exact_versions_of_setup_and_of_the_image_are_those_of_the_files():
    known = {name: version for file in FILES for name, version in pins(file).items()}
    for source in ("setup.py", "Dockerfile"):
        text = (ROOT / source).read_text()
        for name, version in re.findall(r"([\w.-]+)(?:\[\w+\])?==([\w.]+)", text):
            if normal(name) in known and normal(name) != "megatron-core":
                assert known[normal(name)] == version, f"{source}: {name}"


def test_every_direct_dependency_is_explained():
    text = (ROOT / "docs" / "dependencies.md").read_text().lower()
    for name in [*pins("cpu.txt"), *pins("sglang-cpu-nodeps.txt")]:
        assert f"| {name} |" in text, f"docs/dependencies.md has no row for {name}"


def test_apex_is_never_taken_from_the_package_index():
    for file in [*(ROOT / "requirements").glob("*.txt"), ROOT / "setup.py"]:
        assert not re.search(r"""^\s*["']?apex\b""", file.read_text(), re.MULTILINE)


def make_venv(*arguments) -> subprocess.CompletedProcess:
    command = ["bash", ROOT / "requirements" / "make_venv.sh", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def stand_in_python(path: Path, starts: bool) -> Path:
    """A python whose version is right, or which does not start, and which has no venv module."""
    path.write_text(
        f'#!/bin/bash\ncase "$2" in *"import venv"*) exit 1 ;; *print*) echo 3.11 ;; esac\nexit {1 - starts}\n'
    )
    path.chmod(0o755)
    return path


def test_without_a_usable_python_the_message_says_what_to_do(tmp_path):
    for wanted in ("no-such-python", stand_in_python(tmp_path / "broken", starts=False)):
        answer = make_venv(tmp_path / "venv", wanted)
        assert answer.returncode == 1
        assert "no Python 3.11 or 3.12 found" in answer.stderr and "make PYTHON=" in answer.stderr


def test_without_the_venv_module_the_message_names_the_package(tmp_path):
    answer = make_venv(tmp_path / "venv", stand_in_python(tmp_path / "python", starts=True))
    assert answer.returncode == 1 and "apt-get install python3.11-venv" in answer.stderr


def test_an_environment_that_works_is_kept(tmp_path):
    assert make_venv(tmp_path / "venv", sys.executable).returncode == 0
    (tmp_path / "venv" / "kept").touch()
    assert make_venv(tmp_path / "venv", "no-such-python").returncode == 0
    assert (tmp_path / "venv" / "kept").exists()
