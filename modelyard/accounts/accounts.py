"""The accounts of a running server: its keys, their usage, and the file that keeps both.

Keys and usage are in memory, where a request finds them; a task writes the usage every few seconds and reads what other
processes have changed. Budgets are held in the file (`hold`): several processes cannot exceed one together. A change of
a key is written first and takes effect in this process when the call returns; the others read it when they are asked to
(`refresh`), or at their next turn.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

from msgspec.structs import replace

from modelyard.accounts.admission import Admission
from modelyard.accounts.file import AccountsFile, key_not_found, name_taken
from modelyard.accounts.keys import LOGIN_S, Key, KeyLogin, KeyRing, make_key, new_secret, secret_digest, secret_hint
from modelyard.accounts.settings import KeyRules, NewKey
from modelyard.accounts.usage import Price, UsageCounts, UsageLedger, period
from modelyard.core.errors import Conflict, KeyLimited, ModelyardError, Unauthenticated, Unavailable
from modelyard.core.events import Usage

log = logging.getLogger("modelyard.accounts")

P = ParamSpec("P")
T = TypeVar("T")

_SYNC_S = 2.0
_SETTLE_S = (0.1, 0.4)  # between tries to hold a part of a budget that other requests hold


class Accounts:
    """`file` None: nothing is kept, and keys cannot be created (a server that runs for one command)."""

    def __init__(
        self,
        configured: Sequence[Key] = (),
        file: AccountsFile | None = None,
        *,
        currency: str = "USD",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ring, self.ledger, self.currency = KeyRing(configured, clock), UsageLedger(), currency
        self.admission = Admission(self.ledger, clock)
        self.on_change: Callable[[], None] = lambda: None  # the keys or their limits have changed
        self.on_revoked: Callable[[str], None] = lambda _: None
        self._file, self._clock = file, clock
        self._thread: ThreadPoolExecutor | None = None
        self._turns: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._exchanges: set[asyncio.Task[None]] = set()
        self._revoked: tuple[Key, ...] = ()
        self._is_unwritten = False  # the last write failed
        self._process, self._hold_ids = secrets.token_hex(8), itertools.count(1)
        self._ended_holds: list[int] = []  # of budgets, to be freed with the next write
        self.ledger.set_keys(self.ring.keys, clock())
        if file is not None:
            self._install(file.all_keys(), file.logins())
            self.ledger.read(file.usage_since(self.ledger.periods(clock())))
            file.close()  # from now on another thread uses it
            self.admission.shared = self

    def __repr__(self) -> str:
        return f"<Accounts {self.ring!r}>"

    def configure(self, keys: Sequence[Key], prices: Mapping[str, Price], currency: str) -> None:
        """A new configuration."""
        before, self.ledger.prices, self.currency = self.ring.keys, prices, currency
        self.ring.configure(keys)
        self._compare(before)

    # --- the request path ---------------------------------------------------------------------------------------------

    def check_budget(self, key: str) -> bool:
        """Whether the key has a budget. Raise QuotaExceeded if it may not start another request."""
        has_budget = key in self.ledger.budgets
        if has_budget:
            self.ledger.check_budget(key, self._clock())
        return has_budget

    def add(self, key: str, model: str, usage: Usage, *, failed: bool = False, requests: int = 1) -> float:
        """Count a request; returns its cost."""
        return self.ledger.add(key, model, usage, self._clock(), failed=failed, requests=requests)

    async def hold(
        self, key: str, model: str, prompt: int, output: int, choices: int
    ) -> tuple[int | None, tuple[int, int, float]]:
        """Hold a part of the budget of a key in the file, where all processes do; returns the number of the hold and
        what it has. Raises if there is no room. If the file cannot be used, what this process holds by itself counts:
        the number is None then."""
        file, budget, now = self._opened_file(), self.ledger.budgets[key], self._clock()
        price, id = self.ledger.price(model), next(self._hold_ids)

        async def attempt() -> tuple[int, int, float]:
            more_tokens, more_cost = self.ledger.unwritten(budget)

            def reserve(tokens: int, cost: float, held_tokens: int, held_cost: float) -> tuple[int, int, float]:
                tokens, cost = tokens + more_tokens, cost + more_cost
                state = replace(budget, tokens=tokens, cost=cost, held_tokens=held_tokens, held_cost=held_cost)
                return state.reserve(price, prompt, output, choices, now)

            def hold() -> tuple[int, int, float]:
                self._check_usable()
                try:
                    return file.hold(self._process, id, budget.since, key, reserve, now)
                except Unavailable as error:
                    self._report_unwritten(error)
                    raise

            self._check_usable()
            return await self._run(hold)

        try:
            if self._ended_holds and not self._is_unwritten:  # they would count as held
                await self.sync()
            for pause in _SETTLE_S:  # a request that has ended in another process may free its part in a moment
                with contextlib.suppress(KeyLimited):
                    return id, await attempt()
                await asyncio.sleep(pause)
            return id, await attempt()
        except Unavailable:
            return None, replace(budget, held_tokens=0, held_cost=0.0).reserve(price, prompt, output, choices, now)
        except BaseException:
            self.end_hold(id)  # it may have been held after its request was cancelled
            raise

    def _check_usable(self) -> None:
        """A locked file takes ten seconds to say so, and all requests would wait for that, one after the other. The
        next exchange tells when it can be used again."""
        if self._is_unwritten:
            raise Unavailable("the file of accounts cannot be used")

    def end_hold(self, id: int) -> None:
        """Its request has ended, and its usage was added: both are written at once, in one transaction."""
        self._ended_holds.append(id)
        if len(self._ended_holds) == 1:
            self._start_exchange()

    # --- keys ---------------------------------------------------------------------------------------------------------

    async def create(self, wanted: NewKey, *, open_to_all: bool) -> tuple[Key, str]:
        """The new key and its secret, which is nowhere else. `open_to_all`: the server needs no key by now."""
        await self.refresh()
        if open_to_all and not wanted.admin and not self.ring.has_admin():
            raise Conflict(
                "this server has no keys yet, and with the first one every request needs a key: create an admin key "
                "first (admin: true)",
                code="first_key_not_admin",
                param="admin",
            )
        if wanted.name in self.ring.by_name:
            raise name_taken(wanted.name)
        secret = new_secret()
        key = make_key(
            "key_" + secrets.token_hex(8),
            wanted.name,
            secret_digest(secret),
            wanted,
            hint=secret_hint(secret),
            created=self._clock(),
        )
        await self._run(self._opened_file().add, key)
        await self.refresh()
        log.info("the key %r was created", key.name)
        return key, secret

    async def change(self, id: str, changes: Mapping[str, Any]) -> Key:
        """`changes` are fields of `KeyRules`."""
        await self.refresh()
        key = self._created(id)
        rules = KeyRules.model_validate({**key.rules().model_dump(), **changes})
        if key.admin and not rules.admin:
            self._check_not_last_admin(key)
        await self._run(self._opened_file().update, id, rules)
        await self.refresh()
        log.info("the key %r was changed: %s", key.name, ", ".join(changes))
        return self._created(id)

    async def revoke(self, id: str, *, may_open: bool) -> Key:
        """`may_open`: without any key the server would be open to its own machine only."""
        await self.refresh()
        key = self._created(id)
        is_only = self.ring.keys == (key,)
        if key.admin and not (is_only and may_open):
            self._check_not_last_admin(key)
        await self._run(self._opened_file().revoke, id, self._clock())
        await self.refresh()
        log.info("the key %r was revoked", key.name)
        return next(each for each in self._revoked if each.id == id)

    def _created(self, id: str) -> Key:
        key = next((each for each in self.ring.keys if each.id == id), None)
        if key is None:
            raise key_not_found(id)
        if key.is_configured:
            raise Conflict(
                f"the key {key.name!r} is defined in the configuration; change it there, then reload",
                code="key_is_configured",
            )
        return key

    def _check_not_last_admin(self, key: Key) -> None:
        if not self.ring.has_admin(without=key.id):
            raise Conflict(
                f"{key.name!r} is the last admin key; create another one first, or nobody can manage this server",
                code="last_admin_key",
            )

    def revoked(self) -> tuple[Key, ...]:
        return self._revoked

    async def refresh(self) -> None:
        """Read the created keys again: another process may have changed them."""
        if self._file is not None:
            self._install(*await self._run(_keys_and_logins, self._file))

    # --- browsers ---------------------------------------------------------------------------------------------------

    async def log_in(self, secret: str) -> tuple[str, float]:
        """A secret for the cookie of a browser that has sent this key, and until when it is valid. It is in the file,
        so that a login outlives the server."""
        if not self.ring.has_secret(secret):
            raise Unauthenticated("log in with an API key", code="key_required")
        made, until = new_secret(), self._clock() + LOGIN_S
        await self._run(
            self._opened_file().add_login, KeyLogin(secret_digest(made), secret_digest(secret), until), self._clock()
        )
        await self.refresh()
        return made, until

    async def log_out(self, secret: str) -> None:
        await self._run(self._opened_file().remove_login, secret_digest(secret))
        await self.refresh()

    def _install(self, created: Iterable[Key], logins: Iterable[KeyLogin]) -> None:
        found = tuple(created)
        self._revoked = tuple(key for key in found if key.revoked is not None)
        before = self.ring.keys
        self.ring.set_created(found, logins)
        self._compare(before)

    def _compare(self, before: Sequence[Key]) -> None:
        if self.ring.keys != before:
            self.ledger.set_keys(self.ring.keys, self._clock())
            self.on_change()
            for name in {key.name for key in before} - self.ring.by_name.keys():
                self.on_revoked(name)

    # --- usage --------------------------------------------------------------------------------------------------------

    async def usage(
        self, by: Sequence[str], first: int, last: int, key: str | None = None, model: str | None = None
    ) -> list[tuple[tuple[int | str, ...], UsageCounts]]:
        await self.sync()
        return [] if self._file is None else await self._run(self._file.usage, by, first, last, key, model)

    async def usage_of_keys(self, keys: Iterable[Key]) -> dict[str, UsageCounts]:
        """Of each key in its budget period."""
        await self.sync()
        if self._file is None:
            return {}
        periods = {key.name: period(key.budget_period, self._clock())[0] for key in keys}
        found = await self._run(self._file.usage_since, periods)
        return {name: counts for name, (_, counts) in found.items()}

    async def sync(self) -> None:
        """Write what was used, and read what all processes have used and changed. It is finished even if the caller is
        cancelled."""
        if self._file is not None:
            await asyncio.shield(self._start_exchange())

    def _start_exchange(self) -> asyncio.Task[None]:
        exchange = asyncio.get_running_loop().create_task(self._exchange(self._opened_file()))
        self._exchanges.add(exchange)
        exchange.add_done_callback(self._exchanges.discard)
        return exchange

    async def _exchange(self, file: AccountsFile) -> None:
        taken, now = self.ledger.take(), self._clock()
        periods = self.ledger.periods(now)
        ended, self._ended_holds = self._ended_holds, []

        def exchange() -> tuple[tuple[list[Key], list[KeyLogin]], dict[str, tuple[int, UsageCounts]]]:
            file.add_usage(taken, self._process, ended, now)
            return _keys_and_logins(file), file.usage_since(periods)

        try:
            found, spent = await self._run(exchange)
        except ModelyardError as error:
            self.ledger.put_back(taken)
            self._ended_holds += ended
            self._report_unwritten(error)
            return
        self._is_unwritten = False
        self.ledger.wrote(taken)
        self._install(*found)
        self.ledger.read(spent)

    def _report_unwritten(self, error: ModelyardError) -> None:
        if not self._is_unwritten:
            log.error("usage is not written: %s", error.message)
        self._is_unwritten = True

    # --- the file -----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to exchange with the file; call it on the event loop."""
        if self._file is not None and self._turns is None:
            self._turns = asyncio.get_running_loop().create_task(self._take_turns())

    async def _take_turns(self) -> None:
        while not self._closing.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), _SYNC_S)
            await self.sync()

    async def close(self) -> None:
        """Write the rest."""
        self._closing.set()
        if self._turns is not None:
            await self._turns
        elif self.ledger.pending:
            await self.sync()
        await asyncio.gather(*self._exchanges, return_exceptions=True)
        if self._thread is not None and self._file is not None:
            with contextlib.suppress(ModelyardError):  # others free it when this process is not seen any more
                await self._run(self._file.free_all, self._process)
            await self._run(self._file.close)
            self._thread.shutdown(wait=False)
            self._thread = None

    def _opened_file(self) -> AccountsFile:
        if self._file is None:
            raise Conflict("this server runs for one command only and keeps no keys", code="no_accounts_file")
        return self._file

    async def _run(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="accounts")
        return await asyncio.wrap_future(self._thread.submit(call, *args, **kwargs))


def _keys_and_logins(file: AccountsFile) -> tuple[list[Key], list[KeyLogin]]:
    return file.all_keys(), file.logins()
