"""The `baton` command as a user runs it, in a home of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

# One of everything that a test waits for, on a machine that does other things too.
LIMIT_S = 240


class Baton:
    """Runs commands that share one $BATON_HOME."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._environment = os.environ | {"BATON_HOME": str(home)}

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A command that the test talks to while it runs."""
        return subprocess.Popen(
            [sys.executable, "-u", "-m", "deploy.cli", *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *arguments: str) -> str:
        """What it printed. Fails the test when the command fails."""
        process = self.start(*arguments)
        output, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, output
        return output

    def status(self) -> dict:
        return json.loads(self.run("status", "--json"))

    def states(self) -> list[dict]:
        """Of all clusters that are up."""
        return [json.loads(path.read_text()) for path in self.home.glob("*/state.json")]


def processes_of(session: int) -> list[str]:
    """The command lines of a session's processes, zombies not counted."""
    listed = subprocess.run(
        ["ps", "-o", "stat=,pid=,args=", "--sid", str(session)], capture_output=True, text=True, check=False
    )
    return [line for line in listed.stdout.splitlines() if not line.startswith("Z")]
