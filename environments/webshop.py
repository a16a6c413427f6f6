"""WebShop in text: search a shop for the product that an instruction asks for, choose options, buy.

Description:
    The shop of WebShop (arXiv 2207.01206) in its text mode, in pure Python: no Java, no server. Plays
    the original's product files where the user has them, else a generated catalogue in their format,
    whose scores are not comparable with WebShop's. Catalogue and search index are built once into
    the cache and shared, memory-mapped, by all environments of a machine.
Actions:
    search[words] (on any page, as in the original) and click[name], where name is a button, a
    product id or an option's value on the page (any case).
Observation:
    The page's visible strings, joined by " [SEP] ", in the original's order: search page, results (10
    a page, up to 50), item page with options, Description, Features, Reviews, the page after Buy Now.
    The instruction, which the original repeats on each page, is in `instruction`, unless
    `instruction_on_page`. Chosen options are not marked, as in the original.
Start:
    The search page.
Rewards:
    At Buy Now: "success" pays `scale` for a score of exactly 1, else 0 (verl-agent's rule); "score" pays
    `scale` times the score, which is r_type · (attributes + options + price met) / (number of
    attributes + number of options + 1). All other turns 0.
Episode end:
    Terminated by Buy Now. Truncated after `max_turns` turns.
Information:
    `success`: bought with a score of 1. `score`: in [0, 1], 0 until Buy Now. After Buy Now also
    `score_parts`: the type factor and what was met. `task_type` names the catalogue's size and the
    department: "products1000-fashion", generated ones "products1000-generated-fashion".
State key:
    The page without the instruction, as verl-agent's anchors: it leaves out the turn count, the
    chosen options and, on the pages of a product, the search that led there. With `key="state"` the
    whole state of the shop, options and search included.
Tasks:
    Goals are shuffled once with the original's seed, 233. `tasks(split)`: positions 0-499 are "test",
    500-1499 "val", the rest "train"; fewer than 3,000 goals are split 1 : 2 : 3; a goal whose text
    stood before is left out. An id is "goal-<position>"; an int is a training goal, modulo their
    number. Price limits follow from the goal alone.

Arguments:
    data: folder with the original's items_shuffle(_1000).json, items_ins_v2(_1000).json and
        items_human_ins.json, or the products' file in it; default $WEBSHOP_DATA; without either the
        catalogue is generated.
    products: how many; None: all of `data`.
    catalogue_seed: of a generated catalogue.
    goals: "synthetic" (made from attributes and options, verl-agent's default) or "human" (written).
    reward: "success" or "score".
    scale: what a score of 1 pays; default 10 for "success", 1 for "score".
    nouns: how title nouns are found for r_type: "lexicon" (no package) or "spacy" (the original's way;
        needs spaCy and en_core_web_sm).
    key: "page" or "state", see above.
    instruction_on_page: whether pages repeat the instruction, as the original's do.
    max_turns: turns in an episode.
"""

import json
import os
import re
from collections.abc import Hashable
from dataclasses import asdict
from typing import Literal, get_args

from environments.webshop_parts.catalogue import Shop, Source, open_shop
from environments.webshop_parts.expert import next_action, search_words
from environments.webshop_parts.generate import write_catalogue
from environments.webshop_parts.goals import SPLITS, Kind
from environments.webshop_parts.nouns import Nouns, check_nouns
from environments.webshop_parts.pages import SEPARATOR, Page, State, page_of
from environments.webshop_parts.records import Goal
from environments.webshop_parts.score import Score, score
from environments.webshop_parts.upstream import find_files
from verl_multiturn.env import Env, Info, Seed
from verl_multiturn.errors import unknown
from verl_multiturn.needs import Needs

__all__ = ["WebShop", "write_catalogue"]

ACTION = re.compile(r"\s*(search|click)\s*\[(.+)\]\s*", re.IGNORECASE | re.DOTALL)
Reward = Literal["success", "score"]
Key = Literal["page", "state"]


class WebShop(Env):
    """See the module's docstring."""

    needs = Needs(
        extra="webshop",
        packages=("bm25s", "Stemmer", "thefuzz"),
        data="the JSON files items_shuffle, items_ins_v2 and items_human_ins of princeton-nlp/WebShop, their "
        "folder in $WEBSHOP_DATA; without them a generated catalogue is played",
        licence="WebShop is MIT; its products are Amazon's",
    )

    def __init__(
        self,
        data: str | None = None,
        products: int | None = 1000,
        catalogue_seed: int = 0,
        goals: Kind = "synthetic",
        reward: Reward = "success",
        scale: float | None = None,
        nouns: Nouns = "lexicon",
        key: Key = "page",
        instruction_on_page: bool = False,
        max_turns: int = 15,
    ) -> None:
        for name, given, valid in (("goals", goals, Kind), ("reward", reward, Reward), ("key", key, Key)):
            if given not in get_args(valid):
                raise unknown(name, given, get_args(valid))
        check_nouns(nouns)
        data = data or os.environ.get("WEBSHOP_DATA") or None
        if data is None and products is None:
            raise ValueError("products=None needs data: a generated catalogue needs a number of products.")
        where = data and os.path.abspath(os.path.expanduser(data))
        self.shop: Shop = open_shop(Source(where, products, catalogue_seed), goals)
        self.reward: Reward = reward
        self.scale = scale if scale is not None else 10.0 if reward == "success" else 1.0
        self.nouns, self.key, self.instruction_on_page = nouns, key, instruction_on_page
        self.max_turns = max_turns

    @classmethod
    def find_data(cls) -> str | None:
        """$WEBSHOP_DATA, if it holds the original's files."""
        data = os.environ.get("WEBSHOP_DATA")
        try:
            return str(find_files(data, None)[0].parent) if data else None
        except ValueError:
            return None

    def tasks(self, split: str) -> list[Seed]:
        """See `Env.tasks`: the ids of "test", "val" or "train"."""
        if split not in SPLITS:
            raise unknown("split of webshop", split, SPLITS)
        return [f"goal-{position}" for position in self.shop.split(split)]

    def peek(self, seed: Seed) -> tuple[str, str]:
        """See `Env.peek`."""
        goal = self.shop.goals.get(self._position(seed))
        return self._content(goal), self._task_type(goal)

    def content(self, observation: str) -> str:
        """See `Env.content`: the goal and the catalogue's digest."""
        return self._content(self.goal)

    def _content(self, goal: Goal) -> str:
        return json.dumps([asdict(goal), self.shop.digest], sort_keys=True)

    def _task_type(self, goal: Goal) -> str:
        made = "" if self.shop.source.data else "generated-"
        return f"products{len(self.shop.products)}-{made}{self.shop.products.get(goal.product).category}"

    def _position(self, seed: Seed) -> int:
        if isinstance(seed, int):
            return int(self.shop.train[seed % len(self.shop.train)])
        number = seed.removeprefix("goal-")
        if seed.startswith("goal-") and number.isdecimal() and int(number) < len(self.shop.goals):
            return int(number)
        raise ValueError(
            f"no task {seed!r} in webshop: a task is 'goal-0' to 'goal-{len(self.shop.goals) - 1}', or an "
            "int for a training goal."
        )

    def _reset(self, seed: Seed) -> tuple[str, Info]:
        self.goal = self.shop.goals.get(self._position(seed))
        self.instruction = (
            f"Shop for what this asks: {self.goal.text}. Actions: search[words], click[name] with a button, "
            "product id or option of the page. Choose options before click[buy now], which ends the task."
        )
        self._go(State())
        return self._text(), {"task_type": self._task_type(self.goal), "score": 0.0}

    def _go(self, state: State) -> None:
        self.state, self.page = state, page_of(self.shop, state)

    def _text(self) -> str:
        parts = list(self.page.parts)
        if self.instruction_on_page and self.state.page != "done":
            at = 1 if self.state.page == "search" else 0
            parts[at:at] = ["Instruction:", self.goal.text]
        return SEPARATOR.join(parts)

    def _step(self, action: str) -> tuple[str, float, bool, Info]:
        after = self._after(action)
        if after is None:
            return self._observation, 0.0, False, {"valid": False, "score": 0.0}
        self._go(after)
        if after.page != "done":
            return self._text(), 0.0, False, {"score": 0.0}
        bought = self._score()
        won = bought.value == 1
        self.page = Page((*self.page.parts, "Your score (min 0.0, max 1.0)", str(bought.value)), {})
        reward = self.scale * (won if self.reward == "success" else bought.value)
        info = {"success": won, "score": bought.value, "score_parts": asdict(bought)}
        return self._text(), reward, True, info

    def _after(self, action: str) -> State | None:
        """The state that an action leads to; None: it does nothing here."""
        match = ACTION.fullmatch(action)
        if match is None:
            return None
        verb, name = match[1].lower(), " ".join(match[2].lower().split())
        if verb == "search":
            return State("results", name) if name else None
        return self.page.buttons.get(name)

    def _score(self) -> Score:
        bought, wanted = (self.shop.products.get(n) for n in (self.state.product, self.goal.product))
        return score(bought, [value for _, value in self.state.options], self.goal, wanted, self.nouns)

    def admissible(self) -> list[str]:
        """The clickable names; on the search page a search for the instruction's own words."""
        if self.state.page == "search":
            return [f"search[{search_words(self.goal)}]"]
        return [f"click[{name}]" for name in self.page.buttons]

    def state_key(self) -> Hashable:
        """See the module's docstring."""
        return SEPARATOR.join(self.page.parts) if self.key == "page" else self.state

    def expert(self) -> str:
        """A shopper who knows the goal's product: see `webshop_parts.expert`."""
        return next_action(self.shop, self.goal, self.state)
