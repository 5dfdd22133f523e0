"""The parameters that a Triton kernel writes through, found in its source."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any

# Functions of triton.language that write to the memory of their first argument.
_STORES = ("store", "atomic_add", "atomic_max", "atomic_min", "atomic_cas", "atomic_xchg")


@cache
def written_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """The names of parameters that a kernel, or a function that it calls, stores through.

    A name that is computed from a parameter stands for it, so too many may be found, never too few.
    """
    tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    parameters = {argument.arg for argument in tree.args.args}
    origins = _origins(tree, parameters)

    written: set[str] = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        for target in _stored(node, inspect.getmodule(function)):
            for name in _names(target):
                written |= origins.get(name, set())
    return frozenset(written)


def _stored(call: ast.Call, module: Any) -> list[ast.expr]:
    """The arguments of a call through which it stores."""
    function = call.func
    if isinstance(function, ast.Attribute) and function.attr in _STORES:
        owner = function.value
        is_module = isinstance(owner, ast.Name) and owner.id == "tl"
        return [call.args[0]] if is_module else [owner]  # a descriptor stores through itself
    if not isinstance(function, ast.Name):
        return []
    helper = getattr(module, function.id, None)
    inner = getattr(helper, "fn", None)
    if inner is None:
        return []
    written = written_parameters(inner)
    names = list(inspect.signature(inner).parameters)
    given = [*zip(names, call.args, strict=False)]
    given += [(keyword.arg or "", keyword.value) for keyword in call.keywords]
    return [argument for name, argument in given if name in written]


def _origins(tree: ast.FunctionDef, parameters: set[str]) -> dict[str, set[str]]:
    """For each name, the pointers among the parameters that it may be computed from."""
    origins = {name: {name} for name in parameters}
    assignments = [node for node in ast.walk(tree) if isinstance(node, (ast.Assign, ast.AugAssign))]
    changed = True
    while changed:
        changed = False
        for node in assignments:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found: set[str] = set()
            for name in _names(node.value):
                found |= origins.get(name, set())
            for target in targets:
                for name in _names(target):
                    if not found <= origins.setdefault(name, set()):
                        origins[name] |= found
                        changed = True
    return origins


def _names(node: ast.AST) -> set[str]:
    """The names in an expression, but for those that a value is only loaded through."""
    if isinstance(node, ast.Name):
        return {node.id}
    called = node.func if isinstance(node, ast.Call) else None
    if isinstance(called, ast.Attribute) and called.attr == "load":
        return set()
    return {name for inner in ast.iter_child_nodes(node) for name in _names(inner)}
