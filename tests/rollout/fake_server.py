"""A little HTTP that answers like an SGLang server, or fails as told: for faults a real one can't be made to have."""

import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Reply = tuple[int, object]


def good(body: dict, version: str = "1") -> Reply:
    """Two tokens a sample, both with log-prob -1."""
    output = {
        "output_ids": [7, 8],
        "meta_info": {
            "finish_reason": {"type": "length", "length": 2},
            "output_token_logprobs": [[-1.0, 7, None], [-1.0, 8, None]],
            "weight_version": version,
        },
    }
    return 200, [output] * body["sampling_params"]["n"]


class FakeServer:
    """`generate` maps a request body to (status, JSON); a float in place of the status hangs for so many seconds."""

    def __init__(self, generate: Callable[[dict], Reply] = good, max_req_input_len: int = 1000, **facts):
        self.generate, self.requests = generate, []
        self.in_flight = self.peak_in_flight = 0
        self.facts = {"max_req_input_len": max_req_input_len, "model_path": "/nowhere", "version": "0.5.23", **facts}
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                self.answer(200, fake.facts)

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with fake._lock:
                    fake.requests.append(body)
                    fake.in_flight += 1
                    fake.peak_in_flight = max(fake.peak_in_flight, fake.in_flight)
                status, answer = fake.generate(body)
                with fake._lock:
                    fake.in_flight -= 1
                self.answer(status, answer)

            def answer(self, status, answer):
                content = json.dumps(answer).encode()
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)
                except (BrokenPipeError, ConnectionResetError):
                    self.close_connection = True

            def log_message(self, *arguments):
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> "FakeServer":
        self._thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._server.shutdown()
        self._server.server_close()


def slow(seconds: float, reply: Callable[[dict], Reply] = good) -> Callable[[dict], Reply]:
    def generate(body: dict) -> Reply:
        time.sleep(seconds)
        return reply(body)

    return generate
