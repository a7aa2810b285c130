"""What can go wrong between the trainer and its servers."""

MESSAGE_LENGTH = 2000


class ServerError(RuntimeError):
    """A server process could not be started, or ended by itself; the message quotes the end of its log."""


class RequestError(RuntimeError):
    """A server refused a request or did not answer it.

    `message` holds the server's words in full, the exception's text their beginning. `status` is the HTTP status, or
    None where no answer came; `retryable` tells whether another try may go well.
    """

    def __init__(self, url: str, endpoint: str, status: int | None, message: str):
        self.url, self.endpoint, self.status, self.message = url, endpoint, status, message
        outcome = "no answer" if status is None else f"HTTP {status}"
        super().__init__(f"{url}{endpoint}: {outcome}: {message[:MESSAGE_LENGTH]}")

    @property
    def retryable(self) -> bool:
        return self.status is None or self.status >= 500


class RolloutError(RuntimeError):
    """A step's responses could not be collected."""


class ServersLost(RolloutError):
    """No server is left that has the current weights; the collection can go on when one has them again."""


class WeightSyncError(RuntimeError):
    """A weight update did not come through whole; the servers it names stay paused."""
