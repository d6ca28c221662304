"""What keys have used: tokens and cost by day, key and model, and the budgets of keys. Pure: time is an argument.

A request adds to one entry. Entries are taken for the file every few seconds, and at the end of each request of a key
with a budget. Budgets are compared with what the file has of all processes, and what this one has added since.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from msgspec import Struct

from modelyard.accounts.keys import Key
from modelyard.accounts.settings import BudgetPeriod
from modelyard.core.errors import KeyLimited, QuotaExceeded
from modelyard.core.events import Usage

DAY_S = 86_400
_MILLION = 1_000_000


class Price(Struct, frozen=True):
    """Per million tokens."""

    input: float = 0.0
    cached_input: float = 0.0
    output: float = 0.0

    def cost(self, usage: Usage) -> float:
        fresh = usage.prompt - usage.cached
        return (fresh * self.input + usage.cached * self.cached_input + usage.output * self.output) / _MILLION


class UsageCounts(Struct):
    """`prompt` includes the cached tokens, `output` those of reasoning. `last` is the unix time of the last request."""

    requests: int = 0
    failed: int = 0
    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    cost: float = 0.0
    last: float = 0.0

    def add(self, other: UsageCounts) -> None:
        self.requests += other.requests
        self.failed += other.failed
        self.prompt += other.prompt
        self.cached += other.cached
        self.output += other.output
        self.reasoning += other.reasoning
        self.cost += other.cost
        self.last = max(self.last, other.last)


UsageKey = tuple[int, str, str]  # day since 1970, name of the API key, model


class BudgetUse(Struct):
    """What a key has used of its budget in the period that ends at `resets` (None: never). `since` is its first day."""

    key: Key
    since: int
    resets: float | None
    tokens: int = 0
    cost: float = 0.0
    held_tokens: int = 0  # that running requests may still use
    held_cost: float = 0.0

    def restart(self, now: float) -> None:
        """If the period is over, the next one begins."""
        if self.resets is not None and now >= self.resets:
            self.since, self.resets = period(self.key.budget_period, now)
            self.tokens, self.cost = 0, 0.0

    def check(self, now: float) -> None:
        key = self.key
        if key.token_budget is not None and self.tokens >= key.token_budget:
            raise self._exceeded(f"{key.token_budget} tokens", now)
        if key.cost_budget is not None and self.cost >= key.cost_budget:
            raise self._exceeded(f"{key.cost_budget:g} (its cost)", now)

    def room(self, price: Price, prompt: int, output: int, choices: int) -> int:
        """How many of `output` tokens each of `choices` replies to prompts of `prompt` tokens may have."""
        key = self.key
        if key.token_budget is not None:
            output = min(output, (key.token_budget - self.tokens - self.held_tokens - prompt) // choices)
        if key.cost_budget is not None:
            left = key.cost_budget - self.cost - self.held_cost - price.cost(Usage(prompt))
            one = price.output * choices / _MILLION
            output = min(output, int(left / one + 1e-6) if one else output if left >= 0 else 0)
        return max(0, output)

    def reserve(self, price: Price, prompt: int, output: int, choices: int, now: float) -> tuple[int, int, float]:
        """The tokens that each reply may have, and the tokens and cost of all that. Raises if there is no room for
        one. The caller holds them."""
        most = self.room(price, prompt, max(1, output), choices)
        if most < 1:
            raise self.no_room(prompt, now)
        most = min(most, output)
        usage = Usage(prompt, 0, most * choices)
        return most, usage.prompt + usage.output, price.cost(usage)

    def no_room(self, prompt: int, now: float) -> QuotaExceeded | KeyLimited:
        if self.held_tokens:
            return KeyLimited(
                f"the key {self.key.name!r} has not enough of its budget left beside its requests that wait or run: "
                "wait for one of them, or send a smaller max_tokens",
                retry_after=1.0,
            )
        budget = self.key.token_budget
        amount = f"{self.key.cost_budget or 0:g} (its cost)" if budget is None else f"{budget} tokens"
        left = "" if budget is None else f" but {max(0, budget - self.tokens)}, and the prompt has {prompt}"
        return self._exceeded(amount, now, left)

    def _exceeded(self, amount: str, now: float, left: str = "") -> QuotaExceeded:
        key, resets = self.key, self.resets
        if resets is None:
            return QuotaExceeded(f"the key {key.name!r} has used its budget of {amount}{left}; it does not reset")
        when = datetime.fromtimestamp(resets, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        used = f"the key {key.name!r} has used its budget of {amount} a {key.budget_period}{left}"
        return QuotaExceeded(f"{used}; it resets at {when}", retry_after=resets - now)


def day_of(now: float) -> int:
    return int(now // DAY_S)


def period(kind: BudgetPeriod, now: float) -> tuple[int, float | None]:
    """The first day of the period, and the unix time of its end."""
    if kind == "total":
        return 0, None
    if kind == "day":
        return day_of(now), float((day_of(now) + 1) * DAY_S)
    first = datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (first + timedelta(days=32)).replace(day=1)
    return day_of(first.timestamp()), following.timestamp()


class UsageLedger:
    """The usage of this process. `pending` is not in the file yet; `written` is since the start of the process."""

    def __init__(self) -> None:
        self.prices: Mapping[str, Price] = {}
        self.pending: dict[UsageKey, UsageCounts] = {}
        self.written: dict[tuple[str, str], UsageCounts] = {}
        self.budgets: dict[str, BudgetUse] = {}

    def add(self, key: str, model: str, usage: Usage, now: float, *, failed: bool = False, requests: int = 1) -> float:
        """Returns the cost."""
        at = (int(now // DAY_S), key, model)
        counts = self.pending.get(at)
        if counts is None:
            counts = self.pending[at] = UsageCounts()
        price = self.prices.get(model)
        cost = 0.0 if price is None else price.cost(usage)
        counts.requests += requests
        counts.failed += failed
        counts.prompt += usage.prompt
        counts.cached += usage.cached
        counts.output += usage.output
        counts.reasoning += usage.reasoning
        counts.cost += cost
        counts.last = now
        if self.budgets and (budget := self.budgets.get(key)) is not None:
            budget.restart(now)
            budget.tokens += usage.prompt + usage.output
            budget.cost += cost
        return cost

    # --- budgets ------------------------------------------------------------------------------------------------------

    def check_budget(self, key: str, now: float) -> None:
        """Raise QuotaExceeded if this key may not start another request."""
        if (budget := self.budgets.get(key)) is not None:
            budget.restart(now)
            budget.check(now)

    def hold(self, key: str, model: str, prompt: int, output: int, choices: int, now: float) -> tuple[int, int, float]:
        """The tokens that each reply may have, and what is held of the budget until `free`. Raises if there is no room
        for one."""
        budget = self.budgets.get(key)
        if budget is None:
            return output, 0, 0.0
        budget.restart(now)
        most, tokens, cost = budget.reserve(self.price(model), prompt, output, choices, now)
        budget.held_tokens += tokens
        budget.held_cost += cost
        return most, tokens, cost

    def price(self, model: str) -> Price:
        return self.prices.get(model) or Price()

    def unwritten(self, budget: BudgetUse) -> tuple[int, float]:
        """Tokens and cost of its period that the file does not have yet."""
        found = [
            counts for (day, key, _), counts in self.pending.items() if key == budget.key.name and day >= budget.since
        ]
        return sum(each.prompt + each.output for each in found), sum(each.cost for each in found)

    def free(self, key: str, tokens: int, cost: float) -> None:
        if tokens and (budget := self.budgets.get(key)) is not None:
            budget.held_tokens -= tokens
            budget.held_cost -= cost

    def set_keys(self, keys: Iterable[Key], now: float) -> None:
        """A key with the same period keeps what it has used."""
        before, self.budgets = self.budgets, {}
        for key in keys:
            if key.token_budget is None and key.cost_budget is None:
                continue
            use = before.get(key.name)
            if use is None or use.key.budget_period != key.budget_period:
                use = BudgetUse(key, *period(key.budget_period, now))
            use.key = key
            self.budgets[key.name] = use

    def periods(self, now: float) -> dict[str, int]:
        """The keys with budgets, and the first day of their periods."""
        for budget in self.budgets.values():
            budget.restart(now)
        return {name: budget.since for name, budget in self.budgets.items()}

    # --- the file -----------------------------------------------------------------------------------------------------

    def take(self) -> dict[UsageKey, UsageCounts]:
        """What is to be written now. `wrote` or `put_back` follows."""
        taken, self.pending = self.pending, {}
        return taken

    def put_back(self, taken: Mapping[UsageKey, UsageCounts]) -> None:
        for at, counts in taken.items():
            self.pending.setdefault(at, UsageCounts()).add(counts)

    def wrote(self, taken: Mapping[UsageKey, UsageCounts]) -> None:
        for (_, key, model), counts in taken.items():
            self.written.setdefault((key, model), UsageCounts()).add(counts)

    def read(self, spent: Mapping[str, tuple[int, UsageCounts]]) -> None:
        """What the file has of keys with budgets, each since its first day: of all processes."""
        for name, (since, counts) in spent.items():
            if (budget := self.budgets.get(name)) is not None and budget.since == since:
                budget.tokens, budget.cost = counts.prompt + counts.output, counts.cost
                tokens, cost = self.unwritten(budget)
                budget.tokens, budget.cost = budget.tokens + tokens, budget.cost + cost

    def series(self, currency: str) -> dict[str, dict[tuple[str, ...], float]]:
        """As metrics. The currency is a label: sums of two currencies would mean nothing."""
        found: dict[str, dict[tuple[str, ...], float]] = {
            "usage_requests_total": {},
            "usage_failed_total": {},
            "usage_tokens_total": {},
            "usage_cost_total": {},
        }
        for at, counts in self.totals().items():
            found["usage_requests_total"][at] = counts.requests
            found["usage_failed_total"][at] = counts.failed
            found["usage_cost_total"][*at, currency] = counts.cost
            for kind in ("prompt", "cached", "output", "reasoning"):
                found["usage_tokens_total"][*at, kind] = getattr(counts, kind)
        return found

    def totals(self) -> dict[tuple[str, str], UsageCounts]:
        """By key and model, since the start of this process."""
        found = {at: UsageCounts() for at in self.written}
        for at, counts in self.written.items():
            found[at].add(counts)
        for (_, key, model), counts in self.pending.items():
            found.setdefault((key, model), UsageCounts()).add(counts)
        return found
