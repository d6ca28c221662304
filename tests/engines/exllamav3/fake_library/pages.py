"""KV pages: complete ones are reused if all tokens up to their end match, partial ones as far as they match."""

from __future__ import annotations

PAGE = 256


class Page:
    def __init__(self, serial: int) -> None:
        self.before: tuple[int, ...] = ()
        self.tokens: list[int] = []
        self.ref_count, self.serial = 0, serial

    @property
    def kv_position(self) -> int:
        return len(self.tokens)

    def clear(self) -> None:
        assert self.ref_count == 0
        self.before, self.tokens = (), []


class PageTable:
    def __init__(self, tokens: int) -> None:
        self.all_pages = [Page(number) for number in range(tokens // PAGE)]
        self._serial = len(self.all_pages)

    @property
    def unreferenced_pages(self) -> dict[int, Page]:
        return {number: page for number, page in enumerate(self.all_pages) if page.ref_count == 0}

    def found(self, ids: list[int]) -> list[Page]:
        """The complete pages of the prompt that exist; its last token is always read."""
        pages: list[Page] = []
        for end in range(PAGE, len(ids), PAGE):
            before, own = tuple(ids[: end - PAGE]), ids[end - PAGE : end]
            page = next((page for page in self.all_pages if page.tokens == own and page.before == before), None)
            if page is None:
                break
            pages.append(page)
        return pages

    def take(self, ids: list[int], pages: int) -> tuple[list[Page], int]:
        """The pages of a job, and how many of them are already filled."""
        taken = self.found(ids)
        for page in taken:
            page.ref_count += 1
        free = sorted(self.unreferenced_pages.values(), key=lambda page: (page.kv_position > 0, page.serial))
        fresh = free[: pages - len(taken)]
        for number, page in enumerate(fresh, len(taken)):
            page.clear()
            page.ref_count, page.before = 1, tuple(ids[: number * PAGE])
        self._serial += 1
        for page in (*taken, *fresh):
            page.serial = self._serial
        return [*taken, *fresh], len(taken)

    def begun(self, ids: list[int], start: int, own: Page) -> int:
        """How many tokens from `start` on another page holds."""
        before, wanted, best = tuple(ids[:start]), ids[start : start + PAGE], 0
        for page in self.all_pages:
            if page is not own and page.before == before and page.tokens:
                best = max(best, _common(page.tokens, wanted))
        return best if best > 1 else 0


def _common(one: list[int], other: list[int]) -> int:
    same = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        same += 1
    return same
