"""Serve the metrics page of a vLLM server with a constant rate, to try `effllm watch` without a GPU and vLLM.

python integration/vllm/stand_in.py --port 8000 --tokens-per-second 1200
"""

from __future__ import annotations

import argparse
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PAGE = """\
# HELP process_start_time_seconds Start time of the process since unix epoch in seconds.
# TYPE process_start_time_seconds gauge
process_start_time_seconds {started:.2f}
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="0",model_name="{model}"}} {running:.1f}
vllm:num_requests_running{{engine="1",model_name="{model}"}} {running:.1f}
# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="{model}"}} {prompt}
vllm:prompt_tokens_total{{engine="1",model_name="{model}"}} {prompt}
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="0",model_name="{model}"}} {generated}
vllm:generation_tokens_total{{engine="1",model_name="{model}"}} {generated}
# HELP vllm:time_to_first_token_seconds Histogram of time to first token in seconds.
# TYPE vllm:time_to_first_token_seconds histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="+Inf",model_name="{model}"}} {requests}
vllm:time_to_first_token_seconds_count{{engine="0",model_name="{model}"}} {requests}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="{model}"}} {waited}
"""


def page(started: float, now: float, tokens_per_second: float, model: str) -> str:
    """Return the page of two engines that share the work; a request has 100 prompt tokens and 200 generated tokens."""
    generated = int((now - started) * tokens_per_second / 2)
    requests = generated // 100
    return PAGE.format(
        started=started,
        running=4,
        prompt=f"{requests * 50:.1f}",
        generated=f"{generated:.1f}",
        requests=f"{requests:.1f}",
        waited=f"{requests * 0.05:.3f}",
        model=model,
    )


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--port", type=int, default=8000)
    options.add_argument("--tokens-per-second", type=float, default=1200.0)
    options.add_argument("--model", default="stand-in")
    given = options.parse_args()
    started = time.time()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = page(started, time.time(), given.tokens_per_second, given.model).encode()
            known = self.path == "/metrics"
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(text) if known else 0))
            self.end_headers()
            if known:
                self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            """Log nothing for a request."""

    server = ThreadingHTTPServer(("127.0.0.1", given.port), Handler)
    print(f"http://127.0.0.1:{server.server_port}/metrics", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


if __name__ == "__main__":
    main()
