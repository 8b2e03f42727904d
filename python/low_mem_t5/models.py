"""Models that answer, are scored, and turn texts into vectors.

A `Model` keeps one process alive: the program's `serve`, on this machine alone, on a free port and with a random key. `generate`
reads all prompts before it answers any, so a pipe to it could not be kept open; `serve` answers each request at once, refuses what does
not fit with a message, and keeps its budget. The process ends with its `Model`, and also when the interpreter is killed.
"""

from __future__ import annotations

import array
import ast
import http.client
import importlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
import weakref
from typing import IO, TYPE_CHECKING, Any, Dict, Iterator, List, Optional, Sequence, Type, Union, overload

from .flags import arguments
from .program import Error, InternalError, UsageError, failure, find_program, output_of
from .runs import PAUSE, contents

if TYPE_CHECKING:
    from types import TracebackType

    from .flags import Path, Paths

#: Starts a program that ends when the pipe to standard input closes: when its `Model` or the interpreter ends, however it does.
UNTIL_THE_PIPE_CLOSES = """
exec 3<&0 </dev/null
"$@" 3<&- & program=$!
{ read -r _ <&3; kill -TERM $program; } >/dev/null 2>&1 & watcher=$!
exec 3<&-
wait $program; code=$?
kill $watcher 2>/dev/null
exit $code
"""

#: The limits of `serve` for one request.
MAX_PROMPTS, MAX_BODY_BYTES = 16, 128 << 10

#: Seconds for an answer, and for the server to give up first.
MAX_SECONDS = 86_400


class Model:
    """A model in a process of its own, within its budget.

    `path` is whatever `--model` takes: a run, an adapter, a Hugging Face directory, an id in the local cache. Further keyword arguments are
    flags of `train_low_mem serve`, such as `max_new_tokens`, `max_source_tokens` and `device`. Longer prompts are cut, as in training.
    """

    def __init__(self, path: Path, memory_budget: Optional[str] = None, **flags: Any) -> None:
        #: What answers.
        self.path = os.fspath(path)
        self._key = secrets.token_urlsafe(32)
        self._errors: IO[bytes] = tempfile.TemporaryFile()
        settings = {"prompt_overflow": "truncate", "request_timeout": MAX_SECONDS, "memory_budget": memory_budget}
        with tempfile.NamedTemporaryFile("w", prefix="key-") as key_file:
            key_file.write(self._key + "\n")
            key_file.flush()
            own = {"listen": "127.0.0.1:0", "api_key_file": key_file.name, "model_name": "model"}
            self._process = subprocess.Popen(
                ["sh", "-c", UNTIL_THE_PIPE_CLOSES, "sh", find_program(), "serve", *arguments({"model": self.path, **settings, **flags, **own})],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                start_new_session=True,
            )
            self._close = weakref.finalize(self, end, self._process, self._errors)
            self._port = self._wait_for_port()

    @overload
    def generate(self, texts: str, **settings: Any) -> str: ...

    @overload
    def generate(self, texts: Sequence[str], **settings: Any) -> List[str]: ...

    def generate(self, texts: Union[str, Sequence[str]], **settings: Any) -> Union[str, List[str]]:
        """Answers a text, or each text of a list.

        Settings are those of a completion (docs/serve.md): `max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop`, `num_beams`,
        `repetition_penalty` and others. Without settings answers are greedy, unless the model says otherwise.
        """
        if isinstance(texts, str):
            return self._complete([texts], settings)[0]
        answers: List[str] = []
        for some in batches(texts):
            answers += self._complete(some, settings)
        return answers

    def close(self) -> None:
        """Ends the process."""
        self._close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException], trace: Optional[TracebackType]) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Model({self.path!r})"

    def _wait_for_port(self) -> int:
        while True:
            listening = re.search(r"^serving .* on http://127\.0\.0\.1:(\d+) ", contents(self._errors), re.MULTILINE)
            if listening:
                return int(listening[1])
            if self._process.poll() is not None:
                raise self._failure()
            try:
                time.sleep(PAUSE)
            except BaseException:
                self.close()
                raise

    def _failure(self) -> Error:
        code = self._process.returncode
        # A shell adds 128 to the signal that ended the program.
        return failure(128 - code if code > 128 else code, contents(self._errors))

    def _complete(self, prompts: List[str], settings: Dict[str, Any]) -> List[str]:
        body = json.dumps({"model": "model", "prompt": prompts, **settings}, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {self._key}"}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=MAX_SECONDS)
        try:
            connection.request("POST", "/v1/completions", body, headers)
            response = connection.getresponse()
            answer = json.loads(response.read())
        except (OSError, http.client.HTTPException) as error:
            if not self._close.alive:
                raise UsageError(f"{self.path}: the model is closed", ["make another `Model`"]) from error
            if self._process.poll() is not None:
                raise self._failure() from error
            raise InternalError(f"{self.path}: no answer: {error}") from error
        finally:
            connection.close()
        if response.status != 200:
            of_request = 400 <= response.status < 500
            raise (UsageError if of_request else InternalError)(answer["error"]["message"], code=2 if of_request else 1)
        return [choice["text"] for choice in sorted(answer["choices"], key=lambda choice: int(choice["index"]))]


def end(process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
    """Ends a program that was started with `UNTIL_THE_PIPE_CLOSES`."""
    if process.stdin is not None:
        process.stdin.close()
    process.wait()
    errors.close()


def batches(texts: Sequence[str]) -> Iterator[List[str]]:
    """The texts in lists that a request can hold."""
    some: List[str] = []
    held = 0
    for text in texts:
        size = len(json.dumps(text, ensure_ascii=False).encode())
        if some and (len(some) == MAX_PROMPTS or held + size > MAX_BODY_BYTES // 2):
            yield some
            some, held = [], 0
        some.append(text)
        held += size
    if some:
        yield some


def evaluate(model: Path, data: Paths, **flags: Any) -> Dict[str, Any]:
    """Scores a model on rows: loss, perplexity and the scores of its answers. Keyword arguments are flags of `train_low_mem eval`."""
    scores: Dict[str, Any] = json.loads(output_of(["eval", "--json", *arguments({"model": model, "data": data, **flags})]))
    return scores


def embed(model: Path, texts: Sequence[str], pooling: str = "mean", normalize: bool = False, **flags: Any) -> Any:
    """A vector of each text: rows of a numpy array where numpy is installed, else lists.

    Keyword arguments are flags of `train_low_mem embed`, such as `memory_budget` and `max_source_tokens`.
    """
    with tempfile.TemporaryDirectory() as directory:
        rows, vectors = os.path.join(directory, "texts.jsonl"), os.path.join(directory, "vectors.npy")
        with open(rows, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": text}) + "\n" for text in texts)
        own = {"model": model, "input": rows, "text_column": "text", "pooling": pooling, "normalize": normalize, "output": vectors}
        output_of(["embed", *arguments({**flags, **own})])
        return read_vectors(vectors)


def read_vectors(path: str) -> Any:
    """The rows of a `.npy` file of 32-bit floats."""
    try:
        numpy: Any = importlib.import_module("numpy")
    except ImportError:
        pass
    else:
        return numpy.load(path)
    with open(path, "rb") as file:
        head = file.read(10)
        described = ast.literal_eval(file.read(int.from_bytes(head[8:10], "little")).decode())
        values = array.array("f", file.read())
    if head[:7] != b"\x93NUMPY\x01" or described["descr"] != "<f4" or described["fortran_order"]:
        raise Error(f"{path}: expected rows of 32-bit floats, got {described}")
    if sys.byteorder == "big":
        values.byteswap()
    count, width = described["shape"]
    return [values[row * width : (row + 1) * width].tolist() for row in range(count)]
