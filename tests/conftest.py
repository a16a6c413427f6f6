"""Shared by several files: an in-memory TransferQueue for what imports verl, a folder of ALFWorld games."""

import copy

import pytest
from hypothesis import settings

from verl_multiturn import heartbeat

# The same examples in every run: what a random search finds belongs into a test, not into some runs.
settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.fixture(autouse=True)
def this_process_lives_on():
    """A run that lost a process would end the process of the tests, too, minutes later."""
    yield
    heartbeat.over()


@pytest.fixture(scope="module")
def parsed_once():
    """hydra reads verl's hundred YAML files for every composition; here each is parsed once."""
    from hydra._internal.core_plugins.file_config_source import FileConfigSource

    from verl_multiturn import compose

    read, memo = FileConfigSource.load_config, {}

    def load(self, config_path):
        place = self.path, config_path
        if place not in memo:
            memo[place] = read(self, config_path)
        return copy.deepcopy(memo[place])

    compose_it, base = compose._hydra, compose._hydra("multiturn", [])

    def hydra(recipe, overrides):
        return base if (recipe, overrides) == ("multiturn", []) else compose_it(recipe, overrides)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileConfigSource, "load_config", load)
        patch.setattr(compose, "_hydra", hydra)
        yield


class InMemoryQueue:
    """The calls of `transfer_queue` that verl and we use, over real tensordicts, without Ray.

    As in the real one, vectors come back jagged even where all lengths are equal, what is no tensor
    as a NonTensorStack, and a selected field that was never written is left out.
    """

    def __init__(self):
        self.rows = {}  # (partition, key) -> fields
        self.tags = {}  # (partition, key) -> tag
        self.cleared = []

    def kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        import torch

        assert fields is None or len(fields) == len(keys)
        for name in () if fields is None else fields.keys():
            column = fields.get(name)
            values = column.unbind() if isinstance(column, torch.Tensor) else column.tolist()
            for key, value in zip(keys, values, strict=True):
                self.rows.setdefault((partition_id, key), {})[name] = value
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
            if not all(isinstance(value, torch.Tensor) for value in values):
                columns[name] = NonTensorStack(*values)
            elif values[0].dim():
                columns[name] = torch.nested.as_nested_tensor(values, layout=torch.jagged)
            else:
                columns[name] = torch.stack(values)
        return TensorDict(columns, batch_size=len(keys))

    def kv_clear(self, keys, partition_id):
        for key in keys:
            self.cleared.append((partition_id, key))
            self.rows.pop((partition_id, key), None)
            self.tags.pop((partition_id, key), None)

    def kv_list(self, partition_id=None):
        found = {}
        for (partition, key), tag in self.tags.items():
            if partition_id in (None, partition):
                found.setdefault(partition, {})[key] = dict(tag)
        return found

    async def async_kv_batch_put(self, keys, partition_id, fields=None, tags=None):
        return self.kv_batch_put(keys, partition_id, fields, tags)

    async def async_kv_put(self, key, partition_id, fields=None, tag=None):
        return self.kv_batch_put([key], partition_id, fields, None if tag is None else [tag])

    def meta(self, keys, partition_id):
        from transfer_queue import KVBatchMeta

        names = [set(self.rows.get((partition_id, key), ())) for key in keys]
        tags = [self.tags[partition_id, key] for key in keys]
        return KVBatchMeta(list(keys), tags, partition_id, sorted(set.intersection(*names)))

    def put_rows(self, rows):
        """Rows {key: (mask, extra_fields)} as the rollout writes them. -> batch."""
        import torch
        from tensordict import NonTensorStack, TensorDict

        def jagged(*lists):
            return torch.nested.as_nested_tensor([torch.tensor(one) for one in lists], layout=torch.jagged)

        masks, extras = zip(*rows.values(), strict=True)
        columns = {
            "prompts": jagged(*([100, 101 + i] for i in range(len(rows)))),
            "responses": jagged(*([10 * i + j for j in range(len(m))] for i, m in enumerate(masks))),
            "response_mask": jagged(*masks),
            "rollout_log_probs": jagged(*([-0.5] * len(mask) for mask in masks)),
            "extra_fields": NonTensorStack(*extras),
            "uid": NonTensorStack(*(key.rsplit("_", 2)[0] for key in rows)),
        }
        tags = [{"status": "success", "seq_len": 2 + len(mask)} for mask in masks]
        return self.kv_batch_put(list(rows), "train", TensorDict(columns, batch_size=len(rows)), tags)

    def column(self, batch, name):
        """Key -> the row's numbers."""
        data = self.kv_batch_get(batch.keys, "train", [name])
        return {key: row.tolist() for key, row in zip(batch.keys, data[name].unbind(), strict=True)}


@pytest.fixture
def queue(monkeypatch):
    """An empty in-memory TransferQueue, in place of the real one for every module that uses it."""
    transfer_queue = pytest.importorskip("transfer_queue")
    queue = InMemoryQueue()
    for name in dir(queue):
        if name.startswith(("kv_", "async_kv_")):
            assert hasattr(transfer_queue, name), name
            monkeypatch.setattr(transfer_queue, name, getattr(queue, name))
    return queue


@pytest.fixture(scope="session")
def q_folder(tmp_path_factory):
    """A Q model that nobody fitted: two small chat models of transformers, which tell words apart."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PhiConfig, PhiForCausalLM, PreTrainedTokenizerFast

    from verl_multiturn.search.q_model import QSpec, write_spec

    words = "<pad> <end> ? up down left right action think user assistant 51 52 53 54 55 56 57 58 59".split()
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    template = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}assistant"
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>", chat_template=template
    )
    config = PhiConfig(
        vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=1024, initializer_range=0.3,
        eos_token_id=1, pad_token_id=0, bos_token_id=None,
    )  # fmt: skip
    place = tmp_path_factory.mktemp("q")
    for seed, name in enumerate(("reference", "model")):
        torch.manual_seed(seed)
        PhiForCausalLM(config).save_pretrained(place / name)
        made.save_pretrained(place / name)
    write_spec(place / "model", QSpec(str(place / "reference"), beta=1.0, max_tokens=1000))
    return place / "model"


@pytest.fixture(scope="session")
def alfworld_games(tmp_path_factory):
    """A folder of 18 training games of small scenes, 6 seen, 6 unseen, of all task types."""
    pytest.importorskip("alfworld", reason='needs pip install "verl-multiturn[alfworld]"')
    from environments.alfworld_parts.games import Request, write_games

    folder = tmp_path_factory.mktemp("alfworld") / "small"
    counts = {"train": 18, "valid_seen": 6, "valid_unseen": 6}
    write_games(folder, Request(counts, seed=5, receptacles=9, objects=10), quiet=True)
    return folder
