"""The real command line, each time in a process of its own: forked from one that has imported it, or started from nothing.

A fork has read none of the user's words yet; it is spared the imports and the interpreter's end, nearly all that a refused
command costs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PARENT = r"""
import contextlib, io, json, os, sys, traceback
from legato.__main__ import main
sys.argv[1:], numbers = ["generate", "--model", "/no/such/folder", "x"], sys.argv[1:]
with contextlib.suppress(SystemExit), contextlib.redirect_stderr(io.StringIO()):
    main()  # what every command imports when it runs
wanted, done = map(int, numbers)
requests = os.fdopen(wanted)
while True:
    line = requests.readline()
    if not line:
        sys.exit()
    if not (pid := os.fork()):
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(done, b"%d\n" % code)
request = json.loads(line)
os.environ.update(request["environment"])
os.chdir(request["folder"])
for number, file in enumerate(request["files"]):
    os.dup2(os.open(file, os.O_RDWR), number)
sys.argv = ["legato", *request["arguments"]]
code = 0
try:
    main()
except SystemExit as leaving:
    code = leaving.code or 0
    assert isinstance(code, int)
except BaseException:
    code = 1
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os.write(done, b"torch\n" if "torch" in sys.modules else b"-\n")
os._exit(code)
"""


@dataclass(frozen=True)
class Ran:
    """What a command did. `imported_torch` is not known (`None`) of one that was started from nothing."""

    returncode: int
    stdout: str
    stderr: str
    imported_torch: bool | None = None


class CommandLine:
    """Runs `legato` again and again. One process stays behind and is forked; `close` ends it."""

    def __init__(self) -> None:
        (wanted, self._wanted), (self._done, done) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", PARENT, str(wanted), str(done)]
        self._parent = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(wanted, done))
        os.close(wanted)
        os.close(done)
        self._replies = os.fdopen(self._done)

    def __call__(self, *arguments: str, stdin: str = "", **environment: str) -> Ran:
        """The command in a fork."""
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / name for name in ("stdin", "stdout", "stderr")]
            for file, text in zip(files, (stdin, "", ""), strict=True):
                file.write_text(text)
            request = {
                "arguments": arguments,
                "environment": {"COLUMNS": "200", **environment},
                "folder": os.getcwd(),
                "files": [str(file) for file in files],
            }
            os.write(self._wanted, json.dumps(request).encode() + b"\n")
            torch, code = self._replies.readline().strip(), self._replies.readline().strip()
            return Ran(int(code), files[1].read_text(), files[2].read_text(), torch == "torch")

    def close(self) -> None:
        """Ends the process that is forked."""
        os.close(self._wanted)
        self._parent.wait(30)
        self._replies.close()


def started(*arguments: str, stdin: str = "", **environment: str) -> Ran:
    """The command in an interpreter of its own, as a user starts it."""
    result = subprocess.run(
        [sys.executable, "-m", "legato", *arguments],
        input=stdin, capture_output=True, text=True, timeout=400, env={**os.environ, "COLUMNS": "200", **environment},
    )  # fmt: skip
    return Ran(result.returncode, result.stdout, result.stderr)
