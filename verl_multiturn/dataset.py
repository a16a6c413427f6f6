"""verl's dataset of a run: one row per task of a panel, no parquet (`data.custom_cls`)."""

from typing import Any

import torch
from torch.utils.data import Dataset

from verl_multiturn.panel import Panel


class EnvDataset(Dataset):  # type: ignore[misc]
    """Rows of (task, content hash, type), read from a panel file.

    Args:
        data_files: path of the panel (`data.train_files` or `data.val_files`).
        max_samples: use only the first tasks; -1: all.
        **unused: tokenizer, processor, config, which verl passes to every dataset.
    """

    def __init__(self, data_files: Any, max_samples: int = -1, **unused: Any) -> None:
        path = data_files if isinstance(data_files, str) else next(iter(data_files))
        panel = Panel.load(path)
        self.name, self.split = panel.name, panel.split
        self.tasks = panel.tasks if max_samples < 0 else panel.tasks[:max_samples]

    def __len__(self) -> int:
        return len(self.tasks)

    def __getitem__(self, i: int) -> dict[str, Any]:
        task = self.tasks[i]
        return {
            # verl counts the rows of a batch by this column; the agent loop writes the real prompts.
            "raw_prompt": [{"role": "user", "content": str(task.id)}],
            "dummy_tensor": torch.zeros(1, dtype=torch.uint8),
            "index": i,
            "data_source": self.name.rsplit("-", 1)[0].rsplit("/", 1)[-1],
            "split": "train" if self.split == "train" else "val",
            "task": task.id,
            "task_hash": task.hash,
            "task_type": task.type,
        }
