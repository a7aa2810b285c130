"""Scripts that no test runs whole still import what is there."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(
    path
    for folder in ("benchmarks", "docs", "examples", "tools")
    for path in (ROOT / folder).rglob("*.py")
    if not path.name.startswith("test_")
)


def test_every_script_imports():
    code = """if True:
        import os, runpy, sys
        for path in sys.argv[1:]:
            print(path, flush=True)
            sys.path[0] = os.path.dirname(path)
            runpy.run_path(path, run_name="script")
    """
    found = subprocess.run(
        [sys.executable, "-c", code, *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert found.returncode == 0, f"{found.stdout.splitlines()[-1]}: {found.stderr[-2000:]}"
    assert len(SCRIPTS) >= 15
