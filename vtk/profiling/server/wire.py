"""A persistent HTTP/1.1 connection with one deadline for connecting, sending and every byte of the answer.

The timeout of a socket is for one operation and starts anew with each byte that arrives, so a server that sends one
byte a second is never late. Here each operation gets what is left until the deadline. Requests go out as they lie in
memory (`sendmsg`): a load generator that copies images measures itself.
"""

import http.client
import io
import socket
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from typing import Any

MAX_ANSWER = 256 << 20
"""Bytes of an answer; the logits of 1,024 images and 21,841 classes take 90 million."""

_MOST_PARTS = 512
_STEP = 1 << 20
Address = tuple[Any, ...]


@dataclass(frozen=True)
class Reply:
    """An answer that has come completely.

    Attributes:
        status: of HTTP.
        reason: in the server's words.
        headers: as sent.
        body: all bytes.
    """

    status: int
    reason: str
    headers: Message
    body: bytes


def resolve(host: str, port: int, timeout: float) -> list[Address]:
    """Look a host's addresses up; the system's resolver has no timeout of its own.

    Raises:
        OSError: there are none, or not in time.
    """
    found: list[Address] = []
    errors: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:  # a label of more than 63 letters is no IDNA
            errors.append(error if isinstance(error, OSError) else OSError(f"{host} is no host name"))

    thread = threading.Thread(target=look_up, daemon=True)
    thread.start()
    thread.join(timeout)
    if errors:
        raise errors[0]
    if not found:
        raise TimeoutError(f"{host} could not be looked up within {timeout:g} s")
    return found


class Wire:
    """A connection that is made when it is first needed and again after it was closed; for one thread.

    Args:
        addresses: of `resolve`; tried in turn.
        tls: host name and settings, for ``https``.
    """

    def __init__(self, addresses: Sequence[Address], tls: tuple[str, ssl.SSLContext] | None = None) -> None:
        self._addresses, self._tls = addresses, tls
        self._socket: socket.socket | None = None
        self._reader: io.BufferedReader
        self._deadline = 0.0
        self._looking = self._ended = False

    def exchange(self, method: str, parts: Sequence[bytes | memoryview], timeout: float) -> Reply:
        """Send a request and read its answer within ``timeout`` seconds.

        Args:
            method: of HTTP.
            parts: head and body, sent one after the other.
            timeout: of all of it.

        Raises:
            OSError, http.client.HTTPException: no answer, or not in time; the connection is then closed.
        """
        self._deadline = time.perf_counter() + timeout
        try:
            if self._socket is not None and self._closed_by_peer():
                self.close()
            if self._socket is None:
                self._socket, self._reader = self._connect(), _Reader(_Raw(self), 1 << 16)
            self._send(parts)
            reply, keep = self._read(method)
        except TimeoutError as error:
            self.close()
            raise TimeoutError(f"timed out: no complete answer within {timeout:.3g} s") from error
        except BaseException:
            self.close()  # its state is unknown
            raise
        if not keep:
            self.close()
        return reply

    def close(self) -> None:
        """Close the connection; the next request makes a new one."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None

    def receive_into(self, buffer: Any) -> int | None:
        """Read what has come, or wait for it until the deadline; None where nothing is there and nobody waits."""
        assert self._socket is not None
        if not self._looking:
            self._socket.settimeout(self._left())
            return self._socket.recv_into(buffer)
        self._socket.settimeout(0.0)
        try:
            count = self._socket.recv_into(buffer)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        self._ended = count == 0
        return count

    def _left(self) -> float:
        left = self._deadline - time.perf_counter()
        if left <= 0:
            raise TimeoutError
        return left

    def _connect(self) -> socket.socket:
        failure: OSError = OSError("no address")
        for family, kind, protocol, _, address in self._addresses:
            made = socket.socket(family, kind, protocol)
            try:
                made.settimeout(self._left())
                made.connect(address)
                made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is not None:
                    made.settimeout(self._left())
                    made = self._tls[1].wrap_socket(made, server_hostname=self._tls[0])
                return made
            except OSError as error:
                made.close()
                failure = error
        raise failure

    def _closed_by_peer(self) -> bool:
        """Return whether the server has closed the connection while nothing was asked: it may, and it is no failure."""
        self._looking, self._ended = True, False
        try:
            stray = self._reader.peek(1)
        except OSError:
            return True
        finally:
            self._looking = False
        if stray:
            # read as the next request's answer, it would belong to the one before
            raise http.client.HTTPException("the server sent more than its answer")
        return self._ended

    def _send(self, parts: Sequence[bytes | memoryview]) -> None:
        wire: Any = self._socket
        if self._tls is not None or not hasattr(wire, "sendmsg"):
            whole = memoryview(b"".join(parts))
            for start in range(0, len(whole), _STEP):
                wire.settimeout(self._left())
                wire.sendall(whole[start : start + _STEP])
            return
        rest, first = list(parts), 0
        while first < len(rest):
            wire.settimeout(self._left())
            sent = wire.sendmsg(rest[first : first + _MOST_PARTS])
            while first < len(rest) and sent >= len(rest[first]):
                sent -= len(rest[first])
                first += 1
            if sent:
                rest[first] = memoryview(rest[first])[sent:]

    def _read(self, method: str) -> tuple[Reply, bool]:
        """Return the answer, and whether the connection may be used again."""
        response = http.client.HTTPResponse(_Readable(self._reader), method=method)  # type: ignore[arg-type]
        try:
            response.begin()
            length = response.length
            if length is not None and length <= MAX_ANSWER:
                body = response.read()  # raises where less comes
            else:
                body = b"" if length is not None else response.read(MAX_ANSWER + 1)
                if length is not None or len(body) > MAX_ANSWER:
                    raise http.client.HTTPException(f"the answer has more than {MAX_ANSWER:,} bytes")
            return Reply(response.status, response.reason, response.headers, body), not response.will_close
        finally:
            response.close()


class _Readable:
    """What `http.client.HTTPResponse` wants of a socket; the reader stays, with what it has read beyond an answer."""

    def __init__(self, reader: io.BufferedReader) -> None:
        self.reader = reader

    def makefile(self, mode: str) -> io.BufferedReader:
        return self.reader


class _Reader(io.BufferedReader):
    def close(self) -> None:
        """Stay open for the next answer."""


class _Raw(io.RawIOBase):
    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        return self.wire.receive_into(buffer)
