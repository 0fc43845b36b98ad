"""Requests that plan jobs: a few wait, each user gets a turn, and the others are told to come again.

Planning opens arrays of users, which may be slow. So these requests have threads of their own, and those that
read the queue never wait for them.
"""

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from fastapi import Request

from oocgemm.service.protocol import UnavailableError

# Requests that plan or wait for that, of all users and of one.
MAX_PLANS, MAX_PLANS_OF_USER = 256, 128

T = TypeVar("T")
# Returns a context manager, which a thread enters for each job that it plans.
Turn = Callable[[], AbstractContextManager[None]]


@dataclass(eq=False)
class _Ticket:
    """A thread that waits for a turn. `called` is set when it gets one, or after `dropped` is."""

    dropped: threading.Event
    called: threading.Event = field(default_factory=threading.Event)


class Turns:
    """Lets one thread at a time do something. Users whose threads wait get turns one after the other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[_Ticket]] = {}  # by user, in the order of their next turns
        self._holder: _Ticket | None = None

    @contextmanager
    def turn(self, user: str, dropped: threading.Event) -> Iterator[None]:
        """Wait for a turn of a user, and have it for the `with` block.

        Raises `UnavailableError` once `dropped` is set, by `drop`.
        """
        ticket = _Ticket(dropped)
        with self._lock:
            self._waiting.setdefault(user, deque()).append(ticket)
            self._call()
        if not dropped.is_set():
            ticket.called.wait()
        try:
            if dropped.is_set():
                raise UnavailableError("the client has gone, or the server ends: send the request again")
            yield
        finally:
            with self._lock:
                if self._holder is ticket:
                    self._holder = None
                elif ticket in (own := self._waiting.get(user, deque[_Ticket]())):
                    own.remove(ticket)
                    if not own:
                        del self._waiting[user]
                self._call()

    def drop(self, dropped: threading.Event) -> None:
        """Set an event that is passed to `turn`."""
        with self._lock:
            dropped.set()
            for tickets in self._waiting.values():
                for ticket in tickets:
                    if ticket.dropped is dropped:
                        ticket.called.set()

    def _call(self) -> None:
        """Give the turn to the next thread, unless one has it."""
        if self._holder is not None or not self._waiting:
            return
        user = next(iter(self._waiting))
        own = self._waiting.pop(user)
        self._holder = own.popleft()
        if own:
            self._waiting[user] = own  # behind all other users
        self._holder.called.set()


class Plans:
    """The requests that plan jobs, or wait for that."""

    def __init__(self) -> None:
        self._turns = Turns()
        self._pool = ThreadPoolExecutor(MAX_PLANS, "oocgemm-plan")
        self._present: Counter[str] = Counter()
        self._events: set[threading.Event] = set()

    async def run(self, request: Request, user: str, work: Callable[[Turn], T]) -> T:
        """Do the work of a request in a thread, unless its client goes.

        Args:
            request: the request, whose body has been received.
            user: who sends it.
            work: gets the `Turn` of the request.

        Raises:
            UnavailableError: too many requests wait, or the client has gone.
        """
        total, own = self._present.total(), self._present[user]
        if total >= MAX_PLANS or own >= MAX_PLANS_OF_USER:
            raise UnavailableError(
                f"{own} requests of {user} and {total - own} of others wait for their plans, and "
                f"{MAX_PLANS_OF_USER} per user and {MAX_PLANS} in all may: send the request again"
            )
        dropped = threading.Event()
        self._present[user] += 1
        self._events.add(dropped)
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._pool, work, lambda: self._turns.turn(user, dropped))
        done.add_done_callback(lambda _: self._end(user, dropped))
        gone = asyncio.create_task(_gone(request))
        try:
            await asyncio.wait((done, gone), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                self._turns.drop(dropped)
            return await done
        finally:
            gone.cancel()
            self._turns.drop(dropped)

    def close(self) -> None:
        """Let all requests end that wait."""
        for dropped in list(self._events):
            self._turns.drop(dropped)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _end(self, user: str, dropped: threading.Event) -> None:
        self._events.discard(dropped)
        self._present[user] -= 1
        if not self._present[user]:
            del self._present[user]


async def _gone(request: Request) -> None:
    """Return when the client of a request has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
