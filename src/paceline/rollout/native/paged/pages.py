"""Pages of the KV cache: a pool with reference counts, and the full pages of known tokens that others may share."""

from collections.abc import Sequence

SCRATCH_PAGE = 0
"""Never handed out: rows that pad a batch read and write it."""


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than were asked for; the caller preempts and tries again."""


class PagePool:
    """Pages 1 .. num_pages - 1. A page is free when nobody refers to it."""

    def __init__(self, num_pages: int) -> None:
        self._references = [1]  # the scratch page
        self._free: list[int] = []
        self.grow(num_pages)

    @property
    def num_pages(self) -> int:
        """All pages, the scratch page included."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages nobody refers to."""
        return len(self._free)

    @property
    def num_held(self) -> int:
        """Pages somebody refers to, the scratch page not counted."""
        return self.num_pages - 1 - len(self._free)

    def grow(self, num_pages: int) -> None:
        """Adds free pages until there are `num_pages`. Numbers of existing pages stay."""
        first = len(self._references)
        self._references += [0] * max(0, num_pages - first)
        self._free[:0] = range(num_pages - 1, first - 1, -1)

    def take(self, count: int) -> list[int]:
        """Pages with one reference each.

        Raises:
            OutOfPagesError: not that many are free; none is taken.
        """
        if count > len(self._free):
            raise OutOfPagesError(
                f"{count} pages asked for, {len(self._free)} of {self.num_pages - 1} are free"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int], times: int = 1) -> None:
        """`times` more references to each of `pages`, which must be held by somebody."""
        for page in pages:
            assert self._references[page] > 0, f"page {page} is free and cannot be shared"
            self._references[page] += times

    def release(self, pages: Sequence[int]) -> list[int]:
        """One reference less to each; returns the pages that became free by it."""
        freed = []
        for page in pages:
            assert page != SCRATCH_PAGE and self._references[page] > 0, f"page {page} is not held"
            self._references[page] -= 1
            if self._references[page] == 0:
                freed.append(page)
        self._free += freed
        return freed

    def num_holders(self, page: int) -> int:
        """How many references there are to the page."""
        return self._references[page]

    def is_shared(self, page: int) -> bool:
        """Whether more than one holder refers to the page."""
        return self._references[page] > 1


class PrefixIndex:
    """Finds held full pages by the tokens they hold, so that prompts with a common beginning compute it once.

    A page is known by its tokens and the page before it. Whoever holds a page holds all pages before it, so a page's
    predecessor cannot be freed, and its number cannot be reused, while the page itself is held.
    """

    def __init__(self, page_tokens: int) -> None:
        self._page_tokens = page_tokens
        self._pages: dict[tuple[int, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[int, tuple[int, ...]]] = {}

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Held pages that cover a beginning of `tokens`; at least the last token stays uncovered, because its hidden
        state is what the next token is drawn from."""
        found: list[int] = []
        parent = -1
        for start in range(0, len(tokens) - self._page_tokens, self._page_tokens):
            page = self._pages.get((parent, tuple(tokens[start : start + self._page_tokens])))
            if page is None:
                break
            found.append(page)
            parent = page
        return found

    def add(self, tokens: Sequence[int], pages: Sequence[int], start_page: int, end_page: int) -> None:
        """Makes the full pages [start_page, end_page) of a sequence known. The first to hold a prefix stays the one."""
        for index in range(start_page, end_page):
            parent = pages[index - 1] if index else -1
            part = tuple(tokens[index * self._page_tokens : (index + 1) * self._page_tokens])
            if (parent, part) not in self._pages and pages[index] not in self._keys:
                self._pages[parent, part] = pages[index]
                self._keys[pages[index]] = (parent, part)

    def forget(self, pages: Sequence[int]) -> None:
        """Pages that became free."""
        for page in pages:
            if key := self._keys.pop(page, None):
                del self._pages[key]

    def clear(self) -> None:
        """Nothing is known any more (the weights changed); pages stay with their holders."""
        self._pages.clear()
        self._keys.clear()
