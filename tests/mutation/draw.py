"""Faults drawn from the source: every place where an operator applies, in an order of the seed.

A fault's place in the order is a hash of the seed and its own text, so that the order of the
others stays when code elsewhere changes. Slots go through all packages and all operators in turn.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path

from tests import ROOT
from tests.mutation.fault import Fault

SEED = 20261201  # fixed before the first run
NUM_DRAWN = 44

_OTHER_AXIS = {"tp": "dp", "dp": "tp", "pp": "tp", "cp": "tp", "dp_cp": "tp", "ep": "edp",
               "edp": "ep"}  # fmt: skip
_OPPOSITE = {ast.Eq: "!=", ast.NotEq: "==", ast.Lt: ">=", ast.GtE: "<", ast.Gt: "<=",
             ast.LtE: ">", ast.In: "not in", ast.NotIn: "in", ast.Is: "is not",
             ast.IsNot: "is"}  # fmt: skip
_NEXT_TO = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_HAS_AXES = re.compile(r"(mesh|topology|coords|parallel|layout)$")
_RESTORING = re.compile(r"restore|load|reset|copy_|zero_|clear|close|wait|update|pop|set_|unlink")


# Tests that come after a package's own; for others those of parity and of whole runs.
LATER = {
    "checkpoint": ("tests/train",),
    "checks": ("tests/cli", "tests/train"),
    "cli": ("tests/repository",),
    "config": (
        "tests/repository/test_settings_reference.py",
        "tests/checks",
        "tests/cli",
        "tests/train",
    ),
    "corpus": ("tests/cli",),
    "distributed": ("tests/process", "tests/parity", "tests/train"),
    "generate": ("tests/cli",),
    "kernels": ("tests/model", "tests/train/test_kernel_choice.py", "tests/parity"),
    "planner": ("tests/cli",),
    "process": ("tests/train", "tests/slurm"),
    "record": ("tests/train",),
    "run": ("tests/planner", "tests/cli", "tests/train"),
    "schedules": ("tests/pipeline", "tests/cli", "tests/parity"),
}


INTERPRETED = ("tests/kernels/triton",)  # whose files run in a process that one of them starts


@dataclass(frozen=True)
class Source:
    """A file as text and tree."""

    file: str
    text: str
    lines: Sequence[bytes]  # columns of a tree count bytes
    tree: ast.Module

    @classmethod
    def read(cls, path: Path, root: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        lines = text.encode().split(b"\n")
        return cls(str(path.relative_to(root)), text, lines, ast.parse(text))

    @cached_property
    def first_values(self) -> set[int]:
        """Numbers of the lines in which fields get their first values."""
        functions = (node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef))
        return {
            number
            for function in functions
            if function.name in ("__init__", "__post_init__")
            for number in range(function.lineno, (function.end_lineno or function.lineno) + 1)
        }

    def segment(self, node: ast.AST) -> str:
        """The text of an expression or statement."""
        assert isinstance(node, (ast.expr, ast.stmt, ast.keyword))
        assert node.end_lineno is not None
        rows = list(self.lines[node.lineno - 1 : node.end_lineno])
        rows[-1] = rows[-1][: node.end_col_offset]
        rows[0] = rows[0][node.col_offset :]
        return b"\n".join(rows).decode()

    def grouped(self, node: ast.AST) -> str:
        """The text of an operand, which may have lost its parentheses."""
        text = self.segment(node)
        whole = (ast.Name, ast.Attribute, ast.Call, ast.Constant, ast.Subscript)
        return text if isinstance(node, whole) else f"({text})"


def wrong_axis(source: Source, node: ast.AST) -> Iterator[str]:
    """Another axis of the mesh, or the other dim of a tensor."""
    if isinstance(node, ast.Attribute) and node.attr in _OTHER_AXIS:
        owner = source.segment(node.value)
        if _HAS_AXES.search(owner):
            yield f"{owner}.{_OTHER_AXIS[node.attr]}"
    if isinstance(node, ast.Constant) and node.value in _OTHER_AXIS:
        yield f'"{_OTHER_AXIS[str(node.value)]}"'
    if isinstance(node, ast.keyword) and node.arg in ("dim", "axis"):
        other = {"0": "1", "1": "0", "-1": "0"}.get(source.segment(node.value))
        if other is not None:
            yield f"{node.arg}={other}"
    if isinstance(node, ast.Subscript) and source.segment(node.value).endswith("shape"):
        other = {"0": "1", "1": "0"}.get(source.segment(node.slice))
        if other is not None:
            yield f"{source.segment(node.value)}[{other}]"


def dropped_term(source: Source, node: ast.AST) -> Iterator[str]:
    """One operand of a sum, a product, an `and` or an `or` is missing."""
    terms = isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult))
    if isinstance(node, ast.BinOp) and terms and is_number(node.left) and is_number(node.right):
        yield source.grouped(node.left)
    if isinstance(node, ast.BoolOp):
        yield source.grouped(node.values[0])
        yield source.grouped(node.values[-1])


def is_number(node: ast.AST) -> bool:
    """False for what is surely a text or a sequence."""
    text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return not text and not isinstance(node, (ast.List, ast.Tuple, ast.JoinedStr))


def off_by_one(source: Source, node: ast.AST) -> Iterator[str]:
    """A bound, an index or the end of a range moved by one."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _NEXT_TO:
        sides = source.segment(node.left), source.grouped(node.comparators[0])
        yield f"{sides[0]} {_NEXT_TO[type(node.ops[0])]} {sides[1]}"
    if isinstance(node, ast.Call) and source.segment(node.func) == "range" and len(node.args) == 1:
        yield f"range({source.segment(node.args[0])} - 1)"
    if isinstance(node, ast.BinOp) and source.segment(node.right) == "1":
        yield source.grouped(node.left)


def stale_state(source: Source, node: ast.AST) -> Iterator[str]:
    """A field or an element keeps its old value; in `__init__` it has none."""
    target: ast.AST | None = None
    if isinstance(node, ast.stmt) and node.lineno in source.first_values:
        return
    if isinstance(node, ast.Assign) and len(node.targets) == 1:
        target = node.targets[0]
    if isinstance(node, ast.AugAssign):
        target = node.target
    if isinstance(target, (ast.Attribute, ast.Subscript)):
        yield "pass"


def swapped_rank(source: Source, node: ast.AST) -> Iterator[str]:
    """Ranks counted from the other end."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        owner = source.segment(node.value)
        if node.attr == "rank" and not isinstance(node.value, ast.Name):
            yield f"({owner}.size - 1 - {owner}.rank)"
        if node.attr in ("next_rank", "previous_rank"):
            other = {"next_rank": "previous_rank", "previous_rank": "next_rank"}[node.attr]
            yield f"{owner}.{other}"
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq) and len(node.ops) == 1:
        left = source.segment(node.left)
        if re.search(r"\brank$", left):
            yield f"{left} != {source.grouped(node.comparators[0])}"


def missing_restore(source: Source, node: ast.AST) -> Iterator[str]:
    """A call that puts something back, empties, waits or closes is not made."""
    called = node.value if isinstance(node, ast.Expr) else None
    if isinstance(called, ast.Call) and _RESTORING.search(source.segment(called.func)):
        yield "pass"


def flipped_comparison(source: Source, node: ast.AST) -> Iterator[str]:
    """The opposite of a comparison."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        sides = source.segment(node.left), source.grouped(node.comparators[0])
        yield f"{sides[0]} {_OPPOSITE[type(node.ops[0])]} {sides[1]}"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield source.grouped(node.operand)


def changed_constant(source: Source, node: ast.AST) -> Iterator[str]:
    """Another number, or the other truth value."""
    if isinstance(node, ast.Constant):
        if isinstance(node.value, bool):
            yield str(not node.value)
        elif isinstance(node.value, int):
            yield str(node.value + 1)
        elif isinstance(node.value, float):
            yield str(2 * node.value if node.value else 1.0)


OPERATORS: dict[str, Callable[[Source, ast.AST], Iterator[str]]] = {
    function.__name__.replace("_", " "): function
    for function in (
        wrong_axis,
        dropped_term,
        off_by_one,
        stale_state,
        swapped_rank,
        missing_restore,
        flipped_comparison,
        changed_constant,
    )
}


def product_packages(root: Path = ROOT) -> list[str]:
    """The folders of Python files of the product."""
    files = [path for name in ("megalite", "kernels") for path in (root / name).rglob("*.py")]
    folders = {str(path.parent.relative_to(root)) for path in files}
    return sorted(folder for folder in folders if not folder.startswith("megalite/kernels"))


def candidates(package: str, operator: str, root: Path = ROOT) -> list[Fault]:
    """All faults of an operator in the files of a package, in the order of the seed."""
    found = {}
    for path in sorted((root / package).glob("*.py")):
        source = Source.read(path, root)
        for node in live_nodes(source.tree):
            for text in OPERATORS[operator](source, node):
                fault = fault_at(source, node, text, operator)
                if fault is not None:
                    found[fault.change] = fault
    return sorted(found.values(), key=lambda fault: digest(operator, *fault.change))


def live_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes whose change can change a result: no message, type or declaration."""
    for field, value in ast.iter_fields(tree):
        if field in ("annotation", "returns", "decorator_list", "type_params", "msg"):
            continue
        for node in value if isinstance(value, list) else [value]:
            if isinstance(node, ast.AST) and not is_declaration(node):
                yield node
                yield from live_nodes(node)


def is_declaration(node: ast.AST) -> bool:
    if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
        return node.value.id == "Literal"
    return isinstance(node, (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom))


def fault_at(source: Source, node: ast.AST, text: str, operator: str) -> Fault | None:
    """The fault of `text` in a node's place, anchored by as many lines as make it unique."""
    if not hasattr(node, "lineno") or "'''" in source.segment(node):
        return None
    assert isinstance(node, (ast.expr, ast.stmt, ast.keyword))
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    lines = source.lines
    first, last = node.lineno - 1, node.end_lineno - 1
    head, tail = lines[first][: node.col_offset], lines[last][node.end_col_offset :]
    changed = head + text.encode() + tail

    # Lines above are added until the anchor is found once.
    for start in range(first, -1, -1):
        above = lines[start:first]
        anchor, replacement = (
            b"\n".join(rows).decode()
            for rows in ([*above, *lines[first : last + 1]], [*above, changed])
        )
        fault = Fault("", operator, source.file, anchor, replacement)
        if f"\n{source.text}".count(f"\n{anchor}\n") == 1:
            return fault if anchor != replacement else None
    return None


def compiles(fault: Fault, root: Path = ROOT) -> bool:
    try:
        ast.parse(fault.planted(root))
    except SyntaxError:
        return False
    return True


def digest(*parts: str) -> str:
    return sha256("\0".join([str(SEED), *parts]).encode()).hexdigest()


def draw(
    kept: Sequence[Fault],
    left_out: Collection[Fault],
    root: Path = ROOT,
    count: int = NUM_DRAWN,
) -> list[Fault]:
    """`count` faults: those of `kept` that are still in the source, and new ones in the gaps.

    All with the tests that the tree has for them now.

    Slot n has the n-th package and the n-th operator, each list gone through again and again, but
    packages without a fault come first; one without a place for the operator takes the next.
    """
    packages = sorted(product_packages(root), key=digest)
    operators = sorted(OPERATORS, key=digest)
    by_slot = {fault.name: fault for fault in kept if fault.line(root) is not None}
    taken = {fault.change for fault in [*by_slot.values(), *left_out]}
    drawn = []
    for slot in range(count):
        name = f"drawn-{slot:02d}"
        fault = by_slot.get(name)
        if fault is None:
            order = [operators[(slot + later) % len(operators)] for later in range(len(operators))]
            covered = {fault.package for fault in by_slot.values()}
            bare = [package for package in packages if package not in covered]
            package = bare[0] if bare else packages[slot % len(packages)]
            fault = next(
                fault
                for operator in order
                for fault in candidates(package, operator, root)
                if fault.change not in taken and compiles(fault, root)
            )
            taken.add(fault.change)
            by_slot[name] = fault
        drawn.append(replace(fault, name=name, tests=suites_of(fault.file, root)))
    return drawn


def suites_of(file: str, root: Path = ROOT) -> tuple[str, ...]:
    """By the mirrored tree: the module's own tests, the package's, those of what stands on it."""
    path = Path("tests") / file.removeprefix("megalite/")
    own, folder = path.with_name(f"test_{path.name}"), path.parent
    later = LATER.get(path.parts[1], ("tests/parity", "tests/train"))
    while not (root / folder).is_dir():
        folder = folder.parent
    first = [str(own)] if (root / own).is_file() and str(folder) not in INTERPRETED else []
    first += [str(folder)] if len(folder.parts) > 1 else ["tests/process", "tests/cli"]
    return tuple(dict.fromkeys([*first, *later]))
