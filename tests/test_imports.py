"""Who may import whom: the rooms of the package, and no import cycle, imports inside functions included."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gspo_megatron"
MODULES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}
ROOMS = {
    "algorithm_config": set(),
    "config": {"algorithm_config"},
    "file_lock": set(),
    "types": set(),
    "algorithm": {"algorithm_config", "config", "types"},
    "backend": {"config", "types", "algorithm", "weights"},
    "weights": {"config", "file_lock"},
    "rollout": {"config", "file_lock", "types", "weights"},
    "rewards": {"algorithm_config", "config", "types"},
    "data": {"config", "types"},
    "metrics": {"config"},
    "report": {"metrics"},
    "compare": {"metrics"},
}
"""Room -> other rooms that it may import. What stands in no row (the trainer and its helpers) may import all rooms."""
OUTSIDE = {"megatron": {"backend"}, "sglang": {"rollout"}}
"""Library -> rooms that may import it."""
WITHOUT_TORCH = {
    "algorithm_config", "checks", "compare", "config", "config_loader", "guards", "layout", "passthrough", "plugins",
    "report", "rewards", "topology", "yaml_strict",
}  # fmt: skip
"""What must be importable at once: no torch outside functions."""


def room_of(module):
    return (module.split(".") + [""])[1]


def imports_of(module, top_level=False):
    """Full names of the modules that a module imports, in functions too unless `top_level`."""
    tree = ast.parse(MODULES[module].read_text())
    for node in tree.body if top_level else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative import"
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


@pytest.mark.parametrize("module", MODULES)
def test_directions(module):
    room = room_of(module)
    for imported in imports_of(module):
        library, other = imported.split(".")[0], room_of(imported)
        assert room in OUTSIDE.get(library, {room}), f"{module} imports {imported}"
        if room in ROOMS and imported in MODULES and imported != "gspo_megatron":
            assert other in ROOMS[room] | {room}, f"{module} imports {imported}"
    if room in WITHOUT_TORCH:
        assert not [name for name in imports_of(module, top_level=True) if name.split(".")[0] == "torch"], module


def test_no_cycles():
    graph = {module: {name for name in imports_of(module) if name in MODULES} - {module} for module in MODULES}
    assert list(TopologicalSorter(graph).static_order())  # raises CycleError naming the cycle
