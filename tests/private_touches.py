"""Reader of private touches: where code uses what an outside library does not promise, read from the AST.

Types are not known, so this goes by names: an underscore attribute that no class or module of ours defines is somebody
else's, and so is one that is reached from an import or from a variable called like a library.
"""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator

LIBRARIES = {"ray", "optuna", "openml", "torch", "mlflow", "sklearn", "minio", "requests", "pandas", "numpy", "scipy"}
"""A variable of such a name is the library, also where it comes as an argument."""
SETTINGS = ("openml.config.", "torch.backends.")
"""Modules whose documentation has their attributes set."""
INTERNAL = {"class_cache", "internal_kv", "run_metadata", "update_max_pending_trials"}
"""Ray's names that no page of its reference has, though no underscore says so."""
_OWN = {"bishop_ray", "__future__"}


def is_private(name: str) -> bool:
    """One underscore in front; two on both sides are Python's own protocols."""
    return name in INTERNAL or (name.startswith("_") and not (name.startswith("__") and name.endswith("__")))


def is_foreign(module: str) -> bool:
    """Whether a dotted name belongs to an outside library."""
    top = module.split(".")[0]
    return bool(top) and top not in _OWN and top not in sys.stdlib_module_names


def dotted(node: ast.AST) -> str:
    """``a.b.c`` of a chain of attributes, "" where it does not begin with a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return ""


class Names(ast.NodeVisitor):
    """What our own code defines and uses, gathered over all of it before a file is judged.

    Attributes:
        private: Underscore names that ours defines anywhere.
        used: Underscore attributes that ours reads, but for `super()`.
        defined: By class, the underscore names that it defines.
        bases: By class, its bases as written.
        foreign: Names that imports bind to something of an outside library.
    """

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        self.private: set[str] = set()
        self.used: set[str] = set()
        self.defined: defaultdict[str, set[str]] = defaultdict(set)
        self.bases: defaultdict[str, set[str]] = defaultdict(set)
        self.foreign: set[str] = set()
        self._inside: list[str] = []
        for tree in trees:
            self.visit(tree)

    def _define(self, name: str) -> None:
        if is_private(name):
            self.private.add(name)
            for owner in self._inside[-1:]:
                self.defined[owner].add(name)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._define(node.name)
        for base in node.bases:
            self.bases[node.name].add(dotted(base.value if isinstance(base, ast.Subscript) else base))
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._define(node.name)
        self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Store):
            self._define(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Store) and dotted(node.value) in ("self", "cls"):
            self._define(node.attr)
        elif not _is_super(node.value):
            self.used.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if dotted(node.func) == "object.__setattr__" and isinstance(node.args[1], ast.Constant):
            self._define(str(node.args[1].value))  # how a frozen record sets its own
        self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if is_foreign(node.module or ""):
            self.foreign |= {alias.asname or alias.name for alias in node.names}

    def visit_Import(self, node: ast.Import) -> None:
        self.foreign |= {(a.asname or a.name).split(".")[0] for a in node.names if is_foreign(a.name)}

    def knows(self, owner: str, name: str) -> bool:
        """Whether a class of ours, or a class of ours above it, defines the name."""
        return name in self.defined[owner] or any(
            self.knows(base, name) for base in self.bases[owner] if base in self.bases and base != owner
        )

    def has_foreign_base(self, owner: str) -> bool:
        """Whether a class descends from one of an outside library."""
        return any(
            base.split(".")[0] in self.foreign or (base in self.bases and base != owner and self.has_foreign_base(base))
            for base in self.bases[owner]
        )


def _is_super(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and dotted(node.func) == "super"


def _text(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


class Touches(ast.NodeVisitor):
    """The private touches of one file.

    Attributes:
        found: Line and what is touched.
    """

    def __init__(self, tree: ast.AST, names: Names) -> None:
        self.found: list[tuple[int, str]] = []
        self._names = names
        self._outside = {name: name for name in LIBRARIES}
        """Variables that stand for a module or a class of a library, and its dotted name."""
        self._standard: set[str] = set()
        self._classes: list[str] = []
        self._collect(tree)
        self.visit(tree)

    def _collect(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                for alias in node.names:
                    known = alias.asname or alias.name.split(".")[0]
                    if is_foreign(module + alias.name):
                        self._outside[known] = module + (alias.name if alias.asname or module else known)
                    else:
                        self._standard.add(known)
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name) and (name := self._library(node.value)):
                        self._outside[target.id] = name

    def _library(self, node: ast.AST) -> str:
        """The dotted name of a module or what lies in it, if an outside library's; "" else."""
        if isinstance(node, ast.Call) and dotted(node.func) in ("importlib.import_module", "import_module"):
            return name if is_foreign(name := _text(node.args[0])) else ""
        head, _, rest = dotted(node).partition(".")
        return f"{self._outside[head]}.{rest}".rstrip(".") if head in self._outside else ""

    def _say(self, node: ast.AST, what: str) -> None:
        self.found.append((getattr(node, "lineno", 0), what))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if is_foreign(alias.name) and any(map(is_private, alias.name.split("."))):
                self._say(node, f"import {alias.name}")

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        for alias in node.names:
            if is_foreign(module) and any(map(is_private, [*module.split("."), alias.name])):
                self._say(node, f"from {module} import {alias.name}")

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if self._names.has_foreign_base(node.name):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and is_private(part.name) and part.name not in self._names.used:
                    self._say(part, f"{node.name} overrides {part.name}")
        self._classes.append(node.name)
        self.generic_visit(node)
        self._classes.pop()

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if is_private(node.attr) and self._is_theirs(node):
            self._say(node, ast.unparse(node))
        self.generic_visit(node)

    def _is_theirs(self, node: ast.Attribute) -> bool:
        owner = dotted(node.value)
        if owner in ("self", "cls") or _is_super(node.value):
            here = self._classes[-1] if self._classes else ""
            return self._names.has_foreign_base(here) and (
                not self._names.knows(here, node.attr)
                or (_is_super(node.value) and not any(self._names.knows(b, node.attr) for b in self._names.bases[here]))
            )
        if owner.split(".")[0] in self._standard:
            return False
        return bool(self._library(node.value)) or node.attr not in self._names.private

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            for part in target.elts if isinstance(target, ast.Tuple | ast.List) else [target]:
                self._set(part)
        self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._set(node.target)
        self.generic_visit(node)

    visit_AugAssign = visit_AnnAssign  # type: ignore[assignment]  # both have one target

    def _set(self, target: ast.AST) -> None:
        name = self._library(target) if isinstance(target, ast.Attribute) else ""
        if name and not name.startswith(SETTINGS):
            self._say(target, f"{name} is set")

    def visit_Call(self, node: ast.Call) -> None:
        called = dotted(node.func)
        if called in ("importlib.import_module", "import_module", "__import__") and node.args:
            if is_foreign(name := _text(node.args[0])) and any(map(is_private, name.split("."))):
                self._say(node, f"import {name}")
        elif called in ("getattr", "hasattr", "setattr", "delattr") and len(node.args) > 1:
            theirs = dotted(node.args[0]) not in ("self", "cls")
            if (theirs and is_private(_text(node.args[1]))) or (
                called in ("setattr", "delattr") and self._library(node.args[0])
            ):
                self._say(node, ast.unparse(node))
        self.generic_visit(node)


def private_touches(sources: dict[str, str]) -> Iterator[str]:
    """``file:line: what`` of every private touch.

    Args:
        sources: Text by file name.
    """
    trees = {name: ast.parse(text) for name, text in sources.items()}
    names = Names(trees.values())
    for name, tree in trees.items():
        for line, what in sorted(Touches(tree, names).found):
            yield f"{name}:{line}: {what}"
