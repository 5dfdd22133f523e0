"""Rules for the source of Triton kernels that no compiler and no interpreter checks."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TypeGuard

import pytest

from tests import ROOT

SOURCES = sorted((ROOT / "kernels" / "triton").glob("*.py"))
FORBIDDEN = ("libdevice", "make_block_ptr", "atomic_", "inline_asm", "autotune")


def _is_jit(node: ast.AST) -> TypeGuard[ast.FunctionDef]:
    return isinstance(node, ast.FunctionDef) and any(
        "jit" in ast.unparse(decorator) for decorator in node.decorator_list
    )


def _name(node: ast.AST) -> str:
    return ast.unparse(node)


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _is_wide(node: ast.AST) -> bool:
    """The expression is converted to 64 bits as a whole."""
    return isinstance(node, ast.Call) and _name(node).endswith(".to(tl.int64)")


class _NarrowIndexes(ast.NodeVisitor):
    """Products of a run-time argument with an index that still has 32 bits."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self.runtime = {
            x.arg
            for x in function.args.args
            if x.annotation is None or "constexpr" not in _name(x.annotation)
        }
        self.narrow: set[str] = set()
        self.wide: set[str] = set()
        self.faults: list[str] = []

    def _is_narrow(self, node: ast.AST) -> bool:
        if _is_wide(node):
            return False
        if isinstance(node, ast.Name):
            return node.id in self.narrow
        if isinstance(node, ast.Call):
            return _name(node.func) in ("tl.program_id", "tl.arange")
        if isinstance(node, ast.BinOp):
            sides = (node.left, node.right)
            if any(self._has_wide_part(side) for side in sides):
                return False  # 64 bits win
            return any(self._is_narrow(side) for side in sides)
        if isinstance(node, ast.Subscript):
            return self._is_narrow(node.value)
        return False

    def _has_wide_part(self, node: ast.AST) -> bool:
        if isinstance(node, ast.BinOp):
            return self._has_wide_part(node.left) or self._has_wide_part(node.right)
        if isinstance(node, ast.Subscript):
            return self._has_wide_part(node.value)
        return _is_wide(node) or (isinstance(node, ast.Name) and node.id in self.wide)

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                (self.narrow.add if self._is_narrow(node.value) else self.narrow.discard)(target.id)
                (self.wide.add if self._has_wide_part(node.value) else self.wide.discard)(target.id)
        self.generic_visit(node)

    def visit_For(self, node: ast.For) -> None:
        self.narrow |= _names(node.target)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.Mult):
            for index, factor in ((node.left, node.right), (node.right, node.left)):
                runtime = isinstance(factor, ast.Name) and factor.id in self.runtime
                if runtime and self._is_narrow(index):
                    self.faults.append(f"line {node.lineno}: {_name(node)} has 32 bits")
        self.generic_visit(node)


def faults(source: str) -> list[str]:
    """What is wrong with the kernels of a source text."""
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute | ast.ImportFrom):
            text = _name(node)
            found += [f"line {node.lineno}: {word}" for word in FORBIDDEN if word in text]
        if _is_jit(node):
            visitor = _NarrowIndexes(node)
            visitor.visit(node)
            found += visitor.faults
        if isinstance(node, ast.Call):
            found += _call_faults(node)
    return found


def _call_faults(node: ast.Call) -> list[str]:
    keywords = {x.arg or f"**{_name(x.value)}" for x in node.keywords}
    if _name(node.func) == "tl.load":
        masked = "mask" in keywords or len(node.args) > 1
        if masked and "other" not in keywords and len(node.args) < 3:
            return [f"line {node.lineno}: masked load without other="]
    launch = isinstance(node.func, ast.Subscript) and _name(node.func.value).endswith("_kernel")
    options = ("**OPTIONS", ".options()", "['launch']")
    if launch and not any(keyword.endswith(options) for keyword in keywords):
        return [f"line {node.lineno}: launch without enable_fp_fusion, whose default changes"]
    return []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_kernel_source_keeps_the_rules(path: Path) -> None:
    assert faults(path.read_text(encoding="utf-8")) == []


HEAD = "@triton.jit\ndef f_kernel(x_ptr, stride, n, BLOCK: tl.constexpr):\n"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("    tl.load(x_ptr, mask=True)\n", "without other"),
        ("    tl.load(x_ptr, True)\n", "without other"),
        ("    tl.atomic_add(x_ptr, 1)\n", "atomic_"),
        ("    tl.make_block_ptr(x_ptr)\n", "make_block_ptr"),
        ("    tl.extra.libdevice.tanh(x_ptr)\n", "libdevice"),
        ("    row = tl.program_id(0)\n    tl.store(x_ptr + row * stride, 0)\n", "row * stride"),
        ("    tl.store(x_ptr + stride * (tl.program_id(0) + 1), 0)\n", "32 bits"),
        ("    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    r[:, None] * stride\n", "32"),
        ("    for i in range(n):\n        tl.store(x_ptr + i * stride, 0)\n", "i * stride"),
        ("    pass\nf_kernel[(1,)](x, 1)\n", "enable_fp_fusion"),
    ],
)
def test_planted_faults_are_found(body: str, word: str) -> None:
    assert any(word in fault for fault in faults(HEAD + body))


@pytest.mark.parametrize(
    "body",
    [
        "    tl.load(x_ptr, mask=True, other=0.0)\n",
        "    tl.load(x_ptr)\n",
        "    row = tl.program_id(0).to(tl.int64)\n    tl.store(x_ptr + row * stride, 0)\n",
        "    r = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)\n    r * stride\n",
        "    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    x_ptr + r\n",
    ],
)
def test_sound_lines_pass(body: str) -> None:
    assert faults(HEAD + body) == []
