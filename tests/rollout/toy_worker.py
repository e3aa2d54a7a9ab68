"""An engine process without a model: what it samples follows from prompt, seed and position alone.

It breaks on demand: `wake_failures` times a wake-up fails half-way, and `delay_s` makes a token take time.
"""

import hashlib
import socket
import time

from paceline.rollout.foreign.loop import serve


def toy_token(prompt, seed, position):
    """The token at a position, and its log-prob."""
    word = hashlib.blake2b(f"{prompt}{seed}{position}".encode(), digest_size=2).digest()
    return word[0], -word[1] / 64


class ToyEngine:
    def __init__(self, setup):
        self.version, self.setup = 0, setup
        self.running, self.ended = {}, []
        self.wake_failures = setup.get("wake_failures", 0)
        self.asleep = self.half_awake = False
        self.counts = {"num_generated_tokens": 0, "num_prefill_tokens": 0, "num_decode_steps": 0}
        self.received = None

    @property
    def has_work(self):
        return bool(self.running or self.ended)

    def submit(self, order):
        assert not self.asleep, "generating while asleep"
        self.counts["num_prefill_tokens"] += len(order["prompt"])
        for index, sample in enumerate(order["samples"]):
            if sample["ended"]:
                self.ended.append([order["id"], index, [], [], sample["ended"]])
            else:
                self.running[order["id"], index] = (order, sample, len(sample["prefix"]))

    def abort(self, request_id):
        ended = [key for key in self.running if key[0] == request_id]
        for key in ended:
            del self.running[key]
        return [[*key, [], [], "abort"] for key in ended]

    def step(self):
        time.sleep(self.setup.get("delay_s", 0.0))
        rows, self.ended = self.ended, []
        for key, (order, sample, position) in list(self.running.items()):
            if len(rows) == self.setup.get("max_running", 64):
                break
            token, logprob = toy_token(order["prompt"], sample["seed"], position)
            length = (
                order["max_new_tokens"]
                if order["ignore_stop"]
                else sample["seed"] % order["max_new_tokens"] + 1
            )
            ended = position + 1 >= length
            rows.append([*key, [token], [logprob], "stop" if ended else None])
            if ended:
                del self.running[key]
            else:
                self.running[key] = (order, sample, position + 1)
        self.counts["num_generated_tokens"] += len(rows)
        self.counts["num_decode_steps"] += 1
        return rows

    def call(self, name, arguments):
        if name == "stats":
            return {**self.counts, "cache_bytes": 1000, "num_slots": 4}
        if name == "sleep":
            self.asleep, self.half_awake = True, False
            return None
        if name == "wake":
            self.half_awake = True
            if self.wake_failures:
                self.wake_failures -= 1
                self.half_awake = False
                raise MemoryError("no room for the cache")
            self.asleep = False
            return None
        if name == "memory":
            return {"asleep": self.asleep, "half_awake": self.half_awake}
        if name == "score":
            return [[-float(self.version)] * (len(tokens) - 1) for tokens in arguments["prompts"]]
        if name == "load":
            return self.load(**arguments)
        raise ValueError(name)

    def load(self, paths, version):
        from safetensors.torch import load_file

        from paceline.sync.fingerprint import fingerprint

        weights = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        fault = self.setup.get("load_fault")
        if fault == "zeros":
            weights = {name: tensor * 0 for name, tensor in weights.items()}
        if fault == "raises":
            raise OSError("link is down")
        before, self.received = self.received, fingerprint(weights.items())
        held = before if fault == "ignored" else self.received
        self.version = version
        return {"received": self.received, "received_before": before, "before": before, "after": held}


def main(fd, setup):
    if setup.get("never_ready"):
        time.sleep(3600)
    serve(socket.socket(fileno=fd), ToyEngine(setup), {"engine": "toy", "scores": True})
