"""Where other libraries run a model's text as code: what is refused, and which texts pass.

Their scorers hand it to `exec`, to `eval`, or to sympy's `parse_expr`, which evaluates it: in this
process, with its rights. Where they expect programs, or text of any form, they are refused until the
user asks for them. Where they expect a formula or a list, a text passes that is nothing else.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

KEYWORD = "dangerously_run_model_text"
LONGEST = 2_000  # characters of a formula or a list
HIGHEST = 30  # exponent, two of them nested: 9**9**9**9 would never end
UNREADABLE = "?"  # to `eval` and `parse_expr` alike

_FUNCTIONS = frozenset(
    "sin cos tan cot sec csc asin acos atan sinh cosh tanh log ln exp sqrt Abs Integral".split()
)
_OPERATORS = ast.Add | ast.Sub | ast.Mult | ast.Div | ast.FloorDiv | ast.Pow | ast.UAdd | ast.USub


def refuse(what: str, allowed: bool, instead: str = "") -> None:
    """Refuse what runs the model's text, unless it was allowed.

    Args:
        what: the thing that would be used.
        allowed: the value of the keyword `KEYWORD`.
        instead: what may be done instead.

    Raises:
        ValueError: it is not allowed.
    """
    if not allowed:
        raise ValueError(
            f"{what} runs what the model writes as code, unconfined and with all your rights: "
            f"{f'{instead}, or ' if instead else ''}set {KEYWORD}=true where nothing can be lost by it."
        )


def formula(text: str) -> bool:
    """Whether a text is numbers, short names, arithmetic and functions of mathematics, and nothing else.

    No quotes, attributes or underscores; exponents are numbers up to `HIGHEST`.
    """
    try:
        return len(text) <= LONGEST and _formula(ast.parse(text.strip(), mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _formula(node: ast.expr, powers: int) -> bool:
    """`powers`: of how many powers it is already the base."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, int | float)
    if isinstance(node, ast.Name):
        return re.fullmatch("[A-Za-z][A-Za-z0-9]{0,5}", node.id) is not None
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _formula(node.operand, powers)
    if isinstance(node, ast.Call):
        known = isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords
        return known and len(node.args) in (1, 2) and all(_formula(one, powers) for one in node.args)
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, _OPERATORS):
        return False
    if isinstance(node.op, ast.Pow):
        return powers < 2 and _exponent(node.right) and _formula(node.left, powers + 1)
    return _formula(node.left, powers) and _formula(node.right, powers)


def _exponent(node: ast.expr) -> bool:
    """A number up to `HIGHEST`, or a fraction of two."""
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, _OPERATORS) and _exponent(node.operand)
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Div) and _exponent(node.left) and _exponent(node.right)
    value = node.value if isinstance(node, ast.Constant) else None
    return isinstance(value, int | float) and abs(value) <= HIGHEST


def literal(text: str) -> bool:
    """Whether a text is a Python literal: numbers and quoted texts, in lists and the like."""
    try:
        ast.literal_eval(text.strip() if len(text) <= LONGEST else UNREADABLE)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


# reasoning-gym 0.1.25: what the scorers that evaluate an answer expect; a test looks for more of them.
EVALUATED: Mapping[str, Callable[[str], bool]] = {
    **dict.fromkeys(("string_insertion", "spiral_matrix", "binary_matrix", "n_queens"), literal),
    **dict.fromkeys(("countdown", "puzzle24", "polynomial_multiplication"), formula),
    **dict.fromkeys(("simple_integration", "intermediate_integration"), formula),
}


def scored(dataset: Any, answer: str | None, entry: Mapping[str, Any]) -> float:
    """A reasoning-gym data set's score of an answer; one that it would run is scored as `UNREADABLE`.

    Args:
        dataset: of any kind, one of several among them.
        answer: what the model wrote.
        entry: the task; a right answer of it passes in any form, since it is compared as a text first.
    """
    from reasoning_gym.factory import DATASETS

    about = entry.get("metadata") or {}
    names = [name for name, (cls, _) in DATASETS.items() if isinstance(dataset, cls)]
    passes = next((EVALUATED[n] for n in (about.get("source_dataset"), *names) if n in EVALUATED), None)
    if answer is not None and passes is not None and not passes(answer):
        right = [str(one).strip() for one in (entry.get("answer"), *about.get("valid_answers", ()))]
        answer = answer if passes is literal and answer.strip() in right else UNREADABLE
    return float(dataset.score_answer(answer, entry))
