"""`install.sh` with a release of the program under test, from a server on loopback.

    LOW_MEM_T5_PROGRAM=target/release/train_low_mem python3 -m unittest discover --start-directory packaging
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import os
import platform
import shutil
import subprocess
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "install.sh"
PROGRAM = os.environ["LOW_MEM_T5_PROGRAM"]
NAME = f"train_low_mem-{'aarch64' if platform.machine() in ('aarch64', 'arm64') else 'x86_64'}-unknown-linux-musl"
FILES = [
    ".local/bin/train_low_mem",
    ".local/share/man/man1/train_low_mem.1",
    ".local/share/bash-completion/completions/train_low_mem",
    ".local/share/zsh/site-functions/_train_low_mem",
    ".config/fish/completions/train_low_mem.fish",
]


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@unittest.skipUnless(platform.system() == "Linux", "the script installs on Linux alone")
class Install(unittest.TestCase):
    def setUp(self) -> None:
        directory = Path(tempfile.mkdtemp(prefix="install-"))
        self.addCleanup(shutil.rmtree, directory)
        self.release, self.home = directory / "release", directory / "home"
        self.release.mkdir()
        self.home.mkdir()
        shutil.copy(PROGRAM, self.release / NAME)
        (self.release / "train_low_mem.1").write_text(".TH TRAIN_LOW_MEM 1\n")
        self.write_sums()

    def write_sums(self, program: str = NAME) -> None:
        files = [program, "train_low_mem.1"]
        lines = [f"{hashlib.sha256((self.release / name).read_bytes()).hexdigest()}  {name}\n" for name in files]
        (self.release / "SHA256SUMS").write_text("".join(lines))

    def serve(self) -> str:
        handler = functools.partial(Quiet, directory=str(self.release))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.addCleanup(lambda: (server.shutdown(), thread.join(), server.server_close()))
        return f"http://127.0.0.1:{server.server_address[1]}"

    def install(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if name == "PATH" or name.startswith("LD_")}
        return subprocess.run(
            ["sh", str(SCRIPT), *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**clean, "HOME": str(self.home), **environment}
        )

    def only(self, *tools: str) -> str:
        """A directory for the PATH with the tools that every system has, and these."""
        directory = self.home / "tools"
        directory.mkdir()
        for tool in ["sh", "uname", "mktemp", "rm", "cp", "mv", "mkdir", "dirname", "cut", "awk", "chmod", *tools]:
            found = shutil.which(tool)
            assert found, tool
            (directory / tool).symlink_to(found)
        return str(directory)

    def refuses(self, ran: subprocess.CompletedProcess[str], words: str) -> None:
        self.assertEqual(ran.returncode, 1, ran.stderr)
        self.assertIn(f"error: {words}", ran.stderr)
        self.assertIn("hint: ", ran.stderr)
        self.assertFalse((self.home / FILES[0]).exists())

    def test_a_release_is_installed_and_every_file_is_named(self) -> None:
        ran = self.install("--from", self.serve())
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        for name in FILES:
            path = self.home / name
            self.assertTrue(path.stat().st_size > 0)
            self.assertIn(f"{path}\n", ran.stdout)
        installed = subprocess.run([self.home / FILES[0], "--version"], stdout=subprocess.PIPE, text=True)
        self.assertIn(f"{installed.stdout.strip()}, installed:", ran.stdout)
        self.assertIn("is not on your PATH", ran.stdout)
        # Again, over itself, with the directory on the PATH, from a directory.
        path = f"{self.home / '.local/bin'}:{os.environ['PATH']}"
        ran = self.install("--from", str(self.release), PATH=path)
        self.assertEqual(ran.returncode, 0)
        self.assertNotIn("is not on your PATH", ran.stdout)

    def test_the_program_for_glibc_is_installed_where_there_is_no_static_one(self) -> None:
        name = NAME.replace("musl", "gnu")
        (self.release / NAME).rename(self.release / name)
        self.write_sums(name)
        ran = self.install("--from", str(self.release))
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertTrue((self.home / FILES[0]).exists())

    def test_wget_serves_where_there_is_no_curl(self) -> None:
        if not shutil.which("wget"):
            self.skipTest("no wget here")
        ran = self.install("--from", self.serve(), "--to", str(self.home / "bin"), PATH=self.only("wget", "sha256sum"))
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertTrue((self.home / "bin/train_low_mem").exists())

    def test_a_damaged_download_replaces_nothing(self) -> None:
        self.assertEqual(self.install("--from", str(self.release)).returncode, 0)
        old = (self.home / FILES[0]).read_bytes()
        with open(self.release / NAME, "r+b") as file:
            file.seek(1000)
            file.write(b"damaged")
        ran = self.install("--from", self.serve())
        self.assertEqual(ran.returncode, 1)
        self.assertRegex(ran.stderr, rf"error: .*{NAME}: expected SHA-256 [0-9a-f]{{64}}, got [0-9a-f]{{64}}\nhint: .*nothing was installed")
        self.assertEqual((self.home / FILES[0]).read_bytes(), old)

    def test_what_cannot_be_had_or_verified_is_refused(self) -> None:
        address = self.serve()
        self.refuses(self.install("--from", f"{address}/absent"), f"{address}/absent/SHA256SUMS: could not be fetched")
        (self.release / "SHA256SUMS").write_text("")
        self.refuses(self.install("--from", address), f"{address}/SHA256SUMS: no line for {NAME}")
        self.refuses(self.install(), "no release is named")
        self.refuses(self.install("--form", address), "unexpected argument `--form`")
        self.refuses(self.install("--from"), "`--from` needs a value")
        tools = self.only()
        self.refuses(self.install("--from", address, PATH=tools), "neither sha256sum nor shasum is here")
        (Path(tools) / "sha256sum").symlink_to(str(shutil.which("sha256sum")))
        self.refuses(self.install("--from", address, PATH=tools), "neither curl nor wget is here")

    def test_a_program_that_does_not_run_is_refused(self) -> None:
        (self.release / NAME).write_text("#!/bin/sh\necho GLIBC_9.9 not found >&2\nexit 1\n")
        self.write_sums()
        self.refuses(self.install("--from", str(self.release)), f"{NAME} does not run here: GLIBC_9.9 not found")

    def test_other_machines_and_directories_are_refused(self) -> None:
        tools = self.only("sha256sum")
        for said, words in [("Darwin arm64", "there is no program for Darwin"), ("Linux riscv64", "there is no program for riscv64")]:
            system, machine = said.split()
            uname = Path(tools) / "uname"
            uname.unlink()
            uname.write_text(f'#!/bin/sh\ncase $1 in -s) echo {system} ;; *) echo {machine} ;; esac\n')
            uname.chmod(0o755)
            self.refuses(self.install("--from", str(self.release), PATH=tools), words)
        file = self.home / "file"
        file.write_text("in the way")
        self.refuses(self.install("--from", str(self.release), "--to", str(file)), f"{file}/train_low_mem: cannot be written")


if __name__ == "__main__":
    unittest.main()
