"""Row layouts: how the turns of an episode become prompts, and so training rows.

Turn rows bound the context and train each turn alone; trajectory rows share one growing context and
are about T times cheaper to train.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from verl_multiturn.rollout.prompts import Messages, PromptPolicy, View


class Chat(Protocol):
    """What is used of verl's ContinuousTokenBuilder."""

    def build_initial_tokens(self, messages: Messages) -> list[int]:
        """Render a chat with the generation prompt."""
        ...

    def merge_context_tokens(self, previous: Messages, updated: Messages, ids: list[int]) -> Any:
        """Append messages to running ids; `token_ids` of the result is the new stream."""
        ...


@dataclass(frozen=True)
class Limits:
    """Budgets of an episode."""

    max_prompt_tokens: int  # data.max_prompt_length
    max_response_tokens: int  # data.max_response_length: a whole conversation, in trajectory rows
    max_action_tokens: int  # of one utterance
    max_turns: int | None = None  # None: the environment's own
    max_actions: int | None = None  # steps of the environment, where a turn holds several
    episode_timeout: float = 3600.0  # seconds
    generate_timeout: float = 600.0  # seconds of one utterance


class NextPrompt(NamedTuple):
    """What the policy reads at a turn."""

    ids: list[int]  # all tokens it sees
    new: list[int]  # those that its training row gains before the utterance
    messages: Messages  # the chat that the tokens stand for
    dropped_turns: int = 0  # left out to fit the budget
    dropped_actions: int = 0

    @property
    def text(self) -> str:
        """Of the last message."""
        return self.messages[-1]["content"]


class TurnRows:
    """A fresh chat each turn, with a window of history: one training row per turn."""

    name = "turn"

    def __init__(self, policy: PromptPolicy, chat: Chat, limits: Limits, eos: int | None) -> None:
        self.policy, self.chat, self.limits = policy, chat, limits

    def prompt(self, view: View) -> NextPrompt | None:
        """The prompt of the next turn."""
        fit = self.policy.fit(view, self.chat.build_initial_tokens, self.limits.max_prompt_tokens)
        return NextPrompt(fit.ids, fit.ids, fit.messages, fit.dropped_turns, fit.dropped_actions)

    def heard(self, ids: list[int], text: str) -> None:
        """The next chat is built from the view alone."""


class TrajectoryRows:
    """One chat, append-only: one training row per trajectory."""

    name = "trajectory"

    def __init__(self, policy: PromptPolicy, chat: Chat, limits: Limits, eos: int | None) -> None:
        self.policy, self.chat, self.limits, self.eos = policy, chat, limits, eos
        self.messages: Messages = []
        self.ids: list[int] = []
        self.start = 0  # length of the first prompt: what follows is the response

    def prompt(self, view: View) -> NextPrompt | None:
        """The prompt of the next turn; None where the chat has no room for another utterance."""
        if not self.messages:
            encode, budget = self.chat.build_initial_tokens, self.limits.max_prompt_tokens
            fit = self.policy.fit(view, encode, budget)
            self.messages, self.ids, self.start = fit.messages, fit.ids, len(fit.ids)
            return NextPrompt(fit.ids, fit.ids, fit.messages, 0, fit.dropped_actions)
        # An utterance cut by its token limit is closed as the chat template would close it.
        closed = self.ids if self.ids[-1] == self.eos or self.eos is None else [*self.ids, self.eos]
        updated = [*self.messages, self.policy.follow_up(view)]
        ids = list(self.chat.merge_context_tokens(self.messages, updated, closed).token_ids)
        if len(ids) - self.start + self.limits.max_action_tokens > self.limits.max_response_tokens:
            return None
        new, self.messages, self.ids = ids[len(self.ids) :], updated, ids
        return NextPrompt(ids, new, updated)

    def heard(self, ids: list[int], text: str) -> None:
        """Append what the policy said, as the sampled tokens."""
        self.ids = [*self.ids, *ids]
        self.messages = [*self.messages, {"role": "assistant", "content": text}]


LAYOUTS = {layout.name: layout for layout in (TurnRows, TrajectoryRows)}
