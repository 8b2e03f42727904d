#!/usr/bin/env python3
"""Runs the openai client of PyPI against `train_low_mem serve`.

    python scripts/check_serve.py --binary target/release/train_low_mem --model runs/a

Starts the server on a free port, asks it as the client asks OpenAI (completions, chats, streams, several answers, errors, a
key), compares a stream with the whole answer and the whole answer with `generate`, and ends it with SIGTERM. With
`--clients N --seconds S` it then loads the server with N clients and prints the percentiles. Needs: openai.
"""
import argparse
import asyncio
import json
import re
import signal
import subprocess
import sys
import tempfile
import time

import openai

PROMPTS = ["What is 3 plus 4?", "Translate: good morning", "capital of France", "a", "one two three four five six"]


def check(name, got, expected):
    if got != expected:
        sys.exit(f"{name}: expected {expected!r}, got {got!r}")
    print(f"ok: {name}")


def refused(name, kind, ask):
    try:
        ask()
    except kind as error:
        check(name, error.body is not None and "message" in error.body, True)
        return error
    sys.exit(f"{name}: expected {kind.__name__}")


def with_client(client, options):
    names = [model.id for model in client.models.list()]
    model = names[0]
    print("models:", ", ".join(names))
    ask = lambda prompt, **more: client.completions.create(model=model, prompt=prompt, max_tokens=32, **more)
    whole = [ask(prompt).choices[0].text for prompt in PROMPTS]
    command = [options.binary, "generate", "--model", options.model, "--max-new-tokens", "32", "--json", *PROMPTS]
    generated = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    check("answers are those of generate", whole, [json.loads(line)["response"] for line in generated])
    together = client.completions.create(model=model, prompt=PROMPTS, max_tokens=32)
    check("many prompts are answered as one", [choice.text for choice in together.choices], whole)
    check("usage adds up", together.usage.total_tokens, together.usage.prompt_tokens + together.usage.completion_tokens)
    parts = list(ask(PROMPTS[0], stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.text for part in parts for choice in part.choices)
    check("a stream is the whole answer", text, whole[0])
    check("a stream ends with the usage", parts[-1].usage is not None, True)
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = client.chat.completions.create(model=model, messages=messages, max_completion_tokens=32)
    check("a chat of one message is its prompt", chat.choices[0].message.content, whole[0])
    stream = client.chat.completions.create(model=model, messages=messages, max_tokens=32, stream=True)
    check("a chat is streamed", "".join(part.choices[0].delta.content or "" for part in stream), whole[0])
    drawn = [ask(PROMPTS[0], temperature=1.5, seed=5, n=3).choices for _ in range(2)]
    check("a seed gives the same answers", *[[choice.text for choice in choices] for choices in drawn])
    beams = ask(PROMPTS[0], extra_body={"num_beams": 4})
    check("beams answer", beams.choices[0].finish_reason in ("stop", "length"), True)
    check("a limit is said", ask("a", **{}).usage.completion_tokens <= 32, True)
    stopped = ask(PROMPTS[0], stop=whole[0][1:2]).choices[0] if len(whole[0]) > 1 else None
    if stopped:
        check("a stop text ends the answer", (stopped.text, stopped.finish_reason), (whole[0][:1].split(whole[0][1])[0], "stop"))
    refused("another model", openai.NotFoundError, lambda: client.completions.create(model="other", prompt="a"))
    refused("a wrong value", openai.BadRequestError, lambda: ask("a", temperature=-1))
    refused("a prompt too long", openai.BadRequestError, lambda: ask("word " * 2000))
    refused("a stream of it", openai.BadRequestError, lambda: ask("word " * 2000, stream=True))
    refused("another key", openai.AuthenticationError, lambda: client.with_options(api_key="wrong").models.list())


async def load(base_url, key, model, clients, seconds):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=300)
    times, first_tokens, refused, errors, tokens = [], [], 0, [], 0
    end = time.monotonic() + seconds

    async def one(number):
        nonlocal refused, tokens
        round = 0
        while time.monotonic() < end:
            round += 1
            begun, first = time.monotonic(), None
            prompt = f"{PROMPTS[(number + round) % len(PROMPTS)]} {number}"
            try:
                if (number + round) % 2:
                    stream = await client.completions.create(
                        model=model, prompt=prompt, max_tokens=16 + number % 48, stream=True, stream_options={"include_usage": True})
                    async for part in stream:
                        first = first or time.monotonic()
                        if part.usage:
                            tokens += part.usage.completion_tokens
                    first_tokens.append(first - begun)
                else:
                    answer = await client.completions.create(model=model, prompt=prompt, max_tokens=16 + number % 48)
                    tokens += answer.usage.completion_tokens
                times.append(time.monotonic() - begun)
            except openai.RateLimitError as error:
                refused += 1
                await asyncio.sleep(float(error.response.headers["retry-after"]))
            except Exception as error:  # noqa: BLE001: every other one counts
                errors.append(repr(error))

    await asyncio.gather(*(one(number) for number in range(clients)))
    times.sort()
    first_tokens.sort()
    at = lambda all, share: round(all[min(len(all) - 1, int(len(all) * share))], 3) if all else None
    print(json.dumps({
        "clients": clients, "seconds": seconds, "answers": len(times), "refused_429": refused, "errors": len(errors),
        "p50_s": at(times, 0.5), "p99_s": at(times, 0.99), "first_token_p50_s": at(first_tokens, 0.5),
        "first_token_p99_s": at(first_tokens, 0.99), "tokens_per_second": round(tokens / seconds, 1),
    }))
    if errors:
        sys.exit(errors[0])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--flags", default="", help="further flags of serve")
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w", suffix=".key") as keys, tempfile.NamedTemporaryFile("r") as log:
        keys.write("sk-check\n")
        keys.flush()
        command = [options.binary, "serve", options.model, "--listen", "127.0.0.1:0", "--api-key-file", keys.name,
                   "--access-log", log.name, *options.flags.split()]
        server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            for line in server.stderr:
                print(line, end="")
                if found := re.search(r"http://(\S+)", line):
                    break
            else:
                sys.exit("the server did not start")
            url = f"http://{found.group(1)}/v1"
            client = openai.OpenAI(base_url=url, api_key="sk-check", max_retries=0)
            with_client(client, options)
            if options.clients:
                model = client.models.list().data[0].id
                asyncio.run(load(url, "sk-check", model, options.clients, options.seconds))
            server.send_signal(signal.SIGTERM)
            check("SIGTERM ends it in order", server.wait(60), 0)
            print(server.stderr.read(), end="")
            check("the access log has lines of JSON", all(json.loads(line)["status"] for line in log), True)
        finally:
            server.kill()


if __name__ == "__main__":
    main()
