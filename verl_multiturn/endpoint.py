"""A model behind an OpenAI-compatible address: chat completions, and chats without a tokenizer.

An episode is made of token ids; an endpoint hides them. Here pieces of text stand for tokens, about
as long as tokens are, so that budgets are estimates; the ids are never recorded.
"""

import asyncio
import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from threading import Lock
from types import SimpleNamespace
from typing import Any, NamedTuple

from verl_multiturn.errors import unknown
from verl_multiturn.rollout.episode import Sample
from verl_multiturn.rollout.prompts import Messages

AGAIN = frozenset({408, 409, 429, 500, 502, 503, 504})  # HTTP codes of troubles that may pass
HOPELESS = frozenset({401, 403, 404})  # of an address, name or key that is wrong for every request
PIECE = re.compile(r" ?[^\W\d_]{1,6}|\d{1,3}|\s+|.", re.DOTALL)
END = 0  # id of the end of a message
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds before the second attempt, and at most


class EndpointDown(ValueError):
    """The endpoint does not answer, or refuses whatever is asked."""


class Refused(ValueError):
    """The endpoint refuses this request, e.g. because its prompt is too long, or its reply is unusable."""


class _Role(NamedTuple):
    name: str


class TextChat:
    """Chats as ids that can be turned back into messages; satisfies `rollout.layouts.Chat`."""

    def __init__(self) -> None:
        self._pieces: list[str | _Role] = [""]  # by id
        self._ids: dict[str | _Role, int] = {}
        self._lock = Lock()  # the prompts of several episodes are built in threads

    def build_initial_tokens(self, messages: Messages) -> list[int]:
        """A chat and the opening of the answer."""
        written = [one for message in messages for one in self._message(message)]
        return [*written, self._id(_Role("assistant"))]

    def merge_context_tokens(self, previous: Messages, updated: Messages, ids: list[int]) -> Any:
        """Append the messages that are new."""
        return SimpleNamespace(token_ids=[*ids, *self.build_initial_tokens(updated[len(previous) :])])

    def encode(self, text: str) -> list[int]:
        """Pieces of text as ids."""
        return [self._id(piece) for piece in PIECE.findall(text)]

    def decode(self, ids: list[int]) -> str:
        """The text of ids."""
        return "".join(piece for piece in map(self._pieces.__getitem__, ids) if isinstance(piece, str))

    def messages(self, ids: Iterable[int]) -> Messages:
        """The chat that `ids` stand for, without the opening of the answer."""
        found: Messages = []
        for piece in map(self._pieces.__getitem__, ids):
            if isinstance(piece, _Role):
                found.append({"role": piece.name, "content": ""})
            else:
                found[-1]["content"] += piece
        return found[:-1]

    def _message(self, message: dict[str, str]) -> list[int]:
        return [self._id(_Role(message["role"])), *self.encode(message["content"]), END]

    def _id(self, piece: str | _Role) -> int:
        with self._lock:
            if piece not in self._ids:
                self._ids[piece] = len(self._pieces)
                self._pieces.append(piece)
            return self._ids[piece]


class Endpoint:
    """Samples from an endpoint; satisfies `rollout.episode.Generate`.

    Args:
        address: "http://host:port/v1#model"; a key, if one is needed, stands in OPENAI_API_KEY.
        sampling: do_sample, temperature, top_p, top_k, as verl's `val_kwargs`.
        timeout: seconds for one answer.
        attempts: for one utterance, where trouble may pass.

    Raises:
        ValueError: an address without a model's name.
        EndpointDown: nobody answers there, or the model is not served.
    """

    token_ids = False
    eos = END

    def __init__(
        self, address: str, sampling: dict[str, Any], timeout: float = 120.0, attempts: int = 5
    ) -> None:
        self.url, _, self.name = address.rpartition("#") if "#" in address else (address, "", "")
        if not self.name:
            raise ValueError(f"{address} names no model: write it behind a #, as in {address}#my-model")
        self.url = self.url.rstrip("/")
        self.timeout, self.attempts = timeout, attempts
        self.options = _options(sampling)
        self._chat = TextChat()
        self._client: Any = None  # of httpx; belongs to the event loop that plays
        self._check()

    def chat(self, **template_kwargs: Any) -> TextChat:
        """Chats in messages: the server renders them, with `template_kwargs` if there are any."""
        if template_kwargs:
            self.options["chat_template_kwargs"] = template_kwargs
        return self._chat

    def decode(self, ids: list[int]) -> str:
        """The text of an utterance."""
        return self._chat.decode(ids)

    def player(self) -> AbstractContextManager[None]:
        """Requests are independent: the server makes its own batches."""
        return nullcontext()

    async def __call__(self, prompt_ids: list[int], max_tokens: int, seed: int | None) -> Sample:
        """Ask for one utterance.

        Raises:
            Refused: the server refuses this one.
            EndpointDown: no answer after `attempts`, or none to be hoped for.
        """
        import httpx

        body = {"model": self.name, "messages": self._chat.messages(prompt_ids), "max_tokens": max_tokens}
        body |= self.options | ({} if seed is None else {"seed": seed})
        if self._client is None:
            self._client = httpx.AsyncClient(timeout=self.timeout, headers=_headers())
        for attempt in range(self.attempts):
            if attempt:
                await asyncio.sleep(min(LONGEST_WAIT, FIRST_WAIT * 2 ** (attempt - 1)))
            try:
                # httpx counts from one piece to the next: a server that trickles would never end.
                async with asyncio.timeout(self.timeout):
                    answer = await self._client.post(f"{self.url}/chat/completions", json=body)
            except TimeoutError:
                problem = f"not whole after {self.timeout:g} s"
                continue
            except httpx.RequestError as error:
                problem = _reason(error)
                continue
            if answer.status_code < 400:
                return self._sample(answer)
            problem = f"HTTP {answer.status_code}: {_brief(answer.text)}"
            if answer.status_code in HOPELESS:
                raise EndpointDown(f"{self.url} refuses {self.name}: {problem}")
            if answer.status_code not in AGAIN:
                raise Refused(f"{self.url} refuses a request: {problem}")
        raise EndpointDown(f"{self.url} gave no answer in {self.attempts} attempts; the last: {problem}")

    async def close(self) -> None:
        """Close the connections."""
        if self._client is not None:
            await self._client.aclose()

    def _sample(self, answer: Any) -> Sample:
        try:
            choice = answer.json()["choices"][0]
            text, cut = choice["message"]["content"] or "", choice.get("finish_reason") == "length"
            if not isinstance(text, str):
                raise TypeError
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
            raise Refused(f"{self.url} sent no chat completion: {_brief(answer.text)}") from None
        return Sample([*self._chat.encode(text), *([] if cut else [END])])

    def _check(self) -> None:
        """Find out in a second what would otherwise fail a thousand times."""
        import httpx

        try:
            answer = httpx.get(f"{self.url}/models", timeout=min(10.0, self.timeout), headers=_headers())
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise EndpointDown(f"no endpoint answers at {self.url}: {_reason(error)}") from None
        if answer.status_code in (401, 403):
            raise EndpointDown(f"{self.url} wants another key than OPENAI_API_KEY: HTTP {answer.status_code}")
        try:
            names = [str(one["id"]) for one in answer.json()["data"]]
        except (ValueError, LookupError, TypeError, RecursionError):
            return  # not every server lists its models
        if names and self.name not in names:
            raise unknown(f"model at {self.url}:", self.name, names)


def _options(sampling: dict[str, Any]) -> dict[str, Any]:
    """The fields of a request; top_k, which OpenAI does not know, only where it is used."""
    if not sampling.get("do_sample", True) or sampling.get("temperature") == 0:
        return {"temperature": 0.0}
    found = {"temperature": sampling.get("temperature", 1.0), "top_p": sampling.get("top_p", 1.0)}
    return found | ({"top_k": sampling["top_k"]} if sampling.get("top_k", -1) > 0 else {})


def _headers() -> dict[str, str]:
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} {error}".strip()


def _brief(text: str) -> str:
    return " ".join(text.split())[:300] or "(nothing)"
