"""docs/configuration.md is what its script writes, and names every key."""

import subprocess
import sys
from pathlib import Path

from gspo_megatron.config_loader import all_keys

ROOT = Path(__file__).parents[2]


def test_the_page_is_up_to_date_and_complete():
    answer = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_configuration.py", "--check"], capture_output=True, text=True, timeout=60
    )
    assert answer.returncode == 0, answer.stderr
    text = (ROOT / "docs" / "configuration.md").read_text()
    assert [key for key in all_keys() if f"`{key}`" not in text] == []
