"""What tests ask of a real server."""

import httpx


def is_paused(url: str) -> bool:
    """Whether the server takes a request and does not answer it."""
    try:
        body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 1}}
        httpx.post(f"{url}/generate", json=body, timeout=2.0, trust_env=False)
    except httpx.ReadTimeout:
        return True
    return False
