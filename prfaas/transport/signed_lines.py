"""An answer of many lines whose every line proves where it comes from, and that none is missing.

With a cluster key a line is a MAC in hexadecimal, a space and the text; the MAC's key is of this one
answer, and the MAC counts the lines before it. Without one a line is its text. Pure: no I/O.
"""

from prfaas.errors import ProtocolError, UntrustedPeer
from prfaas.transport.auth import Caller, Session, is_same
from prfaas.transport.cluster_key import ClusterKey

MAC_CHARS = 64


def line_key(caller: Caller | None) -> ClusterKey | None:
    """Return the key of the answer to a request; None where nobody proves anything."""
    return None if caller is None else answer_key(caller.session, caller.counter)


def answer_key(session: Session, counter: int) -> ClusterKey:
    """Return the key of the answer to a session's request of that number."""
    return session.key.derive(b"lines", str(counter).encode())


class LineSigner:
    """Makes the lines of one answer, in order."""

    def __init__(self, key: ClusterKey | None) -> None:
        self._key = key
        self._num_lines = 0

    def seal(self, text: bytes) -> bytes:
        """Return `text`, which has no line end, as the next line with its end."""
        assert b"\n" not in text, "one line"
        if self._key is None:
            return text + b"\n"
        mac = _mac(self._key, self._num_lines, text)
        self._num_lines += 1
        return mac.encode() + b" " + text + b"\n"


class LineReader:
    """Takes the bytes of one answer and gives the texts of its lines, in bounded memory."""

    def __init__(self, key: ClusterKey | None, *, max_line_bytes: int) -> None:
        self._key = key
        self._max_line_bytes = max_line_bytes
        self._num_lines = 0
        self._rest = bytearray()

    @property
    def is_between_lines(self) -> bool:
        """Nothing of a line has come whose end has not."""
        return not self._rest

    def received(self, data: bytes) -> list[bytes]:
        """Return the texts of the lines that `data` ends.

        Raises:
            ProtocolError: a line is too long.
            UntrustedPeer: a line is not the next one that the other end has signed.
        """
        *ended, rest = data.split(b"\n")
        texts = []
        for part in ended:
            self._take(part)
            texts.append(self._open(bytes(self._rest)))
            self._rest.clear()
        self._take(rest)
        return texts

    def _take(self, part: bytes) -> None:
        if len(self._rest) + len(part) > self._max_line_bytes:
            raise ProtocolError(f"a line is longer than {self._max_line_bytes} bytes")
        self._rest += part

    def _open(self, line: bytes) -> bytes:
        if self._key is None:
            return line
        mac, text = line[:MAC_CHARS], line[MAC_CHARS + 1 :]
        expected = _mac(self._key, self._num_lines, text)
        if line[MAC_CHARS : MAC_CHARS + 1] != b" " or not is_same(
            expected, mac.decode("ascii", "replace")
        ):
            raise UntrustedPeer("a line is not signed by our session, or one is missing before it")
        self._num_lines += 1
        return text


def _mac(key: ClusterKey, number: int, text: bytes) -> str:
    return key.mac(b"line", str(number).encode(), text).hex()
