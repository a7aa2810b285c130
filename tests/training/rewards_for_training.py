"""Rewards that differ between the responses of a random model, so that there is something to learn."""


def share_of_letters(response: str, record: dict) -> float:
    """In [0, 1]: how much of the response is letters."""
    return sum(character.isalpha() for character in response) / max(len(response), 1)


def raises(response: str, record: dict) -> float:
    raise ZeroDivisionError("no such reward")
