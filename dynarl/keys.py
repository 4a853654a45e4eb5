"""CURVE keys of one job: who may talk on its sockets.

Two key pairs lie in `<run>/keys/` (directory 0700, files 0600): the controller's and the agents'. A server socket admits
only the public keys of these two, so a process that cannot read the run directory can neither listen nor speak.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import zmq
import zmq.auth.asyncio


class KeyPair(NamedTuple):
    public: bytes
    secret: bytes


def create(directory: Path) -> None:
    """Make fresh key pairs, replacing older ones (a new attempt of a job gets new keys)."""
    directory.mkdir(mode=0o700, exist_ok=True)
    directory.chmod(0o700)
    for name in ("controller", "agent"):
        public, secret = zmq.curve_keypair()
        path = directory / f"{name}.key"
        temporary = path.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(public + b"\n" + secret + b"\n")
        os.replace(temporary, path)


def load(directory: Path, name: str) -> KeyPair:
    """Read the pair `name`. Raises PermissionError when others could read it too."""
    path = directory / f"{name}.key"
    mode = path.stat().st_mode & 0o077
    if mode:
        raise PermissionError(f"{path} is readable by others (mode {path.stat().st_mode & 0o777:o}); chmod 600 it")
    public, secret = path.read_bytes().split()
    return KeyPair(public, secret)


def admit(context: zmq.asyncio.Context, *pairs: KeyPair) -> zmq.auth.asyncio.AsyncioAuthenticator:
    """Start the authenticator of `context`: its CURVE servers admit exactly these public keys."""
    allowed = {pair.public for pair in pairs}

    class Callback:
        def callback(self, domain: str, key: bytes) -> bool:
            return key in allowed

    authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
    authenticator.start()
    authenticator.configure_curve_callback(domain="*", credentials_provider=Callback())
    return authenticator


def as_server(socket: zmq.Socket, own: KeyPair) -> None:
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own


def as_client(socket: zmq.Socket, own: KeyPair, server_public: bytes) -> None:
    socket.curve_publickey, socket.curve_secretkey = own
    socket.curve_serverkey = server_public
