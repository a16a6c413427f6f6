"""What other libraries would run of a model's text: refused, or scored without being run."""

import ast
import inspect
import json

import pytest

from environments.adapter_parts.model_text import EVALUATED, KEYWORD, formula, literal
from verl_multiturn.env import make

ATTACKS = (
    "__import__('pathlib').Path({!r}).touch() or 24",
    "open({!r}, 'w').close() or [1]",
    "[open({!r}, 'w')]",
    "sqrt(\"open({!r}, 'w')\")",
    "[\"open({!r}, 'w')\"]",
    "(lambda: open({!r}, 'w'))()",
    "x.__class__ or open({!r}, 'w')",
)


def test_formulas_and_lists_pass():
    for text in (
        "1 + 2*3", "(95 - 5)/3", "-x**3/3 + 4*x + C", "exp(-2*x)*sin(x)/5", "(x**2 + 1)**(3/2)", "2.5e3",
    ):  # fmt: skip
        assert formula(text), text
    assert literal("[[1, 0], [0, 1]]") and literal("['A', 'B']") and literal("('Q', '_')")


@pytest.mark.parametrize(
    "text",
    [
        "", "1 +", "exec(1)", "x.real", "x[0]", "'a'", "[1]", "sqrt('1')", "__doc__", "x**y", "2**31",
        "9**9**9", "((9**9)**9)**9", "1 if x else 2", "f'{x}'", "x := 1", "1, 2", "9" * 2001, "(" * 900, "\0",
        "print(1)", "1 and 2", "max(1, 2)", "sin(x, evaluate=False)", "lambda: 1", "2**(3*9)", "x_1",
    ],
)  # fmt: skip
def test_anything_else_is_no_formula(text):
    assert not formula(text)


@pytest.mark.parametrize(
    "text", ["[1]*9", "f()", "[x]", "{1: [].append}", "1 +", "[" * 500, "(1).real", "\0"]
)
def test_anything_else_is_no_list(text):
    assert not literal(text)


@pytest.mark.parametrize("id", EVALUATED)
def test_answers_are_scored_and_not_run(id, tmp_path):
    pytest.importorskip("reasoning_gym", reason="pip install verl-multiturn[reasoning]")
    mark, env = tmp_path / "mark", make("reasoning_gym", id=id)
    env.reset(1)
    assert env.step(env.expert())[1:3] == (1.0, True)
    for attack in ("9**9**9**9**9", *(attack.format(str(mark)) for attack in ATTACKS)):
        env.reset(0)
        assert env.step(attack)[1] < 0.1 and not mark.exists(), attack


def test_the_library_would_run_them(tmp_path):
    """Else the test above would show nothing."""
    rg = pytest.importorskip("reasoning_gym", reason="pip install verl-multiturn[reasoning]")
    for id in EVALUATED:
        dataset, mark = rg.create_dataset(id, seed=0, size=1), tmp_path / id
        for attack in ATTACKS:
            try:
                dataset.score_answer(attack.format(str(mark)), dataset[0])
            except Exception:
                continue  # some scorers raise after they have run it
        assert mark.exists(), id


def test_every_scorer_that_evaluates_is_known():
    pytest.importorskip("reasoning_gym", reason="pip install verl-multiturn[reasoning]")
    from reasoning_gym.factory import DATASETS

    found = set()
    for name, (cls, _) in DATASETS.items():
        scorer = ast.parse(inspect.cleandoc("\n" + inspect.getsource(cls.score_answer)))
        for call in (node for node in ast.walk(scorer) if isinstance(node, ast.Call)):
            runs = ast.unparse(call.func).rpartition(".")[2] in ("eval", "exec", "parse_expr", "sympify", "S")
            if runs and "entry" not in ast.unparse(call):
                found.add(name)
    assert found == set(EVALUATED)


def test_a_data_set_of_ones_own_is_guarded_too(tmp_path):
    rg = pytest.importorskip("reasoning_gym", reason="pip install verl-multiturn[reasoning]")
    from reasoning_gym.composite import DatasetSpec

    from environments.adapter_parts.model_text import scored

    mark = tmp_path / "mark"
    spec = [DatasetSpec(name="countdown", weight=1, config={})]
    for dataset in (
        rg.create_dataset("countdown", seed=1, size=1),
        rg.create_dataset("composite", seed=1, size=1, datasets=spec),
    ):
        entry = dataset[0]
        assert scored(dataset, ATTACKS[0].format(str(mark)), entry) < 0.1 and not mark.exists()
        assert scored(dataset, entry["answer"], entry) == 1.0


def test_gems_scorers_are_guarded_and_its_programs_refused(tmp_path):
    pytest.importorskip("gem", reason="pip install --no-deps gem-llm")
    mark, env = tmp_path / "mark", make("gem", id="rg:countdown")
    env.reset(0)
    env.step(f"\\boxed{{{ATTACKS[0].format(str(mark))}}}")
    assert not mark.exists()
    env.reset(0)
    assert env.step(env.env.data["answer"])[1] == 1.0
    for id in ("code:CodeContest", "math:GSM8K", "eval:AMC", "eval:CodeContest"):
        with pytest.raises(ValueError, match=f"GEM's {id} runs what the model writes .* set {KEYWORD}=true"):
            make("gem", id=id)


def test_skyrl_gyms_programs_are_refused():
    pytest.importorskip("skyrl_gym", reason="pip install skyrl-gym")
    rows = [{"prompt": "Write it.", "reward_spec": {"ground_truth": json.dumps([])}}]
    for id in ("lcb", "searchcode", "text2sql", "skyrl_gym.envs.lcb.env:LCBEnv"):
        with pytest.raises(ValueError, match=f"SkyRL-gym's {id} runs what the model writes as code"):
            make("skyrl_gym", rows=rows, id=id)
    assert make("skyrl_gym", rows=rows, id="lcb", **{KEYWORD: True}).inner.tests == []


def test_verls_reward_functions_that_run_answers_are_refused(tmp_path):
    pytest.importorskip("verl.tools.base_tool", reason="needs verl")
    (tmp_path / "mine.py").write_text(
        "from verl.tools.function_tool import function_tool\n\n\n@function_tool\ndef echo(a: str) -> str:\n"
        '    """Say it.\n\n    Args:\n        a: What.\n    """\n    return a\n\n\n'
        "def none(data_source, solution_str, ground_truth, extra_info=None):\n    return 0.0\n"
    )
    given = {"functions": f"{tmp_path}/mine.py"}

    def rows(source):
        return [{"prompt": "x", "data_source": source, "reward_model": {"ground_truth": "1"}}]

    for source in ("apps", "numina_cn_k12", "hiyouga/geometry3k"):
        with pytest.raises(
            ValueError, match=f"{source}' runs what the model .* your own with reward, or set"
        ):
            make("verl_tools", rows=rows(source), **given)
        make("verl_tools", rows=rows(source), **given, **{KEYWORD: True}).close()
        make("verl_tools", rows=rows(source), reward=f"{tmp_path}/mine.py:none", **given).close()
    with pytest.raises(ValueError, match=r"unknown data source .* Did you mean 'openai/gsm8k'"):
        make("verl_tools", rows=rows("openai/gsm8"), **given)
    make("verl_tools", rows=rows("aime2024"), **given).close()


def test_verl_runs_what_is_named_and_compares_the_rest():
    """The two lists hold every data source that verl scores."""
    pytest.importorskip("verl.tools.base_tool", reason="needs verl")
    from verl.utils import reward_score

    from environments.verl_tools import COMPARED, RUN

    tree = ast.parse(inspect.getsource(reward_score.default_compute_score))
    lists = [n for c in ast.walk(tree) if isinstance(c, ast.Compare) for n in c.comparators]
    known = {n.value for one in lists for n in ast.walk(one) if isinstance(n, ast.Constant)}
    assert known == COMPARED | RUN
