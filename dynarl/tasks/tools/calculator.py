"""The tool `calculator`: one arithmetic expression, exactly, in whole numbers and fractions."""

from __future__ import annotations

import ast
import operator
from fractions import Fraction
from typing import Any, Callable

from dynarl.tasks.tools.base import Tool, ToolError

LONGEST = 200  # characters of an expression; also bounds how deep it nests
MOST_BITS = 1024  # of a numerator or denominator, about 300 digits

Number = Fraction


def _power(base: Number, exponent: Number) -> Number:
    if exponent.denominator != 1:
        raise ToolError("an exponent must be a whole number")
    size = max(base.numerator.bit_length(), base.denominator.bit_length())
    if size * abs(exponent) > MOST_BITS:  # looked at before, for the number itself might never be done
        raise ToolError("the number is too large")
    return base**exponent.numerator


OPERATORS: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
    ast.Pow: _power,
}


class Calculator(Tool):
    """`+ - * / // % **`, brackets, decimals, and `ans`, the result before.

    >>> session = {}
    >>> Calculator().call("1/3 + 1/6", session), Calculator().call("ans * 12345678901234567890", session)
    ('1/2', '6172839450617283945')
    """

    def call(self, arguments: str, session: dict[str, Any]) -> str:
        result = str(evaluate(arguments, session.get("ans")))
        session["ans"] = result
        return result


def evaluate(expression: str, ans: str | None = None) -> Number:
    """The value of an expression. Raises ToolError on anything that is not arithmetic, or too large."""
    if len(expression) > LONGEST:
        raise ToolError(f"an expression has at most {LONGEST} characters")
    expression = expression.strip()
    try:
        tree = ast.parse(expression, mode="eval")
    except (SyntaxError, ValueError):
        raise ToolError("not an expression") from None
    return _value(tree.body, expression, ans)


def _value(node: ast.expr, text: str, ans: str | None) -> Number:
    match node:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            result = Fraction(value)
        case ast.Constant(value=float()):
            digits = ast.get_source_segment(text, node)
            if "e" in digits.lower():  # 1e99999999 would take minutes to write out
                raise ToolError("write numbers without an exponent")
            result = Fraction(digits.replace("_", ""))  # of the text: 0.1 is a tenth, and not the nearest binary number
        case ast.Name(id="ans") if ans is not None:
            result = Fraction(ans)
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() as sign, operand=operand):
            result = _value(operand, text, ans) * (-1 if isinstance(sign, ast.USub) else 1)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            try:
                result = OPERATORS[type(op)](_value(left, text, ans), _value(right, text, ans))
            except ZeroDivisionError:
                raise ToolError("division by zero") from None
        case _:
            raise ToolError("not arithmetic")
    if max(result.numerator.bit_length(), result.denominator.bit_length()) > MOST_BITS:
        raise ToolError("the number is too large")
    return result
