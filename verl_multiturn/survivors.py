"""What a step keeps of its rollout where trajectories were lost: `multiturn.failures.group`.

keep: the survivors, so groups differ in size; drop: complete groups only; refill: the tasks of the
others are rolled out again, and what then is still incomplete is dropped.
"""

from collections import defaultdict
from typing import Any


class Survivors:
    """Gathers the rows of a step, whose keys are `{uid}_{session}_{row}`.

    Args:
        policy: "keep", "drop" or "refill".
        groups: of the step.
        size: trajectories of a complete group.

    Attributes:
        failed: trajectories lost so far.
    """

    def __init__(self, policy: str, groups: int, size: int) -> None:
        self.policy, self.groups, self.size = policy, groups, size
        self.failed = 0
        self._batches: list[Any] = []
        self._sessions: dict[str, set[str]] = {}

    def take(self, batch: Any) -> list[str]:
        """Keep what the policy keeps of a rollout of the `missing` groups; return the other rows' keys.

        Args:
            batch: a `KVBatchMeta`.
        """
        sessions: dict[str, set[str]] = defaultdict(set)
        for key in batch.keys:
            sessions[_uid(key)].add(key.rsplit("_", 2)[1])
        self.failed += self.missing * self.size - sum(map(len, sessions.values()))
        lost = {uid for uid, one in sessions.items() if len(one) < self.size and self.policy != "keep"}
        self._sessions |= {uid: one for uid, one in sessions.items() if uid not in lost}
        kept = [key for key in batch.keys if _uid(key) not in lost]
        self._batches.append(batch.select_keys(kept) if lost else batch)
        return [key for key in batch.keys if _uid(key) in lost]

    @property
    def uids(self) -> set[str]:
        """Of the groups kept."""
        return set(self._sessions)

    @property
    def missing(self) -> int:
        """Groups that are not kept: lost, or not rolled out yet."""
        return self.groups - len(self._sessions)

    @property
    def trajectories(self) -> int:
        """Kept."""
        return sum(map(len, self._sessions.values()))

    @property
    def batch(self) -> Any:
        """The rows kept, as one `KVBatchMeta`."""
        first, *others = self._batches
        if not others:
            return first
        keys = [key for one in self._batches for key in one.keys]
        tags = [tag for one in self._batches for tag in one.tags]
        return type(first)(partition_id=first.partition_id, keys=keys, tags=tags)

    @property
    def dropped(self) -> int:
        """Groups that are left out by the policy."""
        return 0 if self.policy == "keep" else self.missing


def _uid(key: str) -> str:
    return key.rsplit("_", 2)[0]
