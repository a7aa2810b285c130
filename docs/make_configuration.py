"""Writes docs/configuration.md from the dataclasses of config.py and algorithm_config.py, and the texts under their
fields.

python docs/make_configuration.py            # writes it
python docs/make_configuration.py --check    # exit 1 where it is out of date
"""

import ast
import dataclasses
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from gspo_megatron import algorithm_config  # noqa: E402
from gspo_megatron import config as schema  # noqa: E402
from gspo_megatron.checks import GUARDS, RANGES  # noqa: E402

TARGET = ROOT / "docs" / "configuration.md"

HEAD = """# Configuration

Written by `docs/make_configuration.py` from `gspo_megatron/config.py` and `algorithm_config.py`; do not edit it here.

A run is one YAML file with the sections below, all optional but for the keys marked required. Every key can be
overridden on the command line by its path, with the value in YAML; a mapping is merged into what the file has:

    torchrun ... -m gspo_megatron train run.yaml train.steps=10 optimizer.lr=3e-6 'parallel={tensor: 2, expert: 4}'

`python -m gspo_megatron check run.yaml --world-size N` judges the file and everything that it points to without a GPU,
prints the layout and the memory of a rank, and exits with 2 and one line a fault when something is wrong. An unknown
key, a wrong type, a key given twice, and a choice that does not exist are faults.
"""


def read_texts() -> dict[str, tuple[str, dict[str, tuple[str, str]]]]:
    """Class -> (its docstring, own field -> (type as written, text below the field))."""
    files = [Path(module.__file__).read_text(encoding="utf-8") for module in (algorithm_config, schema)]
    classes = {}
    for node in [node for text in files for node in ast.parse(text).body]:
        if not isinstance(node, ast.ClassDef):
            continue
        fields = {}
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                text = " ".join(str(following.value.value).split()) if is_text else ""
                fields[statement.target.id] = (ast.unparse(statement.annotation), text)
        classes[node.name] = (" ".join((ast.get_docstring(node) or "").split()), fields)
    return classes


def section_text(cls: type, path: str, texts: dict, title: str) -> list[str]:
    """Heading, introduction and table of one dataclass, then those of the sections inside it."""
    fields = _fields_with_texts(cls, texts)
    lines = [f"## {title}", ""]
    if texts[cls.__name__][0]:
        lines += [texts[cls.__name__][0], ""]
    lines += ["| key | type | default | meaning |", "| --- | --- | --- | --- |"]
    inner = []
    for field in dataclasses.fields(cls):
        kind, text = fields[field.name]
        nested = next(
            (getattr(schema, word) for word in kind.replace("|", " ").split() if word.endswith("Config")), None
        )
        if nested is not None:
            inner += ["", *section_text(nested, f"{path}.{field.name}", texts, f"{path}.{field.name}")]
            kind, text = "section", f"See [{path}.{field.name}](#{path}{field.name}). {text}".strip()
        allowed = RANGES.get(f"{path}.{field.name}", ("", None))[0]
        text = f"{text} Must be {allowed}." if allowed else text
        lines.append(f"| `{path}.{field.name}` | {_kind(kind)} | {_default(field)} | {_cell(text)} |")
    return lines + inner


def _fields_with_texts(cls: type, texts: dict) -> dict[str, tuple[str, str]]:
    """Field -> (type, text), where a redefined field without a text of its own keeps its base's."""
    fields: dict[str, tuple[str, str]] = {}
    for base in reversed(cls.__mro__):
        for name, (kind, text) in texts.get(base.__name__, ("", {}))[1].items():
            fields[name] = (kind, text or fields.get(name, ("", ""))[1])
    return fields


def _kind(annotation: str) -> str:
    if annotation.startswith("Literal["):
        return " or ".join(f"`{choice}`" for choice in ast.literal_eval(f"[{annotation[8:-1]}]"))
    if annotation.startswith("tuple[Literal["):
        return "list of " + _kind(annotation[6 : annotation.index("]") + 1])
    names = {"str": "text", "int": "integer", "float": "number", "bool": "true or false", "dict[str, Any]": "mapping"}
    lists = {"tuple[str, ...]": "list of text", "tuple[int, ...]": "list of integers"}
    return (names | lists).get(annotation, annotation)


def _default(field: dataclasses.Field) -> str:
    value: Any = field.default_factory() if field.default is dataclasses.MISSING else field.default
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, tuple):
        return "`[]`"
    return f"`{value}`"


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def document() -> str:
    texts = read_texts()
    lines = [HEAD]
    for field in dataclasses.fields(schema.Config):
        if field.name != "loss":
            lines += [*section_text(type(getattr(schema.Config(), field.name)), field.name, texts, field.name), ""]
            continue
        for name, cls in schema.LOSS_CONFIGS.items():
            lines += [*section_text(cls, "loss", texts, f"loss, with `name: {name}`"), ""]
        lines += ["Guards that `loss.i_know_what_i_do` switches off:", ""]
        lines += [*(f"- `{name}`: {what}" for name, what in GUARDS.items()), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    text = document()
    if "--check" in sys.argv[1:]:
        if TARGET.exists() and TARGET.read_text(encoding="utf-8") == text:
            return 0
        print(f"{TARGET.relative_to(ROOT)} is out of date; run python docs/make_configuration.py", file=sys.stderr)
        return 1
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
