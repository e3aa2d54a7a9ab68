"""An HTTP server that answers as a recording says, and notes what it was asked."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def matches(expected, asked):
    """Whether a request holds everything the recording names."""
    if isinstance(expected, dict):
        return isinstance(asked, dict) and all(
            matches(value, asked.get(key)) for key, value in expected.items()
        )
    return expected == asked


@contextmanager
def replay_server(exchanges, events_until=None):
    """Address and the list of (method, path, body) asked so far. `events_until` cuts every stream short."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def answer(self):
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            path = self.path.partition("?")[0]
            asked.append((self.command, self.path, body))
            found = next(
                (
                    one
                    for one in exchanges
                    if (
                        (one["method"], one["path"]) == (self.command, path)
                        and matches(one.get("request"), body)
                    )
                    or ((one["method"], one["path"]) == (self.command, path) and "request" not in one)
                ),
                {"status": 404, "response": {"error": f"not recorded: {self.command} {path} {body}"}},
            )
            if "times" in found:  # said so often, then the next in the recording
                found["times"] -= 1
                if not found["times"]:
                    exchanges.remove(found)
            self.send_response(found["status"])
            self.end_headers()
            if "events" in found:
                for event in found["events"][:events_until]:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                    self.wfile.flush()
                if events_until is None:
                    self.wfile.write(b"data: [DONE]\n\n")
            elif "response" in found:
                self.wfile.write(json.dumps(found["response"]).encode())

        do_GET = do_POST = answer

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
