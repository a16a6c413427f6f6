"""Detectors on curves that collapse, that do not, and that never got going; the group metrics by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.algorithms.starpo import keep_groups
from verl_multiturn.collapse import METRICS, RARELY, RULES, detectors
from verl_multiturn.metrics import group_metrics

quick = settings(max_examples=50, deadline=None)


def detector(name, **block):
    return detectors({name: block})[0]


def logged(**curves):
    """One mapping a step, under the trainer's names; None: not measured."""
    return [
        {METRICS[name]: value for name, value in zip(curves, values, strict=True) if value is not None}
        for values in zip(*curves.values(), strict=True)
    ]


def first_stop(watch, steps):
    """(step, sentence) of the first stop, steps counted from 1; None: there is none."""
    for step, metrics in enumerate(steps, 1):
        if (why := watch.update(step, metrics)) is not None:
            return step, why
    return None


HEALTHY = dict(
    group_std=[0.4] * 300, success=[0.5] * 300, valid=[1.0] * 300, empty=[0.0] * 300, mi=[0.1] * 300,
    entropy=[1.0] * 300, grad_norm=[0.5] * 300, val_success=[0.5] * 300,
)  # fmt: skip
WARM_UP = HEALTHY | dict(
    group_std=[0.0] * 300, success=[0.0] * 300, valid=[0.0] * 300, empty=[1.0] * 300, mi=[0.0] * 300,
    grad_norm=[0.0] * 290 + [9.0] * 10, val_success=[0.0] * 300,
)  # fmt: skip


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("curves", [HEALTHY, WARM_UP], ids=["healthy", "warm-up"])
def test_no_default_stops_a_healthy_run_or_a_long_warm_up(name, curves):
    watch = detector(name)
    assert first_stop(watch, logged(**curves)) is None
    assert watch.since is None


@pytest.mark.parametrize("name", RULES)
def test_no_default_stops_a_warm_up_with_a_rare_success(name):
    rng = np.random.default_rng(0)
    rare = rng.random(1000) < 0.2  # one step in five tells groups apart
    curves = dict(
        group_std=0.05 * rare, success=0.01 * rare, valid=0.2 * rare, empty=1.0 - rare,
        mi=rng.normal(size=1000), entropy=np.ones(1000), grad_norm=0.1 * rare, val_success=0.02 * rare,
    )  # fmt: skip
    assert first_stop(detector(name), logged(**curves)) is None


def test_returns_collapse():
    std = [0.0] * 30 + [0.4] * 10 + [0.3] * 5 + [0.03] * 9 + [0.05] + [0.03] * 10
    stop = first_stop(detector("returns_collapse"), logged(group_std=std))
    assert stop == (
        65,
        "returns_collapse at step 65: the groups no longer disagree, their standard deviation of 0.03 is "
        "below 0.1 of the 0.4 of the first 10 informative steps, at every measurement since 56.",
    )
    assert first_stop(detector("returns_collapse", share=0.05), logged(group_std=std)) is None
    early = first_stop(detector("returns_collapse", patience=9), logged(group_std=std))
    assert early is not None and early[0] == 54


def test_returns_collapse_judges_no_step_of_its_baseline():
    std = [1.0] * 9 + [0.01] * 2  # the 10th step is still part of what it was
    assert first_stop(detector("returns_collapse", patience=1), logged(group_std=std))[0] == 11


ECHO = dict(
    group_std=[0.4] * 30 + [0.1] * 30,
    success=[0.2] * 30 + [0.02] * 30,
    grad_norm=[0.5, 0.7] * 15 + [0.5, 4.0] * 15,
)


def test_echo_trap():
    """Means over 10 steps reach half of the best at the 7th (std) and 6th (success) step of the fall."""
    stop = first_stop(detector("echo_trap"), logged(**ECHO))
    assert stop == (
        41,
        "echo_trap at step 41: over 10 steps success fell from 0.2 to 0.02 and the groups' standard "
        "deviation from 0.4 to 0.1, while the gradient norm reached 4 (median before: 0.5), at every "
        "measurement since 37.",
    )


@pytest.mark.parametrize("name", ECHO)
def test_echo_trap_needs_all_three(name):
    steady = ECHO | {name: ECHO[name][:30] * 2}
    assert first_stop(detector("echo_trap"), logged(**steady)) is None


@pytest.mark.parametrize("block", [{"std_share": 0.24}, {"success_share": 0.09}, {"spike": 8.1}])
def test_echo_trap_beyond_each_threshold(block):
    """What is reached is a quarter of the std, a tenth of the success, eight times the gradient."""
    assert first_stop(detector("echo_trap", **block), logged(**ECHO)) is None


def test_echo_trap_does_not_measure_spikes_against_zero():
    still = ECHO | {"grad_norm": [0.0] * 60}
    assert first_stop(detector("echo_trap"), logged(**still)) is None
    long = {name: [0.0] * 100 + values for name, values in ECHO.items()}
    long["grad_norm"] = [0.0] * 100 + [0.5] * 60
    assert first_stop(detector("echo_trap"), logged(**long)) is None


def test_template_collapse():
    mi = [0.02, 0.1, 0.12, 0.14, 0.5, 0.1, 0.1] + [0.02] * 3  # 0.12 was held, a mean with 0.5 was not
    block = {"window": 3, "patience": 3}
    fell = logged(mi=mi, entropy=[1.0] * 7 + [1.5, 0.9, 0.9])
    assert first_stop(detector("template_collapse", **block), fell) == (
        10,
        "template_collapse at step 10: mutual information per token fell from 0.12 to 0.02, while entropy "
        "went from 1 to 0.9, at every measurement since 8.",
    )
    assert first_stop(detector("template_collapse"), fell) is None  # not yet 10 measurements
    lost = logged(mi=mi, entropy=[1.0] * 7 + [0.7] * 3)
    assert first_stop(detector("template_collapse", **block), lost) is None
    assert first_stop(detector("template_collapse", **block, entropy_share=0.5), lost) is not None


def test_template_collapse_on_a_schedule():
    """Information at every 5th step, entropy at all: the steps between are no measurements."""
    mi = [value for x in [0.1] * 10 + [0.01] * 5 for value in (x, None, None, None, None)]
    stop = first_stop(detector("template_collapse"), logged(mi=mi, entropy=[1.0] * 75))
    assert stop[0] == 71 and stop[1].endswith("since 51.")


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_template_collapse(seed):
    mi = np.random.default_rng(seed).normal(size=400)
    assert first_stop(detector("template_collapse"), logged(mi=mi, entropy=[1.0] * 400)) is None


@pytest.mark.parametrize(
    ("name", "metric", "good", "bad", "patience", "words"),
    [
        ("invalid_actions", "valid", 0.95, 0.04, 10, "96.0% of the actions are invalid, more than 90.0%"),
        ("no_success", "val_success", 0.02, 0.005, 10, "validation success is 0.5%, below 1.0%"),
        ("empty_steps", "empty", 0.0, 1.0, 20, "the filter keeps no group, so nothing is trained"),
    ],
)
def test_what_was_learnt_is_lost(name, metric, good, bad, patience, words):
    start, end = [bad] * 100, [bad] * patience
    learnt = logged(**{metric: start + [good] * patience + end})
    stop = first_stop(detector(name), learnt)
    assert stop == (
        len(learnt),
        f"{name} at step {len(learnt)}: {words}, at every measurement since {len(learnt) - patience + 1}.",
    )
    almost = logged(**{metric: start + [good] * (patience - 1) + end})
    assert first_stop(detector(name), almost) is None
    broken = logged(**{metric: start + [good] * patience + end[1:] + [good] + end[1:]})
    assert first_stop(detector(name), broken) is None
    assert first_stop(detector(name, warmup=50), logged(**{metric: start}))[0] == 50 + patience
    assert first_stop(detector(name, warmup=0, patience=1), logged(**{metric: [good, bad]}))[0] == 2


@pytest.mark.parametrize("value", [None, float("nan"), float("inf")])
def test_a_step_without_the_metric_is_no_measurement(value):
    steps = logged(val_success=[0.5] * 5 + [0.0] * 4 + [value] * 9 + [0.0])
    assert first_stop(detector("no_success", patience=5), steps)[0] == 19


def test_a_metric_that_never_comes_is_named_once():
    watch = detector("echo_trap", patience=3)
    named = []
    for step in range(10):
        assert watch.update(step, {"actor/grad_norm": 1.0, "multiturn/success/mean": float("nan")}) is None
        named.append(watch.missing)
    never = ["multiturn/group_std/mean", "multiturn/success/mean"]
    assert named == [[], [], never, [], [], [], [], [], [], []]


def test_what_is_measured_on_a_schedule_may_take_longer():
    watch = detector("no_success", patience=2)
    named = [watch.missing for step in range(3 * RARELY) if watch.update(step, {}) is None]
    assert [i for i, names in enumerate(named) if names] == [2 * RARELY - 1]
    assert named[2 * RARELY - 1] == ["val/success"]
    watch = detector("no_success", patience=2)
    watch.update(0, {"val/success": 0.5})
    assert not any(watch.missing for step in range(3 * RARELY) if watch.update(step, {}) is None)


def test_detectors_are_off_unless_asked_for():
    assert detectors({}) == detectors(dict.fromkeys(RULES)) == []
    found = detectors({"no_success": {"warmup": 100}, "echo_trap": None, "empty_steps": {}})
    assert [(one.name, one.rule) for one in found] == [
        ("no_success", RULES["no_success"](warmup=100)),
        ("empty_steps", RULES["empty_steps"]()),
    ]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"echo_trapp": {}}, "unknown detector 'echo_trapp'; valid: .* Did you mean 'echo_trap'"),
        ({"no_sucess": None}, "Did you mean 'no_success'"),
        ({"no_success": {"warm_up": 3}}, "unknown key of no_success 'warm_up'; .* Did you mean 'warmup'"),
        ({"no_success": {"reads": []}}, "unknown key of no_success 'reads'"),
        ({"no_success": True}, "no_success must be a group of keys, or null for off, not True"),
        ({"no_success": {"warmup": -1}}, "NoSuccess.warmup must be at least 0, not -1"),
        ({"no_success": {"warmup": "long"}}, "NoSuccess.warmup must be a whole number or null, not 'long'"),
        ({"no_success": {"patience": 0}}, "NoSuccess.patience must be at least 1, not 0"),
        ({"empty_steps": {"patience": 1.5}}, "EmptySteps.patience must be a whole number, not 1.5"),
        ({"no_success": {"share": 2}}, r"NoSuccess.share must be in \[0, 1\], not 2"),
        ({"invalid_actions": {"share": -0.1}}, r"InvalidActions.share must be in \[0, 1\]"),
        ({"returns_collapse": {"share": float("nan")}}, "ReturnsCollapse.share must be a number"),
        ({"returns_collapse": {"share": 10}}, r"ReturnsCollapse.share must be in \[0, 1\]"),
        ({"returns_collapse": {"first": 0}}, "ReturnsCollapse.first must be at least 1"),
        ({"echo_trap": {"window": 0}}, "EchoTrap.window must be at least 1"),
        ({"echo_trap": {"spike": 0.5}}, "EchoTrap.spike must be at least 1"),
        ({"echo_trap": {"std_share": 2}}, r"EchoTrap.std_share must be in \[0, 1\]"),
        ({"echo_trap": {"success_share": 2}}, r"EchoTrap.success_share must be in \[0, 1\]"),
        ({"template_collapse": {"window": 0}}, "TemplateCollapse.window must be at least 1"),
        ({"template_collapse": {"share": 2}}, r"TemplateCollapse.share must be in \[0, 1\]"),
        ({"template_collapse": {"entropy_share": -1}}, "TemplateCollapse.entropy_share must be at least 0"),
    ],
)
def test_impossible_settings(settings, words):
    with pytest.raises(ValueError, match=words):
        detectors(settings)


# --- Metrics of the groups ---


def close(actual, expected):
    assert set(actual) == set(expected)
    for name, value in expected.items():
        assert actual[name] == pytest.approx(value, abs=1e-12), name


def test_group_metrics_by_hand():
    returns = [[0, 1], [0.7, 0.7, 0.7], [5.0], [0, 1, 0, 1]]
    variances = [1 / 2, 0, 0, 1 / 3]
    close(
        group_metrics(returns, kept=[0, 3]),
        {
            "group_std": ((1 / 2) ** 0.5 + (1 / 3) ** 0.5) / 4,
            "group_max": (1 + 0.7 + 5 + 1) / 4,
            "group_mean": (0.5 + 0.7 + 5 + 0.5) / 4,
            "group_std_kept": ((1 / 2) ** 0.5 + (1 / 3) ** 0.5) / 2,
            "group_max_kept": 1.0,
            "group_mean_kept": 0.5,
            "zero_variance": 0.5,
            "std_over_mean": np.std(variances, ddof=1) / np.mean(variances),
        },
    )


def test_group_metrics_without_a_filter_or_with_nothing_kept():
    returns = [[0, 1], [0, 0]]
    assert "group_std_kept" not in group_metrics(returns)
    assert group_metrics(returns, kept=[]) == group_metrics(returns)
    assert group_metrics([]) == group_metrics([], kept=[]) == {}


def test_usefulness_of_the_filter():
    one_of_four = group_metrics([[0, 1], [0, 0], [1, 1], [0, 0]])
    assert one_of_four["std_over_mean"] == pytest.approx(2.0)  # √G, its highest value
    assert group_metrics([[0, 1], [1, 0]])["std_over_mean"] == 0.0
    constant = group_metrics([[0.1] * 3, [0.7] * 3])
    assert constant["std_over_mean"] == 0.0 and constant["zero_variance"] == 1.0


@quick
@given(st.lists(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=5), min_size=1, max_size=6))
def test_group_metrics_and_the_filter(returns):
    everything = group_metrics(returns, kept=range(len(returns)))
    for name in ("group_std", "group_max", "group_mean"):
        assert everything[f"{name}_kept"] == everything[name]
    best = group_metrics(returns, kept=keep_groups(returns, strategy="top_k", value=0.5, include_zero=True))
    assert best["group_std_kept"] >= best["group_std"] - 1e-12
    assert 0 <= best["std_over_mean"] <= len(returns) ** 0.5 + 1e-12


@pytest.mark.parametrize(
    ("returns", "kept", "words"),
    [
        ([[0, 1], []], None, r"returns must be finite, at least one a group: group 1 has \[\]"),
        ([[0, float("nan")]], None, "group 0 has"),
        ([["a"]], None, r"returns\[0\] must hold numbers"),
        ([[0, 1]], [1], "kept must be indices of the 1 groups, not 1"),
        ([[0, 1]], [-1], "kept must be indices of the 1 groups, not -1"),
        ([[0, 1]], [0.5], "kept must hold whole numbers"),
    ],
)
def test_malformed_groups(returns, kept, words):
    with pytest.raises(ValueError, match=words):
        group_metrics(returns, kept)
