"""The critic's settings of a run: presets, and what changes them."""

from dataclasses import fields

import pytest
from omegaconf import OmegaConf

from verl_multiturn.compose import CONFIG
from verl_multiturn.critic.config import (
    PLACE,
    PRESETS,
    ArcherConfig,
    CriticConfig,
    archer_config,
    critic_config,
)

BLOCKS = OmegaConf.to_container(OmegaConf.load(CONFIG / "multiturn.yaml"))["multiturn"]


def test_every_setting_has_its_key_and_every_key_its_setting():
    assert set(BLOCKS["critic"]) == {*PLACE, *(one.name for one in fields(CriticConfig))}
    assert archer_config(BLOCKS["archer"]) == ArcherConfig()


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_taken_as_it_is(name):
    assert critic_config(BLOCKS["critic"] | {"preset": name}) == PRESETS[name]


def test_what_is_given_goes_over_the_preset():
    config = critic_config(
        BLOCKS["critic"] | {"preset": "cpu", "encoder": "ngrams", "gamma": 0.9, "max_age": 3}
    )
    assert (config.encoder, config.gamma, config.max_age, config.batch) == ("ngrams", 0.9, 3, 64)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"preset": "papr"}, "unknown critic preset 'papr'.* Did you mean 'paper'"),
        ({"gama": 0.9}, "unknown key of multiturn.critic 'gama'.* Did you mean 'gamma'"),
        ({"encoder": "roberta"}, "unknown encoder 'roberta'.* Did you mean 'roberta-base'"),
        ({"batch": 20_000}, "capacity=10000 must be at least batch=20000"),
        ({"v_target": "polcy"}, "Did you mean 'policy'"),
    ],
)
def test_wrong_settings_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        critic_config(BLOCKS["critic"] | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mod": "x"}, "unknown key of multiturn.archer 'mod'.* Did you mean 'mode'"),
        ({"mode": "onpolicy"}, "Did you mean 'on_policy'"),
        ({"clip": 0.0}, "clip must be above 0"),
        ({"states": 0}, "states must be at least 1"),
    ],
)
def test_wrong_settings_of_a_step_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        archer_config(BLOCKS["archer"] | change)
