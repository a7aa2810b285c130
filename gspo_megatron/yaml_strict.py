"""YAML as people expect it: `3e-4` is a number, and a key given twice is an error with its line."""

import re
from typing import Any

import yaml

_FLOAT = re.compile(
    r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_FLOAT_STARTS = list("-+0123456789.")


class _Loader(yaml.SafeLoader):
    def __init__(self, stream):
        super().__init__(stream)
        self.duplicates: list[str] = []


class _Dumper(yaml.SafeDumper):
    """Quotes the strings that `_Loader` would read as numbers."""

    def ignore_aliases(self, data):
        return True


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    mapping: dict[Any, Any] = {}
    first_lines: dict[Any, int] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if not isinstance(key, (str, int, float, bool, type(None))):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a name", key_node.start_mark)
        if key in mapping:
            loader.duplicates.append(f"{key}: given twice, on line {first_lines[key]} and on line {line}; remove one")
        value = loader.construct_object(value_node, deep=True)
        if isinstance(value, dict) and isinstance(mapping.get(key), dict):
            value = mapping[key] | value  # so that faults inside both are found
        mapping[key] = value
        first_lines.setdefault(key, line)
    return mapping


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _construct_mapping)
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, _FLOAT_STARTS)


def parse(text: str, origin: str) -> tuple[Any, list[str]]:
    """The value of a YAML document, and its faults, one line each, which name `origin` and the line."""
    loader = _Loader(text)
    try:
        value = loader.get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        return None, [f"{origin}: not valid YAML: {place}{getattr(error, 'problem', None) or error}"]
    finally:
        loader.dispose()
    return value, [f"{origin}: {fault}" for fault in loader.duplicates]


def dump(value: Any) -> str:
    """YAML text that `parse` reads back to the same value."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, default_flow_style=False, width=120, allow_unicode=True)
