"""What both demos tell, and whom they tell it with: the two turns, and a daemon to kill.

Covers the messages and the daemon's process. Leaves engines to the demos, figures to demo_report.py.
"""

from __future__ import annotations

import hashlib
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from socket import create_server
from typing import Any

from forebay.clients import Client
from forebay.kvstore.errors import ClientError

HERE = Path(__file__).resolve().parent
Message = dict[str, str]

SYSTEM = "You are a careful web developer. Change only what is asked, and show the lines that you changed."
SECOND_TURN = "Move the login button to the top right."
UNRELATED = [
    "Say in one sentence what a lighthouse is for.",
    "Explain to a new colleague how a bakery plans its night: when the ovens are lit, why the dough rests, who checks the "
    "flour, how the loaves are counted, and what happens when a machine stops at three in the morning. " * 4,
]


class DemoFailed(RuntimeError):
    """The story could not be told to its end; the message says why."""


def first_turn() -> list[Message]:
    files = [HERE / "demo_site" / name for name in ("index.html", "styles.css", "app.js")]
    project = "\n\n".join(f"{f.name}:\n```{f.suffix[1:]}\n{f.read_text()}```" for f in files)
    ask = f"Here is my web project.\n\n{project}\n\nMake the title a little larger."
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": ask}]


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


def stop(process: subprocess.Popen[Any]) -> None:
    """Ask it to end, then make it."""
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _network_settings(port: int, token: str) -> str:
    """A settings file: TCP for who has the token, the Unix socket for who may open it."""
    digest = hashlib.sha256(token.encode()).hexdigest()
    return (
        f'tcp_port = {port}\nunix_rights = ["read", "write"]\n'
        f'[credentials.demo]\ntenant = "default"\nrights = ["read", "write"]\ntoken_sha256 = "{digest}"\n'
    )


class DaemonProcess:
    """`forebay serve` on a socket, with a directory for its ssd tier."""

    def __init__(self, socket: Path, disk: Path, log: Path, ram_bytes: str) -> None:
        self.socket, self.log = socket, log
        with create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url, self.token = f"tcp://127.0.0.1:{port}", secrets.token_urlsafe(32)
        config = socket.with_name("settings.toml")
        config.write_text(_network_settings(port, self.token))
        self._command = [sys.executable, "-m", "forebay", "serve", "--http-port", "off", "--socket", str(socket)]
        self._command += ["--config", str(config), "--ram-bytes", ram_bytes]
        self._command += ["--ssd-dirs", str(disk), "--ssd-bytes", "2GiB"]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        with self.log.open("ab") as sink:
            process = self._process = subprocess.Popen(self._command, stdout=sink, stderr=sink)
        limit = time.monotonic() + 30
        while True:
            try:
                Client(self.socket, timeout_s=1.0).close()
                return
            except ClientError as exc:
                if process.poll() is not None or time.monotonic() > limit:
                    raise DemoFailed(f"the daemon did not start ({exc}); its log ends with:\n{tail(self.log)}") from exc
                time.sleep(0.05)

    def kill(self) -> None:
        """As a crash would."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            stop(self._process)
