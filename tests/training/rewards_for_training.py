"""Rewards that differ between the responses of a random model, so that there is something to learn."""

import os

import psutil


def share_of_letters(response: str, record: dict) -> float:
    """In [0, 1]: how much of the response is letters."""
    return sum(character.isalpha() for character in response) / max(len(response), 1)


def raises(response: str, record: dict) -> float:
    raise ZeroDivisionError("no such reward")


_calls = 0


def share_of_letters_while_the_server_dies(response: str, record: dict) -> float:
    """As `share_of_letters`; call number TEST_KILL_AT kills the processes that serve the model TEST_KILL_MODEL."""
    global _calls
    _calls += 1
    if _calls == int(os.environ["TEST_KILL_AT"]):
        for process in psutil.process_iter(["cmdline"]):
            command = process.info["cmdline"] or []
            if "gspo_megatron.rollout.sglang_cpu" in command and os.environ["TEST_KILL_MODEL"] in command:
                if "gspo_megatron.rollout.supervise" not in command:
                    process.kill()
    return share_of_letters(response, record)
