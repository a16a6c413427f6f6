r"""A retriever behind HTTP, in the format of Search-R1's retrieval server (arXiv 2503.09516).

POST {"queries": [...], "topk": k, "return_scores": true}
  -> {"result": [[{"document": {"contents": "title\ntext"}, "score": s}, ...], ...]}
"""

import itertools
import json
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

from environments.retrieval_parts.passages import Passage, to_passage

AGAIN = frozenset({408, 425, 429, 500, 502, 503, 504})  # HTTP codes of troubles that may pass
LONGEST_WAIT = 8.0  # seconds


class RetrieverDown(RuntimeError):
    """No retriever gave a usable reply; one sentence."""


class HTTPRetriever:
    """Asks the addresses in turn; a failed request goes on to the next one, after a wait that doubles.

    Args:
        urls: of `/retrieve`.
        timeout: seconds for one request; `tries` times this should stay below `multiturn.step_timeout`.
        tries: requests before it gives up.
        wait: seconds before the second request.

    Raises:
        ValueError: an address that is none, or a number out of range.
    """

    def __init__(self, urls: Sequence[str], timeout: float = 10.0, tries: int = 4, wait: float = 0.5) -> None:
        for url in urls:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"retriever {url!r} is not an address: it begins with http:// or https://")
        if not (urls and timeout > 0 and tries >= 1 and wait >= 0):
            raise ValueError(
                f"needs an address, timeout > 0, tries >= 1 and wait >= 0, not {list(urls)}, {timeout}, "
                f"{tries}, {wait}"
            )
        self.urls, self.timeout, self.tries, self.wait = tuple(urls), timeout, tries, wait
        self._turns = itertools.count()  # `next` on it is atomic: threads share it

    @cached_property
    def _client(self) -> Any:
        import httpx

        return httpx.Client(timeout=self.timeout)  # keeps connections open; threads may share it

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Up to `k` passages per query, best first.

        Raises:
            RetrieverDown: no usable reply; says what came instead.
        """
        import httpx

        body = {"queries": queries, "topk": k, "return_scores": True}
        trouble = ""
        for attempt in range(self.tries):
            if attempt:
                time.sleep(min(LONGEST_WAIT, self.wait * 2 ** (attempt - 1)))
            url = self.urls[next(self._turns) % len(self.urls)]
            try:
                status, text = self._post(url, body)
            except httpx.TransportError as error:
                trouble = f"{url}: {type(error).__name__} after {self.timeout:g} s or less ({error})"
                continue
            if status == 200:
                return _passages(url, text, len(queries), k)
            trouble = f"{url}: HTTP {status} {text[:80]!r}"
            if status not in AGAIN:
                raise RetrieverDown(f"the retriever refuses the request, {trouble}")
        raise RetrieverDown(f"no reply from the retriever after {self.tries} requests, the last to {trouble}")

    def _post(self, url: str, body: dict[str, Any]) -> tuple[int, str]:
        """Status and text of a reply that has come whole in `timeout` seconds.

        httpx counts from one piece to the next: a server that sends a byte now and then would never end.
        """
        import httpx

        until, pieces = time.monotonic() + self.timeout, list[bytes]()
        with self._client.stream("POST", url, json=body) as reply:
            for piece in reply.iter_bytes():
                pieces.append(piece)
                if time.monotonic() > until:
                    raise httpx.ReadTimeout(f"{sum(map(len, pieces))} bytes came, not the whole reply")
        return reply.status_code, b"".join(pieces).decode(errors="replace")


def _passages(url: str, text: str, queries: int, k: int) -> list[list[Passage]]:
    try:
        lists = json.loads(text)["result"]
        # without scores the server sends the bare documents
        found = [[to_passage(one.get("document", one)) for one in some][:k] for some in lists]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise RetrieverDown(
            f"the retriever at {url} replied {text[:80]!r}, not "
            f'{{"result": [[{{"document": {{"contents": ...}}, "score": ...}}]]}} ({error})'
        ) from None
    if len(found) != queries:
        raise RetrieverDown(f"the retriever at {url} answered {len(found)} queries of {queries}")
    return found
