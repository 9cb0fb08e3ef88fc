"""A contender of `serving.py` in processes of its own: LitServe with the same model, batches and connections.

`python -m benchmarks._serving_litserve LAYERS WIDTH TOKENS PORT`; ends, with what it has started, when its
input does. As its documentation advises for many requests: ZeroMQ between its processes. Requests are JSON,
for it takes nothing else; the array in them is base64, the quickest way to say one in JSON.
"""

from __future__ import annotations

import base64
import os
import signal
import sys
import threading

import litserve
import torch
from torch import Tensor

from benchmarks._serving_app import FEATURES, MAX_BATCH, TIMEOUT_S, network

#: Seconds that a batch waits for more: less than the model takes, so that a lone request hardly notices.
BATCH_TIMEOUT_S = 0.002


class Api(litserve.LitAPI):  # type: ignore[misc]
    def __init__(self, layers: int, width: int, tokens: int) -> None:
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=BATCH_TIMEOUT_S)
        self.sizes = layers, width, tokens

    def setup(self, device: str) -> None:
        layers, width, _ = self.sizes
        if device == "cpu":
            torch.set_num_threads(1)  # as ours
        self.on = device
        self.model = network(layers, width).to(device)

    # Two without annotations: LitServe would take them for what FastAPI shall make of requests and answers.
    def decode_request(self, request):  # type: ignore[no-untyped-def]
        raw = bytearray(base64.b64decode(request["x"]))
        return torch.frombuffer(raw, dtype=torch.float32).view(self.sizes[2], FEATURES)

    def batch(self, inputs: list[Tensor]) -> Tensor:
        return torch.stack(inputs)

    def predict(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            scores: Tensor = self.model(x.to(self.on))[:, -1].cpu()
            return scores

    def unbatch(self, output: Tensor) -> list[Tensor]:
        return list(output)

    def encode_response(self, output):  # type: ignore[no-untyped-def]
        return output.tolist()


def _end_with_parent() -> None:
    os.read(0, 1)  # not sys.stdin: its lock, held here, would hold up every process that is forked
    os.killpg(0, signal.SIGKILL)  # its workers and servers, too: the benchmark gave it a session of its own


def main() -> None:
    layers, width, tokens, port = map(int, sys.argv[1:5])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    server = litserve.LitServer(Api(layers, width, tokens), devices=1, timeout=TIMEOUT_S, fast_queue=True)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="error", access_log=False)


if __name__ == "__main__":
    main()
