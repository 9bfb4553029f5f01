"""Griffe extension for the reference pages: names that load on first use, and the options of configs as tables.

Nothing is imported: the sources are read. A package whose ``__init__`` calls ``attach(__name__, {name: module})`` gets
its public names as aliases, so that a page can say ``::: vtk.packs.load_task`` wherever the function is defined. A
config's fields are ``Annotated[type, Option("help", …)]``; its page shows one table of them, with those of its bases.
"""

import ast
from collections.abc import Iterator

import griffe


def lazy_names(module: griffe.Module) -> dict[str, str]:
    """Return the names that a package imports on first use, each with its module."""
    tables: dict[str, ast.expr] = {}
    for node in ast.parse(module.source).body:
        if not isinstance(node, ast.Assign):
            continue
        if isinstance(node.targets[0], ast.Name):
            tables[node.targets[0].id] = node.value
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == "attach":
            table = node.value.args[1]
            table = tables[table.id] if isinstance(table, ast.Name) else table
            return ast.literal_eval(table) if isinstance(table, ast.Dict) else {}  # computed: an alias of version 0.1
    if "_WHERE" in tables:  # the kernels know nothing of the toolkit: their table names submodules
        return {name: f"{module.path}.{part}" for name, part in ast.literal_eval(tables["_WHERE"]).items()}
    return {}


def fields(cls: griffe.Class) -> Iterator[griffe.Attribute]:
    """Yield the options of a config: base classes first, each name once, where its last definition stands."""
    found: dict[str, griffe.Attribute] = {}
    for part in (*reversed(cls.mro()), cls):
        for name, member in part.extra["api"].get("members", part.members).items():
            if not member.is_alias and member.is_attribute and "instance-attribute" in member.labels:
                found[name] = member  # without the label: a ClassVar
    yield from found.values()


def _aliased(annotation: griffe.Expr | str | None, scope: griffe.Object) -> tuple[griffe.Expr, griffe.Object] | None:
    """Return the expression that a name of a shared option stands for, and where it is written."""
    if not isinstance(annotation, griffe.ExprName):
        return None
    try:
        target = scope.modules_collection[annotation.canonical_path]
    except (KeyError, griffe.GriffeError):
        return None
    target = target.final_target if target.is_alias else target
    return (target.value, target) if target.is_attribute and isinstance(target.value, griffe.Expr) else None


def option(field: griffe.Attribute) -> tuple[griffe.Expr | str | None, str]:
    """Return the type and the help of a config's field, also where both stand in ``vtk.options.shared``."""
    annotation: griffe.Expr | str | None = field.annotation
    scope: griffe.Object = field
    while (found := _aliased(annotation, scope)) is not None:
        annotation, scope = found
    if not isinstance(annotation, griffe.ExprSubscript) or not str(annotation.left).endswith("Annotated"):
        return annotation, ""
    kind, *rest = annotation.slice.elements
    call = next((part for part in rest if isinstance(part, griffe.ExprCall)), None)
    text = str(call.arguments[0]) if call is not None and call.arguments else ""
    return kind, _text(text)


def _text(source: str) -> str:
    """Return what a string in the source says; a value put in by an f-string is an ellipsis."""
    node = ast.parse(source, mode="eval").body if source else ast.Constant("")
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
    return str(ast.literal_eval(node))


def is_config(cls: griffe.Class) -> bool:
    """Say whether a class is one of the toolkit's configs."""
    return any(parent.path == "vtk.options.config.Config" for parent in cls.mro())


def describe(cls: griffe.Class) -> griffe.DocstringSectionParameters:
    """Return a config's options as a section of its docstring."""
    rows = []
    for field in fields(cls):
        kind, text = option(field)
        rows.append(griffe.DocstringParameter(field.name, annotation=kind, description=text, value=field.value))
    return griffe.DocstringSectionParameters(rows, title="Options:")


class Api(griffe.Extension):
    """Adds lazy names as aliases; shows the fields of configs as a table."""

    def on_package(self, *, pkg: griffe.Module, loader: griffe.GriffeLoader, **_: object) -> None:
        """Go through a package once it is loaded."""
        for module in _modules(pkg):
            for name, where in lazy_names(module).items():
                if name not in module.members:
                    module.set_member(name, griffe.Alias(name, f"{where}.{name}"))
        configs = [cls for module in _modules(pkg) for cls in module.classes.values() if not cls.is_alias]
        tables = {cls: describe(cls) for cls in configs if is_config(cls)}
        for cls, table in tables.items():
            if cls.docstring is not None:
                cls.docstring.parsed = [*cls.docstring.parse("google"), table]
                cls.extra["api"]["members"] = cls.members  # for subclasses of other packages
                cls.members = {}


def _modules(module: griffe.Module) -> Iterator[griffe.Module]:
    yield module
    for part in list(module.modules.values()):
        if not part.is_alias:
            yield from _modules(part)
