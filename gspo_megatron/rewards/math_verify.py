"""Mathematical equality by the math-verify library."""

from typing import Any

from math_verify import parse, verify


def score(response_text: str, record: dict[str, Any]) -> float:
    """1.0 where the last mathematical expression of the response equals the record's `answer`, else 0.0.

    The answer is LaTeX or a plain number, with or without `$`. Raises ValueError where it is missing or unreadable.
    """
    if "answer" not in record:
        raise ValueError(f"the record has no `answer`, only {sorted(record)}")
    answer = str(record["answer"])
    expected = parse(answer if "$" in answer or "\\boxed" in answer else f"${answer}$")
    if not expected:
        raise ValueError(f"math-verify can't read the answer {answer!r}")
    return float(verify(expected, parse(response_text)))
