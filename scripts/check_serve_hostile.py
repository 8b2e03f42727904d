#!/usr/bin/env python3
"""Sends hostile requests to `train_low_mem serve`.

    python scripts/check_serve_hostile.py --binary target/release/train_low_mem --model runs/a

Heads and bodies of a byte a second on many connections, bodies that are too large, broken or cut off, wrong types, garbage behind
a good request, heads that are too large, unknown paths and methods, and clients that leave in the middle of a stream. Each must get
an error in OpenAI's form with the right status, or be closed within the documented time. Afterwards the server must still answer, and
have the same open files, threads and memory as after the first round. With `--memory-budget` and `--group` it runs in a hard
memory group, as in check_serve.py. It needs only Python.
"""
import argparse
import json
import socket
import struct
import sys
import threading
import time

from served import add_options, bytes_of, origin, parsed, record, serve

# The limits of docs/serve.md.
HEAD_SECONDS = BODY_SECONDS = 10
CONNECTIONS = 128
MAX_BODY = 128 << 10
# Tolerance for a busy machine.
LATE_SECONDS = 5

PATH = "/v1/completions"
JSON = "Content-Type: application/json\r\n"


class Failed(Exception):
    pass


def head(method, path, headers=""):
    return f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}\r\n".encode()


def post(body, headers=JSON, path=PATH, length=None):
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, f"{headers}Content-Length: {len(body) if length is None else length}\r\nConnection: close\r\n") + body


def connect(address):
    host, port = address.split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def read_all(stream):
    data = b""
    try:
        while part := stream.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    return data


def exchange(address, data, half_close=False):
    """Sends data and reads until the server closes the connection."""
    with connect(address) as stream:
        try:
            stream.sendall(data)
            if half_close:
                stream.shutdown(socket.SHUT_WR)
        except ConnectionError:
            pass  # The server has refused before it had received everything.
        return read_all(stream)


def parts(answer):
    first, _, body = answer.partition(b"\r\n\r\n")
    lines = first.decode("latin-1").split("\r\n")
    return int(lines[0].split()[1]), lines, body


def refusal(answer, status, code=None):
    """Checks that the answer is one error, in OpenAI's form."""
    if not answer:
        raise Failed("closed without an answer")
    got, lines, body = parts(answer)
    if got != status:
        raise Failed(f"expected {status}, got {lines[0]}")
    try:
        error = json.loads(body)["error"]
        is_typed = all(isinstance(error[key], str) for key in ("message", "type", "code")) and "param" in error
    except (ValueError, KeyError, TypeError):
        is_typed = False
    if not is_typed or "content-type: application/json" not in [line.lower() for line in lines]:
        raise Failed(f"expected an error in OpenAI's form, got {answer[:200]!r}")
    if code and error["code"] != code:
        raise Failed(f"expected the code {code}, got {error['code']}")


GOOD = post({"prompt": "a", "max_tokens": 4})


def answers(address):
    status, lines, body = parts(exchange(address, GOOD))
    if status != 200 or not isinstance(json.loads(body)["choices"][0]["text"], str):
        raise Failed(f"a good request got {lines[0]}")


def one_answers(cases):
    """Sends each request on a connection of its own, and checks its answer."""
    def run(address):
        failed = []
        for name, data, *expected in cases:
            try:
                refusal(exchange(address, data), *expected)
            except Failed as failure:
                failed.append(f"{name}: {failure}")
            except TimeoutError:
                failed.append(f"{name}: neither answered nor closed within 60 s")
        if failed:
            raise Failed("; ".join(failed))
        return len(cases)
    return run


JSON_CASES = [
    (f"body {body[:24]!r}", post(body), 400, "invalid_json")
    for body in (b"", b"{", b"nonsense", b'{"prompt":"a"', b'{"prompt":"\xff\xfe"}', b"\xff" * 64, b'{"prompt":"\\ud800"}', b'{"prompt":"a"}}', b'{"prompt":' + b"[" * 50_000)
]
TYPE_CASES = [
    (f"value {json.dumps(body)[:60]}", post(body), 400)
    for body in (
        [], "a", 5, None, {}, {"prompt": None}, {"prompt": 5}, {"prompt": {"a": 1}}, {"prompt": [[["a"]]]}, {"prompt": [True]}, {"prompt": [-1]}, {"prompt": [1e9]},
        {"prompt": [1 << 40]}, {"prompt": "a", "max_tokens": "many"}, {"prompt": "a", "max_tokens": -1}, {"prompt": "a", "max_tokens": 1.5}, {"prompt": "a", "n": 0},
        {"prompt": "a", "n": 1 << 70}, {"prompt": "a", "temperature": "hot"}, {"prompt": "a", "temperature": -1}, {"prompt": "a", "temperature": 1e300},
        {"prompt": "a", "top_p": 2}, {"prompt": "a", "stream": "yes"}, {"prompt": "a", "stop": 5}, {"prompt": "a", "stop": [[]]}, {"prompt": "a", "stop": ["x"] * 1000},
        {"prompt": "a", "seed": "one"}, {"prompt": "a", "num_beams": 1 << 30}, {"prompt": "a", "model": 7}, {"prompt": "a", "logit_bias": {"1": 1}},
        {"prompt": "a", "nothing": 1}, {"prompt": ["a"] * 1000}, {"prompt": "word " * 5000}, {"prompt": "a", "stream_options": 3},
    )
] + [
    (f"chat {json.dumps(body)[:60]}", post(body, path="/v1/chat/completions"), 400)
    for body in (
        {"messages": "a"}, {"messages": []}, {"messages": [5]}, {"messages": [{}]}, {"messages": [{"role": "user"}]}, {"messages": [{"role": 1, "content": "a"}]},
        {"messages": [{"role": "user", "content": 5}]}, {"messages": [{"role": "nobody", "content": "a"}]}, {"messages": [{"role": "user", "content": "a"}] * 2000},
        {"messages": [{"role": "user", "content": "a"}], "tools": [{}]},
    )
]
HEAD_CASES = [
    ("a head of 1 MiB", head("GET", "/health", f"X: {'x' * (1 << 20)}\r\n"), 431),
    ("a path of 64 KiB", head("GET", "/" + "x" * (64 << 10)), 431),
    ("1,000 fields", head("GET", "/health", "A: b\r\n" * 1000), 431),
    ("no HTTP", b"\0\1\2\3 nonsense\r\n\r\n", 400),
    ("TLS", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    ("HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    ("another version", b"GET / HTTP/9.9\r\n\r\n", 400),
    ("a field without a colon", head("GET", "/health", "nonsense\r\n"), 400),
    ("a zero byte in a field", head("GET", "/health", "X: a\0b\r\n"), 400),
    ("a space before a colon", head("GET", "/health", "X : a\r\n"), 400),
    ("two lengths", head("POST", PATH, JSON + "Content-Length: 4\r\nContent-Length: 5\r\n") + b"abcde", 400),
    ("a length that is no number", head("POST", PATH, JSON + "Content-Length: ten\r\n") + b"abcde", 400),
    ("a negative length", head("POST", PATH, JSON + "Content-Length: -1\r\n") + b"abcde", 400),
    ("an unknown encoding", head("POST", PATH, JSON + "Transfer-Encoding: nonsense\r\n") + b"abcde", 400),
    ("a chunk whose size is no number", head("POST", PATH, JSON + "Transfer-Encoding: chunked\r\nConnection: close\r\n") + b"zz\r\nabc\r\n0\r\n\r\n", 400),
    ("a chunk of 2^64 bytes", head("POST", PATH, JSON + "Transfer-Encoding: chunked\r\nConnection: close\r\n") + b"fffffffffffffffff\r\nabc", 400),
]
CLOSE = "Connection: close\r\n"
PATH_CASES = [
    ("an unknown path", head("GET", "/nothing", CLOSE), 404, "unknown_path"),
    ("a path of dots", head("GET", "/../../etc/passwd", CLOSE), 404, "unknown_path"),
    ("a path of percent signs", head("GET", "/%00%ff%2e%2e", CLOSE), 404, "unknown_path"),
    ("the path *", head("OPTIONS", "*", CLOSE), 404, "unknown_path"),
    ("an unknown model", head("GET", "/v1/models/%ff%00", CLOSE), 404, "model_not_found"),
    ("an unknown method", head("BREW", PATH, CLOSE), 405, "method_not_allowed"),
    ("another method", head("DELETE", PATH, CLOSE), 405, "method_not_allowed"),
    ("a body where none is taken", head("POST", "/health", CLOSE + "Content-Length: 3\r\n") + b"abc", 405, "method_not_allowed"),
    ("another kind of body", post({"prompt": "a"}, "Content-Type: text/plain\r\n"), 415, "not_json"),
    ("no kind of body", post({"prompt": "a"}, ""), 415, "not_json"),
    ("another host", b"GET /health HTTP/1.1\r\nHost: attacker.example\r\nConnection: close\r\n\r\n", 421, "unknown_host"),
    ("a body of 1 TB", head("POST", PATH, JSON + "Content-Length: 1000000000000\r\n"), 413, "body_too_large"),
    ("a body of one byte too many", post(b" " * (MAX_BODY + 1)), 413, "body_too_large"),
    ("a body of 8 MiB", post(b" " * (8 << 20)), 413, "body_too_large"),
]


def cut_off(address):
    """A body that is shorter than its length, from a client that has closed its side."""
    for sent in (0, 1, 20):
        data = post({"prompt": "a", "max_tokens": 4})
        begins = data.index(b"\r\n\r\n") + 4
        answer = exchange(address, data[: begins + sent], half_close=True)
        if answer:
            refusal(answer, 400, "incomplete_body")
    return 3


def endless_chunks(address):
    """Chunks that never end are refused at the limit."""
    with connect(address) as stream:
        stream.sendall(head("POST", PATH, JSON + "Transfer-Encoding: chunked\r\n"))
        sent = 0
        try:
            while sent < 64 << 20:
                stream.sendall(b"1000\r\n" + b" " * 0x1000 + b"\r\n")
                sent += 0x1000
        except ConnectionError:
            pass
        else:
            raise Failed("64 MiB were taken")
        answer = read_all(stream)
        # The reset that follows may overtake the answer.
        if answer:
            refusal(answer, 413, "body_too_large")
    return 1


def pipelined(address):
    """Garbage behind a good request: the first is answered, the second refused."""
    keep = GOOD.replace(b"Connection: close\r\n", b"")
    for garbage in (b"\0\1\2\3 nonsense\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", head("GET", "/" + "x" * (64 << 10))):
        answer = exchange(address, keep + garbage)
        first, separator, second = answer.partition(b"HTTP/1.1 4")
        if parts(first)[0] != 200 or not separator:
            raise Failed(f"expected an answer and a refusal, got {answer[:300]!r}")
        refusal(separator + second, 431 if len(garbage) > 1000 else 400)
    # Twenty at once, in order.
    answer = exchange(address, keep * 19 + GOOD)
    if answer.count(b"HTTP/1.1 200 OK") != 20:
        raise Failed(f"expected 20 answers, got {answer.count(b'HTTP/1.1 200 OK')}")
    return 4


def slowly(address, begin, rest, count, allowed, expected, fills=False):
    """Sends a byte a second on many connections at once. All must be refused, as one of `expected`, and closed in time. Other clients are
    served meanwhile. If the slow clients fill all places, they give way."""
    failed, slowest = [], [0.0]

    def one():
        begun = time.monotonic()
        try:
            with connect(address) as stream:
                stream.sendall(begin)
                answer, at = b"", 0
                stream.settimeout(1)
                while time.monotonic() - begun < allowed + LATE_SECONDS:
                    try:
                        part = stream.recv(1 << 16)
                        if not part:
                            break
                        answer += part
                    except TimeoutError:
                        if not answer:
                            stream.sendall(rest[at : at + 1])
                            at += 1
                else:
                    raise Failed(f"not closed within {allowed + LATE_SECONDS} s")
            status = parts(answer)[0] if answer else None
            # A connection that gives way to another client is closed without an answer.
            if answer or not fills:
                refusal(answer, *next((one for one in expected if one[0] == status), expected[0]))
        except (Failed, OSError) as failure:
            failed.append(repr(failure))
        slowest[0] = max(slowest[0], time.monotonic() - begun)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    time.sleep(2)
    begun = time.monotonic()
    answer = exchange(address, GOOD)
    if parts(answer)[0] != 200:
        failed.append(f"another client got {answer[:40]!r}")
    waited = time.monotonic() - begun
    if waited > LATE_SECONDS:
        failed.append(f"another client waited {waited:.1f} s")
    for thread in threads:
        thread.join()
    if failed:
        raise Failed(f"{len(failed)} of {count}: {failed[0]}")
    return f"{count}; the last was closed after {slowest[0]:.1f} s, another client got {parts(answer)[0]} in {waited:.2f} s meanwhile"


def slow_heads(count):
    begin = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nX: "
    return lambda address: slowly(address, begin, b"x" * 100, count, HEAD_SECONDS, [(408, "head_timeout")], count >= CONNECTIONS)


def slow_bodies(count):
    begin = head("POST", PATH, JSON + "Content-Length: 90\r\n")
    return lambda address: slowly(address, begin, b" " * 90, count, BODY_SECONDS, [(408, "body_timeout")], count >= CONNECTIONS)


def silent(address):
    """Connections that send nothing."""
    streams = [connect(address) for _ in range(40)]
    begun = time.monotonic()
    for stream in streams:
        stream.settimeout(HEAD_SECONDS + LATE_SECONDS)
        answer = read_all(stream)
        if answer:
            refusal(answer, 408, "head_timeout")
        stream.close()
    return f"40; the last was closed after {time.monotonic() - begun:.1f} s"


def leaves(address):
    """Clients that leave in the middle of a stream, every second one with a reset."""
    ask = post({"prompt": "one two three", "max_tokens": 256, "min_tokens": 255, "stream": True})
    for number in range(100):
        with connect(address) as stream:
            stream.sendall(ask)
            if not stream.recv(512).startswith(b"HTTP/1.1 200"):
                raise Failed("the stream did not begin")
            if number % 2:
                stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end = time.monotonic() + 10
    while (load := json.loads(parts(exchange(address, head("GET", "/health", CLOSE)))[2])) and load["running"] + load["waiting"]:
        if time.monotonic() > end:
            raise Failed(f"answers of clients that left are still made: {load}")
        time.sleep(0.1)
    return 100


CASES = [
    ("malformed JSON, invalid UTF-8", one_answers(JSON_CASES)),
    ("wrong types and values", one_answers(TYPE_CASES)),
    ("heads that are too large or no HTTP", one_answers(HEAD_CASES)),
    ("unknown paths, methods, hosts; bodies too large", one_answers(PATH_CASES)),
    ("bodies cut off, then half closed", cut_off),
    ("chunks without end", endless_chunks),
    ("garbage behind a good request", pipelined),
    ("clients that leave in a stream", leaves),
    ("connections that say nothing", silent),
    ("heads of a byte a second", slow_heads(100)),
    ("heads of a byte a second on every connection", slow_heads(CONNECTIONS)),
    ("bodies of a byte a second", slow_bodies(12)),
    ("bodies of a byte a second on every connection", slow_bodies(CONNECTIONS)),
]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--rounds", type=int, default=3)
    options = parsed(parser)
    failed, states, cases = [], [], {}
    with serve(options.binary, options.model, memory_budget=options.memory_budget, in_group=options.group) as server:
        answers(server.address)
        states.append(server.calm())
        for number in range(options.rounds):
            for name, case in CASES:
                begun = time.monotonic()
                try:
                    done = case(server.address)
                    answers(server.address)
                    if number == 0:
                        cases[name] = done
                        print(f"ok: {name} ({done}), {time.monotonic() - begun:.1f} s", flush=True)
                except (Failed, OSError) as failure:
                    failed.append(f"round {number + 1}, {name}: {failure!r}")
                    print(f"FAILED: {failed[-1]}", flush=True)
                if server.process.poll() is not None:
                    sys.exit(f"the server ended with {server.process.returncode} in {name}")
            states.append(server.calm())
            print(f"after round {number + 1}: {json.dumps(states[-1])}", flush=True)
        result = {"run": origin(), "cases": cases, "states": states}
        record(result, server, options.output)
        if (code := server.end()) != 0:
            failed.append(f"SIGTERM: exit {code}")
        # The allocator's arenas are in use after the first round; later rounds must not add memory.
        first, last = states[1], states[-1]
        for name in ("files", "threads"):
            if last[name] > states[0][name]:
                failed.append(f"{name}: {states[0][name]} before, {last[name]} afterwards")
        if last["rss_bytes"] > first["rss_bytes"] + (1 << 20):
            failed.append(f"memory: {first['rss_bytes']} bytes after the first round, {last['rss_bytes']} after the last")
        if options.memory_budget and last["peak_rss_bytes"] > bytes_of(options.memory_budget):
            failed.append(f"peak: {last['peak_rss_bytes']} bytes of {options.memory_budget}")
        if server.group and result["group"]["kills"]:
            failed.append(f"{result['group']['kills']} killed by the kernel")
    for failure in failed:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
