#!/usr/bin/env python3
"""Runs the openai client of PyPI against `train_low_mem serve`.

    python scripts/check_serve.py --binary target/release/train_low_mem --model runs/a
    python scripts/check_serve.py ... --memory-budget 56MiB --group --clients 64 --seconds 600 --output load.json

Starts the server on a free port and sends the openai client's requests (completions, chats, streams, several answers, errors, a
key). It compares a stream with the whole answer and the whole answer with `generate`, and ends the server with SIGTERM. With
`--clients N --seconds S` it then loads the server with N clients and prints the percentiles. With `--memory-budget` the peak
must be within the budget. With `--group` the server runs in a hard memory group whose limit is the budget: a kill is a
failure. The group needs the memory controller of version 1, writable. Needs: openai.
"""
import argparse
import asyncio
import json
import subprocess
import sys
import time

import openai

from served import add_options, bytes_of, origin, parsed, record, serve

# A request of the longest form that the default flags accept, which the bill counts.
LONGEST = {"prompt": [5] * 511, "max_tokens": 256, "extra_body": {"num_beams": 4, "min_tokens": 255}}
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


async def load(base_url, key, model, clients, seconds, long_every):
    client = openai.AsyncOpenAI(base_url=base_url, api_key=key, max_retries=0, timeout=300)
    times, long_times, first_tokens, refused, errors, tokens = [], [], [], 0, [], 0
    end = time.monotonic() + seconds

    async def one(number):
        nonlocal refused, tokens
        round = 0
        while time.monotonic() < end:
            round += 1
            begun, first = time.monotonic(), None
            prompt = f"{PROMPTS[(number + round) % len(PROMPTS)]} {number}"
            try:
                if long_every and (number + round) % long_every == 0:
                    answer = await client.completions.create(model=model, **LONGEST)
                    tokens += answer.usage.completion_tokens
                    long_times.append(time.monotonic() - begun)
                    continue
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
            except Exception as error:  # noqa: BLE001: every other exception counts
                errors.append(repr(error))

    await asyncio.gather(*(one(number) for number in range(clients)))
    await client.close()
    for all in (times, long_times, first_tokens):
        all.sort()
    at = lambda all, share: round(all[min(len(all) - 1, int(len(all) * share))], 3) if all else None
    if errors:
        print(f"{len(errors)} errors, the first: {errors[0]}", file=sys.stderr)
    return {
        "clients": clients, "seconds": seconds, "answers": len(times), "refused_429": refused, "errors": len(errors),
        "p50_s": at(times, 0.5), "p99_s": at(times, 0.99), "first_token_p50_s": at(first_tokens, 0.5),
        "first_token_p99_s": at(first_tokens, 0.99), "tokens_per_second": round(tokens / seconds, 1),
        "long_answers": len(long_times), "long_p50_s": at(long_times, 0.5), "long_p99_s": at(long_times, 0.99),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser)
    parser.add_argument("--clients", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--long-every", type=int, default=0, metavar="N", help="every Nth request of the load has the longest form")
    parser.add_argument("--flags", default="", help="further flags of serve")
    options = parsed(parser)
    run = {**origin(), "openai": openai.__version__}
    with serve(options.binary, options.model, options.flags.split(), ["sk-check"], options.memory_budget, options.group) as server:
        url = f"http://{server.address}/v1"
        client = openai.OpenAI(base_url=url, api_key="sk-check", max_retries=0)
        with_client(client, options)
        result = {"run": run}
        before = server.calm()
        if options.clients:
            model = client.models.list().data[0].id
            result["load"] = asyncio.run(load(url, "sk-check", model, options.clients, options.seconds, options.long_every))
        after = server.calm(before)
        result["before"], result["after"] = before, after
        record(result, server, options.output)
        check("SIGTERM stops it after the requests in progress", server.end(), 0)
        print("".join(server.stderr), end="")
        check("the access log has lines of JSON", all(json.loads(line)["status"] for line in server.access_log), True)
        if options.clients:
            check("no client had an error", result["load"]["errors"], 0)
        check("no thread or open file is left over", [after[name] <= before[name] for name in ("threads", "files")], [True, True])
        if options.memory_budget:
            check("the peak is within the budget", after["peak_rss_bytes"] <= bytes_of(options.memory_budget), True)
        if server.group:
            check("the kernel killed nothing", result["group"]["kills"], 0)


if __name__ == "__main__":
    main()
