"""Tasks of a run: by seeds, by the environment's lists, by panels; more panels to validate on."""

import pytest
from omegaconf import OmegaConf

from verl_multiturn import configure, tasks
from verl_multiturn.compose import compose
from verl_multiturn.limits import check_values
from verl_multiturn.panel import Panel

ROOMS = """
from verl_multiturn.env import Env
from verl_multiturn.errors import unknown

LISTS = {
    "train": [f"train/{n}" for n in range(40)],
    "valid_seen": [f"seen/{n}" for n in range(10)],
    "valid_unseen": [f"unseen/{n}" for n in range(12)],
    "mixed": ["train/0", "unseen/0", "mixed/0"],
}

class Rooms(Env):
    instruction = "Go north."

    def __init__(self, name="room"):
        self.name = name

    def tasks(self, split):
        if split not in LISTS:
            raise unknown("split of rooms", split, LISTS)
        return LISTS[split]

    def peek(self, seed):
        kind, _, number = str(seed).partition("/")
        return f"{self.name} {seed}", "even" if number in ("", *"02468") else "odd"

    def content(self, observation):
        return observation

    def _reset(self, seed):
        content, kind = self.peek(seed)
        return content, {"task_type": kind}

    def _step(self, action):
        return self._observation, 1.0, action == "north", {"success": action == "north"}
"""
LAKE = "gigpo_frozenlake"


@pytest.fixture(scope="module")
def rooms(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "rooms.py"
    path.write_text(ROOMS)
    return f"{path}:Rooms"


@pytest.fixture(scope="module")
def base():
    return compose(LAKE, ["hardware=cpu", "multiturn.val=null", "multiturn.test=null"])


@pytest.fixture
def config(base, rooms):
    """`config(train=..., ...)`: a run on rooms, a step of four tasks."""

    def made(env=rooms, **settings):
        one = base.copy()
        one.data.train_batch_size = 4
        one.multiturn.env = env
        for key, value in settings.items():
            one.multiturn[key] = value
        check_values(one)
        return one

    return made


def ids(panel):
    return [task.id for task in panel.tasks]


def test_lists_of_the_environment(config):
    found = tasks.panels(
        config(
            train={"split": "train"}, val={"split": "valid_seen", "size": 3}, test={"split": "valid_unseen"}
        )
    )
    assert {split: len(panel.tasks) for split, panel in found.items()} == {"val": 3, "test": 12, "train": 40}
    assert ids(found["val"]) == ["seen/0", "seen/1", "seen/2"]  # in the environment's own order
    assert {split: panel.split for split, panel in found.items()} == {s: s for s in found}
    assert {task.type for task in found["val"].tasks} == {"even", "odd"}


def test_a_size_beyond_the_list_is_the_whole_list(config):
    found = tasks.panels(
        config(train={"split": "train", "size": 99}, val={"split": "valid_seen", "size": 99})
    )
    assert len(found["train"].tasks) == 40 and len(found["val"].tasks) == 10


def test_training_leaves_out_what_others_hold(config):
    found = tasks.panels(config(train={"split": "train"}, val={"split": "mixed"}))
    assert len(found["train"].tasks) == 39 and "train/0" not in ids(found["train"])
    assert ids(found["val"]) == ["train/0", "unseen/0", "mixed/0"]


def test_defaults_and_sizes_alone(base):
    one = base.copy()
    one.multiturn.train = {"size": 40}
    check_values(one)
    found = tasks.panels(one)
    assert (ids(found["val"])[0], len(found["val"].tasks)) == (500_000, 64)
    assert (ids(found["train"])[0], len(found["train"].tasks)) == (1_000_000, 40)
    assert tasks.source(one.multiturn, "train") == "built from seed 1000000 on"


def test_a_list_longer_than_the_search_for_seeds(rooms, monkeypatch):
    """A list is walked to its end, however much of it is excluded."""
    monkeypatch.setattr("verl_multiturn.panel.PATIENCE", 5)
    exclude = Panel.build(rooms, {}, "train", "train", n=39).hashes
    assert ids(Panel.build(rooms, {}, "train", "train", exclude)) == ["train/39"]


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ({"split": "valid_sen"}, "unknown split of rooms 'valid_sen'.* Did you mean 'valid_seen'"),
        ({"spilt": "valid_seen"}, "unknown key of multiturn.val 'spilt'.* Did you mean 'split'"),
        ({"split": "valid_seen", "first_seed": 0}, "multiturn.val=.* must be the name or file of a panel"),
        ({"split": "valid_seen", "size": 0}, "multiturn.val=.*size: at least 1"),
        ({"split": 3}, "multiturn.val=.*{split: NAME}"),
        ({"first_seed": 3}, "multiturn.val="),
        (7, "multiturn.val=7 must be the name or file of a panel, .* or null"),
    ],
)
def test_what_does_not_name_tasks(config, spec, sentence):
    with pytest.raises(ValueError, match=sentence):
        tasks.panels(config(val=spec))


def test_a_list_of_an_environment_that_has_none(config):
    with pytest.raises(ValueError, match="FrozenLake lists no tasks of split 'train': its tasks are"):
        tasks.panels(config(env="frozen_lake", train={"split": "train"}, val={"first_seed": 0, "size": 4}))


def test_more_panels(config):
    found = tasks.panels(
        config(
            train={"split": "train", "size": 20},
            val={"split": "valid_seen"},
            also={"unseen": {"split": "valid_unseen"}, "trained": {"split": "train", "size": 6}},
        )
    )
    assert {split: len(panel.tasks) for split, panel in found.items()} == {
        "val": 10, "train": 20, "val/unseen": 12, "val/trained": 6,
    }  # fmt: skip
    assert ids(found["val/trained"]) == ids(found["train"])[:6]
    assert found["val/trained"].split == "val/trained"  # not "train": it is seeded as validation is


def test_the_tasks_a_run_trains_on_where_tasks_are_seeds(config):
    found = tasks.panels(
        config(env="frozen_lake", train={"size": 16}, val={"first_seed": 0, "size": 4},
               also={"train": {"split": "train", "size": 8}})
    )  # fmt: skip
    assert ids(found["val/train"]) == ids(found["train"])[:8]


def test_training_leaves_out_more_panels_too(config):
    found = tasks.panels(
        config(train={"split": "train"}, val={"split": "valid_seen"}, also={"odd": {"split": "mixed"}})
    )
    assert "train/0" not in ids(found["train"]) and "train/0" in ids(found["val/odd"])


def test_an_own_training_panel_may_be_watched(config, rooms, tmp_path):
    """A file of split "train" may share tasks with training; one of another split may not."""
    for split in ("train", "other"):
        Panel.build(rooms, {}, ["train/0", "train/1"], split).save(tmp_path / f"{split}.json")
    plan = {"train": {"split": "train"}, "val": {"split": "valid_seen"}}
    found = tasks.panels(config(**plan, also={"seen_before": str(tmp_path / "train.json")}))
    assert ids(found["val/seen_before"]) == ["train/0", "train/1"] and len(found["train"].tasks) == 40
    kept = tasks.panels(config(**plan, also={"kept": str(tmp_path / "other.json")}))
    assert len(kept["train"].tasks) == 38


def test_the_test_panel_is_not_validated_on(config):
    plan = {"train": {"split": "train"}, "val": {"split": "valid_seen"}, "test": {"split": "valid_unseen"}}
    with pytest.raises(ValueError, match=r"val/more and .*-test share 1 tasks by content"):
        tasks.panels(config(**plan, also={"more": {"split": "mixed"}}))
    same = tasks.panels(config(**plan, also={"more": {"split": "valid_unseen"}}))  # said plainly: allowed
    assert ids(same["val/more"]) == ids(same["test"])


@pytest.mark.parametrize(
    ("also", "sentence"),
    [
        ("unseen", "multiturn.also='unseen' must be a group of panels"),
        ({"success": {"split": "mixed"}}, "multiturn.also.success: a panel's name is a word"),
        ({"a/b": {"split": "mixed"}}, "multiturn.also.a/b: a panel's name is a word"),
        ({"a": {"size": 4}}, "multiturn.also.a=.* must be the name or file of a panel"),
        ({"a": None}, "multiturn.also.a=None must be"),
        ({"a": {"siez": 4}}, "unknown key of multiturn.also.a 'siez'"),
        ({"a": "no-such-panel"}, "unknown panel 'no-such-panel'"),
    ],
)
def test_more_panels_that_are_none(config, also, sentence):
    with pytest.raises(ValueError, match=sentence):
        tasks.panels(config(also=also))


def test_a_panel_of_another_environment_names_its_key(config):
    with pytest.raises(ValueError, match=r"give multiturn\.also\.lake a panel of this environment"):
        tasks.panels(config(also={"lake": "frozen_lake-val"}))


def test_overrides_replace_what_a_recipe_gives(rooms):
    """Hydra alone would merge {split} into {first_seed, size}; a group of several panels grows."""
    config = compose(
        "gigpo_sokoban",
        ["hardware=cpu", f"multiturn.env={rooms}", "multiturn.train={split: train}",
         "multiturn.val={split: valid_seen, size: 5}", "multiturn.test=null",
         "multiturn.also={unseen: {split: valid_unseen}}", "multiturn.also.trained={split: train, size: 2}"],
    )  # fmt: skip
    assert config.multiturn.train == {"split": "train"}
    assert config.multiturn.val == {"split": "valid_seen", "size": 5}
    assert list(config.multiturn.also) == ["unseen", "trained"]
    config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size = 4, 4
    prepared = configure.prepare(config)
    folder = f"{prepared.multiturn.run}/panels"
    assert list(prepared.data.val_files) == [
        f"{folder}/val.json", f"{folder}/val/unseen.json", f"{folder}/val/trained.json"
    ]  # fmt: skip
    assert len(tasks.panels(prepared)["train"].tasks) == 40


def test_verl_reads_all_panels_as_one_dataset(config, tmp_path):
    pytest.importorskip("verl", reason="verl builds the dataset")
    from torch.utils.data import DataLoader
    from verl.trainer.ppo.utils import create_rl_dataset
    from verl.utils.dataset.rl_dataset import collate_fn

    one = config(
        train={"split": "train"}, val={"split": "valid_seen"},
        also={"unseen": {"split": "valid_unseen", "size": 2}, "train": {"split": "train", "size": 3}},
        run=str(tmp_path),
    )  # fmt: skip
    found = tasks.panels(one)
    tasks.write(found, one.multiturn.run)
    one.data.val_files = [f"{tmp_path}/panels/{name}.json" for name in ("val", "val/unseen", "val/train")]
    made = create_rl_dataset(one.data.val_files, one.data, None, None, is_train=False)
    assert made.sizes == {"val": 10, "unseen": 2, "train": 3} and len(made) == 15
    (batch,) = DataLoader(made, batch_size=15, collate_fn=collate_fn)
    assert batch["panel"].tolist() == ["val"] * 10 + ["unseen"] * 2 + ["train"] * 3
    assert set(batch["split"]) == {"val"}  # training tasks are played with the chances of a validation
    assert batch["task"].tolist()[-3:] == ["train/0", "train/1", "train/2"]
    assert len(set(batch["data_source"])) == 3
    few = create_rl_dataset(one.data.val_files, one.data, None, None, is_train=False, max_samples=1)
    assert few.sizes == {"val": 1, "unseen": 1, "train": 1}
    train = create_rl_dataset(f"{tmp_path}/panels/train.json", one.data, None, None)
    assert (train[0]["split"], train[0]["panel"], train[0]["data_source"]) == (
        "train",
        "train",
        "rooms.py:Rooms",
    )


def test_the_name_of_the_panel_reaches_the_record():
    pytest.importorskip("verl", reason="the agent loop subclasses verl's")
    from verl_multiturn.rollout.loop import MultiTurnLoop

    loop = object.__new__(MultiTurnLoop)
    loop.settings = {"seeded": False, "seed": 1}
    row = {"task": "seen/0", "session_id": 0, "global_steps": 3, "split": "val", "uid": "u"}
    row |= {"panel": "unseen", "task_hash": "h", "task_type": "even"}
    assert loop._task(row).panel == "unseen"
    assert loop._task(row | {"panel": "val"}).dynamics_seed == loop._task(row).dynamics_seed


def test_the_default_group_says_nothing_of_more_panels(base):
    assert base.multiturn.also == {} and base.data.val_files == f"{base.multiturn.run}/panels/val.json"
    assert OmegaConf.select(base, "multiturn.train") is None or "size" in base.multiturn.train
