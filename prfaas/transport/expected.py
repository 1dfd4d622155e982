"""Finds the transfer that a stream is attached to, also where ATTACH came before the request for it."""

import asyncio
from collections.abc import Callable

from prfaas.errors import TransferError
from prfaas.transport.attach import Attach
from prfaas.transport.auth import is_same
from prfaas.transport.outgoing import OutgoingTransfer

ATTACH_WAIT_S = 5.0


class ExpectedTransfers:
    """Lets streams wait, each for a bounded time, for transfers that are about to be opened."""

    def __init__(
        self, transfer_of: Callable[[str], OutgoingTransfer | None], *, wait_s: float
    ) -> None:
        self._transfer_of = transfer_of
        self._wait_s = wait_s
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._is_closed = False

    async def find(self, attach: Attach) -> OutgoingTransfer:
        """Return the transfer.

        Raises TransferError where there is none, or its capability is another. One that was streamed
        before is not waited for.
        """
        transfer = self._transfer_of(attach.transfer_id)
        if transfer is None and not attach.resumes and not self._is_closed:
            await self._wait_for(attach.transfer_id)
            transfer = self._transfer_of(attach.transfer_id)
        if transfer is None:
            raise TransferError("no such transfer")
        if not is_same(transfer.capability, attach.capability):
            raise TransferError("the transfer was promised to somebody else")
        return transfer

    async def _wait_for(self, transfer_id: str) -> None:
        opened = asyncio.Event()
        self._waiting.setdefault(transfer_id, set()).add(opened)
        try:
            async with asyncio.timeout(self._wait_s):
                await opened.wait()
        except TimeoutError:
            return
        finally:  # also where its stream was lost meanwhile: nothing is kept for who has left
            waiting = self._waiting.get(transfer_id, set())
            waiting.discard(opened)
            if not waiting:
                self._waiting.pop(transfer_id, None)

    def settle(self, transfer_id: str) -> None:
        """Let go of who waits for a transfer: it was opened, or refused."""
        for opened in self._waiting.pop(transfer_id, ()):
            opened.set()

    def close(self) -> None:
        """Let go of everybody."""
        self._is_closed = True
        for transfer_id in tuple(self._waiting):
            self.settle(transfer_id)
