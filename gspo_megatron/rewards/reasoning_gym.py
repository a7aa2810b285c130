"""The scoring function of the reasoning-gym task that a problem comes from."""

import json
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import create_dataset


@lru_cache
def _dataset(task: str, options: str):
    return create_dataset(task, **{**json.loads(options), "size": 1})


def score(response_text: str, record: dict[str, Any]) -> float:
    """The task's own score of the stripped response, in [0, 1]; `record` is as made by `data.py`.

    Several tasks raise on a response that their parser doesn't expect ("[[]]" to boxnet, any text to
    prime_factorization): such a response scores 0. If the task can't score its own answer either, that is no matter of
    the response, and its exception goes out. Raises ValueError for a record of another data set.
    """
    if "task" not in record:
        raise ValueError("the record has no `task`: this reward is for data.train=reasoning_gym:TASK")
    dataset = _dataset(record["task"], json.dumps(record.get("options", {}), sort_keys=True))
    try:
        return float(dataset.score_answer(response_text.strip(), record))
    except Exception:
        dataset.score_answer(record["answer"] or "", record)
        return 0.0
