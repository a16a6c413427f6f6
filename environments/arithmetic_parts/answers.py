"""When a written answer is the right one: GSM8K's rule (string equality) and MATH's (LaTeX, then algebra)."""

import re
import subprocess
import sys
from importlib.util import find_spec

MARK = "####"  # GSM8K's, before the final answer
SECONDS = 5.0  # for one comparison by sympy
LONGEST = 200  # characters of an answer that sympy is asked about

# No name but these: the child parses with `eval`, where longer ones would call Python's functions.
_NAME = r"(?<![a-zA-Z])(?:sqrt|pi|[a-zA-Z])(?![a-zA-Z])"
_ALGEBRA = re.compile(rf"(?:\d+(?:\.\d+)?|{_NAME}|[-+*/(), ])*")
_COMPARE = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
from sympy import simplify
from sympy.parsing.sympy_parser import parse_expr, standard_transformations, implicit_multiplication
how = (*standard_transformations, implicit_multiplication)
a, b = (parse_expr(text, transformations=how) for text in sys.argv[1:])
sys.exit(0 if a == b or simplify(a - b) == 0 else 9)
"""


def marked(text: str) -> str | None:
    """What follows the last "####", commas removed; None: nothing does."""
    _, mark, tail = text.rpartition(MARK)
    return tail.replace(",", "").strip() or None if mark else None


def boxed(text: str) -> str | None:
    r"""The content of the last \boxed{…}, braces matched; None: there is none."""
    start = text.rfind(r"\boxed{")
    depth = 0
    for i in range(start + 6, len(text) if start >= 0 else 0):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[start + 7 : i].strip() or None
    return None


def normal(answer: str) -> str:
    r"""One spelling for answers that differ in spaces, \text{…}, \dfrac, \left, $, % or a last period."""
    for pattern, by in (
        (r"\\(?:left|right|!|,|;|displaystyle)|\\?\$|\\?%|\^\\circ|\^\{\\circ\}", ""),
        (r"\\[dt]frac", r"\\frac"),
        (r"\\(?:text|mbox|mathrm)\{([^{}]*)\}", r"\1"),
        (r"\\frac(\d)(\d)", r"\\frac{\1}{\2}"),
        (r"\\sqrt(\d)", r"\\sqrt{\1}"),
        (r"(?<=\d),(?=\d{3}(?!\d))", ""),
        (r"\s+", ""),
        (r"\.$", ""),
        (r"(?<![\d])\.(?=\d)", "0."),
    ):
        answer = re.sub(pattern, by, answer)
    return answer


def algebra(answer: str) -> str | None:
    r"""Plain algebra for a normal answer: digits, operators, names of one letter; None: it is more."""
    while (shorter := re.sub(r"\\frac\{([^{}]*)\}\{([^{}]*)\}", r"((\1)/(\2))", answer)) != answer:
        answer = shorter
    for pattern, by in (
        (r"\\sqrt\{([^{}]*)\}", r"sqrt(\1)"),
        (r"\\(?:cdot|times)", "*"),
        (r"\\pi", "pi"),
        (r"\^\{([^{}]*)\}", r"**(\1)"),
        (r"\^", "**"),
    ):
        answer = re.sub(pattern, by, answer)
    return answer if len(answer) <= LONGEST and _ALGEBRA.fullmatch(answer) else None


def equal(answer: str, truth: str) -> bool:
    """Equal as normal texts or, where sympy is installed, as expressions: in a child process, for 5 s."""
    a, b = normal(answer), normal(truth)
    if a == b:
        return True
    first, second = algebra(a), algebra(b)
    if first is None or second is None or find_spec("sympy") is None:
        return False
    try:
        done = subprocess.run(
            [sys.executable, "-c", _COMPARE, first, second], capture_output=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0
