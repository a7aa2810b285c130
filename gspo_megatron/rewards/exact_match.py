"""1 for the very answer."""

from typing import Any


def score(response_text: str, record: dict[str, Any]) -> float:
    """1.0 where the stripped response is the record's `answer`, else 0.0. Raises ValueError without an `answer`."""
    if "answer" not in record:
        raise ValueError(f"the record has no `answer`, only {sorted(record)}")
    return float(response_text.strip() == str(record["answer"]).strip())
