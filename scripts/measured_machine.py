"""The origin of measured numbers, for the heading of a table: machine, load, commit, versions."""

import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys


def processor():
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def total_memory_gib():
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def commit(repository):
    def git(*words):
        done = subprocess.run(["git", "-C", str(repository), *words], capture_output=True, text=True)
        return done.stdout.strip()

    name = git("rev-parse", "--short=10", "HEAD") or "unknown"
    return name + ("+changes" if git("status", "--porcelain", "--untracked-files=no") else "")


def warn_if_busy():
    """Warns on stderr that other programs are computing: PyTorch's spinning threads suffer most, up to fiftyfold."""
    load, cores = os.getloadavg()[0], len(os.sched_getaffinity(0))
    if load > 0.3 * cores:
        print(f"warning: load average {load:.1f} on {cores} cores: not a fair time to measure", file=sys.stderr)


def describe(repository, packages):
    """One line: machine, load, commit, versions."""
    versions = ", ".join(f"{package} {importlib.metadata.version(package)}" for package in packages)
    cores = len(os.sched_getaffinity(0))
    machine = f"{processor()}, {cores} cores, {total_memory_gib():.0f} GiB, load {os.getloadavg()[0]:.1f}"
    return f"{machine}; commit {commit(repository)}; {versions}"


def rss_bytes():
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def peak_rss_bytes():
    """The peak of this program. getrusage's count includes the peak of the process that started it."""
    status = pathlib.Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))
