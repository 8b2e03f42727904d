#!/usr/bin/env python3
"""Ordinary clients of `train_low_mem serve` beside hostile ones.

    python scripts/check_serve_neighbours.py --binary target/release/train_low_mem --model runs/a --memory-budget 80MiB
    python scripts/check_serve_neighbours.py --binary target/release/train_low_mem --model runs/ranker --endpoint rerank

Eight clients ask short questions one after the other, in turn alone and beside one hostile client of each kind: heads of a byte a second, bodies of a
byte a second, 128 connections that are kept alive, large nested JSON, prompts of blanks, streams that nobody reads, long answers without end, heads
that are no HTTP, and floods that are accepted: the longest prompts, as many of the longest texts as a request may have, and as many short texts. The floods
go to each path that the model serves, whichever path the ordinary clients ask (`--endpoint`). Each client has an address of its own on loopback; with
`--one-address` all have the same. The times alone and beside are taken in many short turns, so that other work of the machine meets both alike. The script
fails if the 99th percentile of the ordinary clients more than doubles, or if one of them gets anything but its answer. It needs only Python.
"""
import argparse
import json
import multiprocessing
import os
import select
import socket
import sys
import threading
import time

from served import add_options, bytes_of, origin, parsed, record, serve

CLIENTS = 8
JSON = "Content-Type: application/json\r\n"


def hostile(kind, server, own):
    """A client whose own work takes no processor from the server: in earnest it is another machine."""
    os.nice(19)
    HOSTILE[kind](server, own)


def connect(server, own):
    host, port = server.split(":")
    return socket.create_connection((host, int(port)), timeout=60, source_address=(own, 0))


def post(body, more="", path="/v1/completions"):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{JSON}{more}Content-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def answer(stream):
    """One response: its status and its body."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = stream.recv(1 << 16)
        if not part:
            raise ConnectionError("closed")
        data += part
    head, body = data.split(b"\r\n\r\n", 1)
    length = int(next(line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")))
    while len(body) < length:
        body += stream.recv(1 << 16)
    return int(head.split(b" ")[1]), body


SHORT = ["one two three", "two cows eat grass", "three", "four lions and a mouse"]
ORDINARY = {
    "completions": post({"prompt": "reverse: dog salt", "max_tokens": 8, "min_tokens": 8}),
    "chat": post({"messages": [{"role": "user", "content": "reverse: dog salt"}], "max_tokens": 8, "min_tokens": 8}, path="/v1/chat/completions"),
    "rerank": post({"query": "what do cows eat", "documents": SHORT}, path="/v1/rerank"),
    "embeddings": post({"input": SHORT}, path="/v1/embeddings"),
}


def ordinary(server, own, seconds, ask, result):
    """Asks, one question after the other, every second one on a new connection."""
    times, faults, stream = [], [], None
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        at = time.monotonic()
        try:
            if stream is None or len(times) % 2:
                stream = connect(server, own)
            stream.sendall(ask)
            status, body = answer(stream)
            if status != 200:
                faults.append(f"{status} {body[:120]!r}")
        except OSError as error:
            faults.append(repr(error))
            stream = None
        times.append(time.monotonic() - at)
        at = time.monotonic()
        try:
            probe = connect(server, own)
            probe.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            if answer(probe)[0] != 200:
                faults.append("/health")
            probe.close()
        except OSError as error:
            faults.append(f"/health {error!r}")
        result["health"].append(time.monotonic() - at)
    result["times"] += times
    result["faults"] += faults


def drip(begin):
    """A client of 64 connections that send a byte a second."""
    def run(server, own):
        streams = []
        while True:
            streams = [stream for stream in streams if is_open(stream, b"x")]
            while len(streams) < 64:
                streams.append(connect(server, own))
                streams[-1].sendall(begin)
            time.sleep(1)
    return run


def is_open(stream, byte):
    try:
        stream.sendall(byte)
        return True
    except OSError:
        return False


def kept_alive(server, own):
    """128 connections, each with a request every four seconds."""
    streams = [None] * 128
    while True:
        for place, stream in enumerate(streams):
            try:
                stream = streams[place] = stream or connect(server, own)
                stream.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer(stream)
            except OSError:
                streams[place] = None
            time.sleep(4 / 128)


def long_answers(server, own):
    """Sixteen connections that always wait for a long answer, of which each has four texts."""
    ask = post({"prompt": "a b c", "max_tokens": 256, "min_tokens": 256, "n": 4, "temperature": 1.0})
    always_wait(server, own, ask)


def always_wait(server, own, ask):
    """Sixteen connections that ask again as soon as their answer comes."""
    streams = [None] * 16
    while True:
        for place, stream in enumerate(streams):
            if stream is not None and not select.select([stream], [], [], 0)[0]:
                continue
            try:
                if stream is not None:
                    answer(stream)
                stream = streams[place] = stream or connect(server, own)
                stream.sendall(ask)
            except OSError:
                streams[place] = None
        time.sleep(0.02)


def flood(path, body, longest):
    """Sixteen connections that always wait for the answer to an accepted request. `body` makes it of the longest text that is accepted there."""
    def run(server, own):
        text = longest_text(server, own, path, body) if longest else "a b"
        always_wait(server, own, post(body([text] * texts_of_body(text)), path=path))
    return run


def texts_of_body(text):
    """How many of these texts a request may have."""
    return max(1, min(64, (120 << 10) // (len(text) + 4)))


def longest_text(server, own, path, body):
    """The longest of some texts that the server accepts, by asking."""
    accepted, refused = 1, 1 << 12
    while refused - accepted > 8:
        words = (accepted + refused) // 2
        with connect(server, own) as stream:
            stream.sendall(post(body(["one two " * words]), path=path))
            status = answer(stream)[0]
        accepted, refused = (words, refused) if status == 200 else (accepted, words)
    return "one two " * accepted


def serves(server, path, body):
    """Whether the model of the server answers on a path."""
    with connect(server, "127.0.0.1") as stream:
        stream.sendall(post(body(["a"]), path=path))
        return answer(stream)[0] == 200


def one_by_one(asks, pause, reads=True):
    """A client that sends these bytes, each time on a new connection."""
    def run(server, own):
        unread = []
        for number in range(1 << 30):
            try:
                stream = connect(server, own)
                if not reads:
                    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                stream.sendall(asks[number % len(asks)])
                if reads:
                    stream.settimeout(5)
                    stream.recv(1 << 16)
                    stream.close()
                else:
                    unread = [*unread[-24:], stream]
            except OSError:
                pass
            time.sleep(pause)
    return run


NESTED = b"[" * 120 + b"0" + b"]" * 120
LARGE = b'{"prompt":["a"],"metadata":[' + b",".join([NESTED] * ((127 << 10) // (len(NESTED) + 1))) + b"]}"
HEAD = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{JSON}"
HOSTILE = {
    "slow heads": drip(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: "),
    "slow bodies": drip(f"{HEAD}Content-Length: 1000\r\n\r\n".encode() + b'{"prompt":"'),
    "kept alive": kept_alive,
    "large JSON": one_by_one([post(LARGE.replace(b'["a"]', b"[true]"))], 0.05),
    "blanks": one_by_one([post({"prompt": blank * ((120 << 10) // len(blank.encode()))}) for blank in (" ", "\u3000", "\u200b")], 0.05),
    "unread streams": one_by_one([post({"prompt": "a b c", "stream": True, "max_tokens": 256, "min_tokens": 256})], 0.2, reads=False),
    "long answers": long_answers,
    "long prompts": flood("/v1/completions", lambda texts: {"prompt": texts[:16], "max_tokens": 1}, True),
    "long documents": flood("/v1/rerank", lambda texts: {"query": "one", "documents": texts}, True),
    "short documents": flood("/v1/rerank", lambda texts: {"query": "one", "documents": texts}, False),
    "long inputs": flood("/v1/embeddings", lambda texts: {"input": texts}, True),
    "short inputs": flood("/v1/embeddings", lambda texts: {"input": texts}, False),
    "no HTTP": one_by_one([b"GET / HTTP/9\r\n\r\n", b"\x16\x03\x01garbage\r\n\r\n", b"GET /" + b"a" * 70000 + b" HTTP/1.1\r\n\r\n"], 0.02),
}


# The kinds that need a model which serves the path.
NEEDS = {
    "long answers": ("/v1/completions", lambda texts: {"prompt": texts, "max_tokens": 1}),
    "unread streams": ("/v1/completions", lambda texts: {"prompt": texts, "max_tokens": 1}),
    "long prompts": ("/v1/completions", lambda texts: {"prompt": texts, "max_tokens": 1}),
    "long documents": ("/v1/rerank", lambda texts: {"query": "one", "documents": texts}),
    "short documents": ("/v1/rerank", lambda texts: {"query": "one", "documents": texts}),
    "long inputs": ("/v1/embeddings", lambda texts: {"input": texts}),
    "short inputs": ("/v1/embeddings", lambda texts: {"input": texts}),
}


def measured(server, one_address, seconds, ask, result):
    """Adds the times of all ordinary clients to the result."""
    own = lambda number: "127.0.0.1" if one_address else f"127.0.0.{100 + number}"
    threads = [threading.Thread(target=ordinary, args=(server, own(number), seconds, ask, result)) for number in range(CLIENTS)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]


def summary(result):
    at = lambda times, share: sorted(times)[int(len(times) * share)] * 1e3
    numbers = {"answers": len(result["times"]), "p50_ms": at(result["times"], 0.5), "p99_ms": at(result["times"], 0.99),
               "health_p99_ms": at(result["health"], 0.99)}
    return {name: round(number, 1) for name, number in numbers.items()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--seconds", type=int, default=4, help="of a turn")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--one-address", action="store_true")
    parser.add_argument("--endpoint", choices=list(ORDINARY), default="completions", help="of the ordinary clients")
    parser.add_argument("--kinds", nargs="*", choices=list(HOSTILE), help="of hostile clients; by default all that the model can be asked")
    options = parsed(parser)
    failed, alone, beside = [], *({"times": [], "health": [], "faults": []} for _ in range(2))
    with serve(options.binary, options.model, memory_budget=options.memory_budget, in_group=options.group) as server:
        ask = ORDINARY[options.endpoint]
        kinds = options.kinds or [kind for kind in HOSTILE if kind not in NEEDS or serves(server.address, *NEEDS[kind])]
        measured(server.address, options.one_address, 2, ask, {"times": [], "health": [], "faults": []})
        own = lambda number: "127.0.0.1" if options.one_address else f"127.0.0.{2 + number}"
        for _ in range(options.turns):
            server.idle()
            measured(server.address, options.one_address, options.seconds, ask, alone)
            processes = [multiprocessing.Process(target=hostile, args=(kind, server.address, own(number)), daemon=True)
                         for number, kind in enumerate(kinds)]
            [process.start() for process in processes]
            time.sleep(2)
            measured(server.address, options.one_address, options.seconds, ask, beside)
            [process.kill() for process in processes]
        status, numbers = server.status(), {"alone": summary(alone), "beside": summary(beside)}
        ratio = numbers["beside"]["p99_ms"] / numbers["alone"]["p99_ms"]
        faults = beside["faults"]
        result = {"run": origin(), "endpoint": options.endpoint, "kinds": kinds, "one_address": options.one_address, **numbers, "ratio": round(ratio, 2),
                  "faults": len(faults), "status": status}
        record(result, server, options.output)
        if faults:
            failed.append(f"{len(faults)} of {len(beside['times'])} were not answered: {faults[0]}")
        if ratio > 2:
            failed.append(f"the 99th percentile is {ratio:.2f} times that without hostile clients")
        if options.memory_budget and status["peak_rss_bytes"] > bytes_of(options.memory_budget):
            failed.append(f"peak: {status['peak_rss_bytes']} bytes of {options.memory_budget}")
    for failure in failed:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
