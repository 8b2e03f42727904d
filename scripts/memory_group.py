"""A control group of version 1 with a hard memory limit: one byte too many is a kill."""

import os
import pathlib
import time

MOUNT = pathlib.Path("/sys/fs/cgroup/memory")


class Group:
    """A new group; removed at the end of `with`, when its processes are gone."""

    def __init__(self, limit_bytes):
        self.path = MOUNT / f"low-mem-t5-{os.getpid()}"
        self.limit_bytes = limit_bytes

    def __enter__(self):
        try:
            self.path.mkdir()
            (self.path / "memory.limit_in_bytes").write_text(str(self.limit_bytes))
        except OSError as error:
            raise SystemExit(f"{self.path}: {error} (needs the memory controller of version 1, writable)") from error
        return self

    def __exit__(self, *_):
        # A killed process leaves its group a moment after it was waited for.
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(0.1)
        self.path.rmdir()

    def command(self, command):
        """The shell enters the group and becomes the program, so that all of the program's memory is counted in the group."""
        return ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.path / "cgroup.procs"), *command]

    def counters(self):
        """The most that the group held, page cache included; how often the limit was met; processes that were killed."""
        number = lambda file: int((self.path / file).read_text())
        control = dict(line.split() for line in (self.path / "memory.oom_control").read_text().splitlines())
        return {
            "limit_bytes": number("memory.limit_in_bytes"), "most_bytes": number("memory.max_usage_in_bytes"),
            "limit_met": number("memory.failcnt"), "kills": int(control["oom_kill"]),
        }
