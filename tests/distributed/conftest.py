"""What all layouts are compared with."""

import pytest

from tests.distributed.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> Runs:
    return Runs(tmp_path_factory.mktemp("equivalence"))
