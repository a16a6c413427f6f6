"""verl's dataset of a run: one row per task of its panels, no parquet (`data.custom_cls`)."""

from collections import Counter
from typing import Any

import torch
from torch.utils.data import Dataset

from verl_multiturn.panel import ALSO, Panel


class EnvDataset(Dataset):  # type: ignore[misc]
    """Rows of (task, content hash, type, panel), read from panel files.

    Args:
        data_files: path of the panel, or paths (`data.train_files` or `data.val_files`).
        max_samples: use only the first tasks of each panel; -1: all.
        **unused: tokenizer, processor, config, which verl passes to every dataset.

    Attributes:
        tasks: of all panels, one panel after another.
        sizes: tasks of each panel: "train", "val", or a name of `multiturn.also`.
    """

    def __init__(self, data_files: Any, max_samples: int = -1, **unused: Any) -> None:
        paths = [data_files] if isinstance(data_files, str) else list(data_files)
        most = None if max_samples < 0 else max_samples
        self._rows = [(panel, task) for panel in map(Panel.load, paths) for task in panel.tasks[:most]]
        self.tasks = [task for _, task in self._rows]
        self.sizes = Counter(panel.split.removeprefix(ALSO) for panel, _ in self._rows)

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, i: int) -> dict[str, Any]:
        panel, task = self._rows[i]
        name = panel.split.removeprefix(ALSO)
        source = panel.env.rsplit("/", 1)[-1]
        return {
            # verl counts the rows of a batch by this column; the agent loop writes the real prompts.
            "raw_prompt": [{"role": "user", "content": str(task.id)}],
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
            "index": i,
            # verl averages by this column: each panel has its own numbers there too.
            "data_source": source if name == panel.split else f"{source}-{name}",
            "split": "train" if panel.split == "train" else "val",
            "panel": name,
            "task": task.id,
            "task_hash": task.hash,
            "task_type": task.type,
        }
