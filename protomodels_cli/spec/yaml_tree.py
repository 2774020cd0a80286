"""YAML to plain data plus the line of every field, with the numbers and words people mean.

YAML 1.1 reads `1e-4` as a string and `off` as false. Here `1e-4` is a number, only `true` and `false` are
booleans, and a key given twice is an error.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from protomodels_cli.spec.errors import Problem, SpecError

Path = tuple[str | int, ...]
_INT = re.compile(r"[-+]?[0-9][0-9_]*")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9][0-9_]*|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
)
_NULL = {"", "~", "null", "Null", "NULL"}
_BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_MOST_NODES = 20_000
_MOST_LEVELS = 20
_MOST_DIGITS = 1000


def read_tree(text: str, file: str) -> tuple[Any, dict[Path, int], list[Problem]]:
    """The data, the line of every value (of its key, in a mapping), and a problem for every key that is given twice."""

    def fail(rule: str, fix: str, line: int = 1, kind: str = "too_large") -> SpecError:
        return SpecError([Problem("", rule, fix, None, file, line, kind)])

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as e:
        mark = getattr(e, "problem_mark", None)
        problem = getattr(e, "problem", None) or " ".join(str(e).split())
        line = mark.line + 1 if mark else 1
        raise fail(f"must be YAML: {problem}", "check indentation, colons and quotes", line, "yaml") from None
    except RecursionError:
        raise fail(f"must be nested at most {_MOST_LEVELS} levels deep", "remove brackets") from None
    lines: dict[Path, int] = {(): 1}
    problems: list[Problem] = []
    seen = 0

    def build(node: yaml.Node, path: Path) -> Any:
        nonlocal seen
        seen += 1
        if seen > _MOST_NODES or len(path) > _MOST_LEVELS:  # an alias bomb, or an alias that contains itself
            raise fail(
                f"must have at most {_MOST_NODES} values, nested at most {_MOST_LEVELS} levels deep",
                "write the values out instead of using YAML aliases",
            )
        lines.setdefault(path, node.start_mark.line + 1)
        if isinstance(node, yaml.MappingNode):
            out: dict[str, Any] = {}
            for key_node, value_node in node.value:
                key = str(key_node.value)
                line = key_node.start_mark.line + 1
                if key in out:
                    where = ".".join(map(str, (*path, key)))
                    problems.append(
                        Problem(where, "is given twice", "remove one of the two", None, file, line, "twice")
                    )
                lines[(*path, key)] = line
                out[key] = build(value_node, (*path, key))
            return out
        if isinstance(node, yaml.SequenceNode):
            return [build(child, (*path, i)) for i, child in enumerate(node.value)]
        assert isinstance(node, yaml.ScalarNode)
        return scalar(node)

    data = build(root, ()) if root is not None else {}
    return data, lines, problems


def scalar(node: yaml.ScalarNode) -> Any:
    text: str = node.value
    if node.style in ("'", '"', "|", ">"):
        return text
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text) and len(text) < _MOST_DIGITS:
        return int(text.replace("_", ""))
    if _FLOAT.fullmatch(text):
        return float(re.sub(r"_|\.(?=[in])", "", text.lower()))  # .inf and .nan are inf and nan to Python
    return text
