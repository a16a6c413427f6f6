"""Shared by the tests that import verl: an in-memory TransferQueue."""

import copy


class InMemoryQueue:
    """The calls of `transfer_queue` that verl and we use, over real tensordicts, without Ray.

    As in the real one, 1-D tensors come back jagged even where all lengths are equal, other values as
    a NonTensorStack, and a selected field that was never written is left out.
    """

    def __init__(self):
        from transfer_queue import KVBatchMeta

        self.KVBatchMeta = KVBatchMeta
        self.rows = {}  # (partition, key) -> fields
        self.tags = {}  # (partition, key) -> tag
        self.cleared = []

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        if fields is not None:
            assert len(fields) == len(keys)
            for name in fields.keys():
                column = fields.get(name)
                values = column.unbind() if hasattr(column, "unbind") else column
                for key, value in zip(keys, values, strict=True):
                    value = getattr(value, "data", value) if not hasattr(value, "shape") else value
                    self.rows.setdefault((partition_id, key), {})[name] = (
                        getattr(value, "tolist", None) and (value if _is_tensor(value) else value.tolist())
                    ) or value
        for key, tag in zip(keys, tags or [{}] * len(keys), strict=True):
            self.tags.setdefault((partition_id, key), {}).update(copy.deepcopy(tag))
        return self.meta(keys, partition_id)

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        import torch
        from tensordict import NonTensorStack, TensorDict

        rows = [self.rows[partition_id, key] for key in keys]
        names = [name for name in select_fields or rows[0] if all(name in row for row in rows)]
        columns = {}
        for name in names:
            values = [copy.deepcopy(row[name]) for row in rows]
            if not all(_is_tensor(value) for value in values):
                columns[name] = NonTensorStack(*values)
            elif values[0].dim():
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = torch.stack(values)
        return TensorDict(columns, batch_size=len(keys))

    def kv_clear(self, keys, partition_id):
        self.cleared += [(partition_id, key) for key in keys]
        for key in keys:
            self.rows.pop((partition_id, key), None)
            self.tags.pop((partition_id, key), None)

    def kv_list(self, partition_id=None):
        found = {}
        for (partition, key), tag in self.tags.items():
            if partition_id in (None, partition):
                found.setdefault(partition, {})[key] = tag
        return found

    async def async_kv_batch_put(self, **kwargs):
        return self.kv_batch_put(**kwargs)

    async def async_kv_put(self, key, partition_id, fields=None, tag=None):
        return self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag])

    def meta(self, keys, partition_id):
        tags = [self.tags[partition_id, key] for key in keys]
        fields = sorted(set.intersection(*(set(self.rows.get((partition_id, key), {})) for key in keys)))
        return self.KVBatchMeta(keys=list(keys), tags=tags, partition_id=partition_id, fields=fields)
