"""Telling systemd that the daemon is ready, or is stopping: one datagram to the socket that `Type=notify` names.

Without NOTIFY_SOCKET in the environment nothing happens. The protocol is sd_notify(3)'s; written here because it is one
datagram, and the library for it needs systemd's own to be built. Always true: a supervisor that doesn't listen harms nothing.
"""

from __future__ import annotations

import logging
import os
import socket

log = logging.getLogger("forebay.notify")


def notify(state: str) -> None:
    """Send `state`, such as "READY=1", to the supervisor."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC) as sock:
            sock.sendto(state.encode(), address)
    except OSError as exc:
        log.warning("the supervisor was not told", extra={"state": state, "why": exc.strerror or str(exc)})
