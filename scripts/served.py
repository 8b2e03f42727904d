"""`train_low_mem serve` on a free port, and the kernel's counters of its process."""

import contextlib
import datetime
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import measured_machine
from memory_group import Group

UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def bytes_of(size):
    """`56MiB` in bytes."""
    if not (found := re.fullmatch(r"(\d+)(KiB|MiB|GiB)", size)):
        raise SystemExit(f"{size}: expected a size such as 56MiB")
    return int(found.group(1)) * UNITS[found.group(2)]


def add_options(parser):
    """The options of every script that starts a server."""
    parser.add_argument("--binary", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--memory-budget", help="the budget of serve, such as 56MiB")
    parser.add_argument("--group", action="store_true", help="a hard memory group whose limit is the budget")
    parser.add_argument("--output", type=pathlib.Path, help="write the numbers as JSON")


def parsed(parser):
    """The parsed options of the script."""
    options = parser.parse_args()
    if options.group and not options.memory_budget:
        parser.error("--group needs --memory-budget")
    return options


def origin():
    """The origin of the numbers: commit, date, machine."""
    return {
        "commit": measured_machine.commit(pathlib.Path(__file__).parent), "date": datetime.date.today().isoformat(),
        "processor": measured_machine.processor(), "memory_gib": round(measured_machine.total_memory_gib(), 1),
    }


def record(result, server, output):
    """Prints a result with the counters of the group, and writes it if the options ask for that."""
    if server.group:
        result["group"] = server.group.counters()
    print(json.dumps(result))
    if output:
        output.write_text(json.dumps(result, indent=1) + "\n")


class Served:
    """A running server."""

    def __init__(self, process, address, access_log, group):
        self.process, self.address, self.access_log, self.group = process, address, access_log, group
        self.stderr = []

    def status(self):
        """The process's resident bytes now and at most, threads, and open files."""
        lines = pathlib.Path(f"/proc/{self.process.pid}/status").read_text().splitlines()
        fields = dict(line.split(":", 1) for line in lines)
        kib = lambda name: int(fields[name].split()[0]) << 10
        files = len(list(pathlib.Path(f"/proc/{self.process.pid}/fd").iterdir()))
        return {"rss_bytes": kib("VmRSS"), "peak_rss_bytes": kib("VmHWM"), "threads": int(fields["Threads"]), "files": files}

    def calm(self, before=None, seconds=30):
        """The status when no connection is open, or no more files than `before` are open: idle connections are closed after 10 s."""
        end = time.monotonic() + seconds
        while True:
            status = self.status()
            is_calm = self.connections() == 0 and (before is None or status["files"] <= before["files"])
            if is_calm or time.monotonic() > end:
                return status
            time.sleep(0.2)

    def idle(self, seconds=120):
        """Waits until no request is in progress."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            with urllib.request.urlopen(f"http://{self.address}/health", timeout=60) as answer:
                load = json.load(answer)
            if load["running"] + load["waiting"] == 0:
                return
            time.sleep(0.2)
        sys.exit(f"the server is still at work: {load}")

    def connections(self):
        """Established connections of the server, by the kernel's table."""
        port = f":{int(self.address.rpartition(':')[2]):04X}"
        rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
        return sum(row[1].endswith(port) and row[3] == "01" for row in rows)

    def end(self):
        """Ends the server as an administrator does. Returns its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def forget(path):
    """Drops a file's pages from the cache, so that the next reader is charged for them."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def serve(binary, model, flags=(), keys=None, memory_budget=None, in_group=False):
    """Starts a server and waits until it listens. `in_group`: in a hard memory group whose limit is the budget."""
    with contextlib.ExitStack() as stack:
        log = stack.enter_context(tempfile.NamedTemporaryFile("r", suffix=".jsonl"))
        command = [str(binary), "serve", str(model), "--listen", "127.0.0.1:0", "--access-log", log.name, *flags]
        if keys:
            file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".key"))
            file.write("\n".join(keys) + "\n")
            file.flush()
            command += ["--api-key-file", file.name]
        if memory_budget:
            command += ["--memory-budget", memory_budget]
        group = None
        if in_group:
            group = stack.enter_context(Group(bytes_of(memory_budget)))
            command = group.command(command)
            for file in [pathlib.Path(binary), *pathlib.Path(model).rglob("*")]:
                if file.is_file():
                    forget(file)
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            served = Served(process, None, log, group)
            for line in process.stderr:
                print(line, end="")
                if found := re.search(r"http://([0-9.]+:\d+)", line):
                    served.address = found.group(1)
                    break
            else:
                sys.exit("the server did not start")
            # A pipe without a reader would stop the server once it is full.
            reader = threading.Thread(target=lambda: served.stderr.extend(process.stderr), daemon=True)
            reader.start()
            yield served
        finally:
            process.kill()
            process.wait()
