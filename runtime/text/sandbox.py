"""Jinja for templates nobody has read: no way out, and no way to run long or grow large.

jinja2's immutable sandbox keeps a template away from Python's internals and from its inputs.
What it does not limit is metered here (metering.py).  The template language repeats work only
through `for` and through calls, so both are counted; every operation whose result can be longer
than its operands is checked first.  Methods of plain values are a list of allowed ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from runtime.errors import EngineError, TemplateError
from runtime.text import metering
from runtime.text.metering import charged, charged_deep, concat, meter, text_of


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates run in: Hugging Face's options, our limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))
    concat = staticmethod(concat)
    meter_iterations = staticmethod(metering.Iterations)
    meter_deep = staticmethod(charged_deep)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=text_of,
            extensions=[loopcontrols, _GenerationTag],
        )
        self._meter_nodes = _MeterNodes()
        self.globals.pop("lipsum", None)
        self.filters = {
            name: _counting(function, name in COMPARING_FILTERS, COST_OF_CHARACTER.get(name, 0))
            for name, function in {**self.filters, **OWN_FILTERS}.items()
            if name not in FORBIDDEN_FILTERS
        }
        tests: Mapping[str, Any] = self.tests
        self.tests = {
            name: _counting(function, True) if name in COMPARING_TESTS else function
            for name, function in tests.items()
        }

    def meter_tilde(self, *operands: Any) -> str:
        """`a ~ b ~ c`."""
        return concat(operands)

    def meter_slice(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        """`value[start:stop:step]`."""
        return charged(value[start:stop:step])

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Only listed methods of plain values; otherwise the sandbox's own rules."""
        for kind, allowed in SAFE_METHODS.items():
            if isinstance(obj, kind):
                return attr in allowed
        return bool(super().is_safe_attribute(obj, attr, value))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call within the limits; methods that can cost much are checked before they run."""
        meter().step()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | list | tuple):
            if __obj.__name__ == "join" and len(args) == 1:
                args = (_list(args[0]),)
            size = SIZE_OF_METHOD.get(__obj.__name__)
            if size is not None:
                meter().charge(size(owner, *args))
        result = super().call(__context, __obj, *args, **kwargs)
        return charged_deep(result) if isinstance(result, dict) else charged(result)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """`left operator right`, refused when the result would be too large."""
        meter().charge(metering.size_of_operation(operator, left, right))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` with field specifications that cannot blow up."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **kwargs: Any) -> str:
            meter().charge(metering.size_of_format(value.__self__, [*args, *kwargs.values()]))
            return wrapped(*args, **kwargs)

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        self._meter_nodes.visit(tree)
        tree.set_environment(self)
        return tree


class _MeterNodes:
    """Puts the metered calls into a syntax tree, depth first and in place."""

    def visit(self, node: nodes.Node) -> nodes.Node:
        """`node`, or what stands in its place."""
        for name, value in node.iter_fields():
            if isinstance(value, nodes.Node):
                setattr(node, name, self.visit(value))
            elif isinstance(value, list):
                visited = [self.visit(v) if isinstance(v, nodes.Node) else v for v in value]
                setattr(node, name, visited)
        if isinstance(node, nodes.For):
            node.iter = self._call("meter_iterations", [node.iter])
        elif isinstance(node, nodes.Compare | nodes.Operand):
            node.expr = self._call("meter_deep", [node.expr])
        elif isinstance(node, nodes.Concat):
            return self._call("meter_tilde", node.nodes)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            bounds = (node.arg.start, node.arg.stop, node.arg.step)
            arguments = [bound or nodes.Const(None) for bound in bounds]
            return self._call("meter_slice", [node.node, *arguments])
        elif isinstance(node, nodes.List | nodes.Dict) or (
            isinstance(node, nodes.Tuple) and node.ctx == "load"
        ):
            return self._call("meter_deep", [node])
        return node

    def _call(self, name: str, arguments: Sequence[nodes.Node]) -> nodes.Expr:
        expressions = [cast(nodes.Expr, argument) for argument in arguments]
        if name == "meter_deep" and isinstance(expressions[0], nodes.Const):
            return expressions[0]
        return nodes.Call(nodes.EnvironmentAttribute(name), expressions, [], None, None)


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}` marks answers for training; nothing here."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """The template's output.  As `Template.render`, which would rewrite every frame of an error's
    traceback; that takes seconds where macros recurse."""
    return concat(template.root_render_func(template.new_context(variables)))


def explain(error: Exception, template: jinja2.Template | None = None) -> EngineError:
    """The typed error for whatever compiling or rendering a template raised."""
    if isinstance(error, EngineError):
        return error
    if isinstance(error, RecursionError):
        return TemplateError("the chat template is nested or recurses too deeply")
    if isinstance(error, jinja2.TemplateSyntaxError):
        return TemplateError(f"the chat template, line {error.lineno}: {error.message}")
    line = _line_of(error, template)
    where = f", line {line}," if line else ""
    return TemplateError(f"the chat template{where} failed: {type(error).__name__}: {error}")


def _line_of(error: Exception, template: jinja2.Template | None) -> int | None:
    """The template's line an error came from."""
    line = None
    traceback = error.__traceback__
    while traceback is not None and template is not None:
        if traceback.tb_frame.f_code.co_filename == template.filename:
            line = template.get_corresponding_lineno(traceback.tb_lineno)
        traceback = traceback.tb_next
    return line


def _counting(function: Callable[..., Any], deep: bool, cost: int = 0) -> Callable[..., Any]:
    """A filter or test that counts as a step; keeps jinja2's mark of what it wants passed first.

    deep: it compares entries, so what it gets is counted with everything inside; cost: what each
    character of a text it gets counts.
    """
    mark = getattr(function, "jinja_pass_arg", None)

    def counted(*args: Any, **kwargs: Any) -> Any:
        meter().step()
        if cost:
            meter().charge(cost * sum(len(text_of(arg)) for arg in args[mark is not None :]))
        if deep:
            value, *others = args[mark is not None :]
            value = (
                value if isinstance(value, str | dict) or not _is_iterable(value) else list(value)
            )
            charged_deep([value, *others])
            args = (*args[: mark is not None], value, *others)
        return charged(function(*args, **kwargs))

    if mark is not None:
        counted.jinja_pass_arg = mark  # type: ignore[attr-defined]
    return counted


def _is_iterable(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, jinja2.Undefined)


def _join(items: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    parts: list[Any] = []
    for i, item in enumerate(items):
        value = item.get(attribute, "") if attribute and isinstance(item, dict) else item
        parts += [separator, value] if i else [value]
    return concat(parts)


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = text_of(text)
    meter().charge(metering.size_of_replace(text, old, new))
    return str(text.replace(old, new, count))


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(int(width), 1000)
    text = text_of(text) + "\n"  # so that an empty last line is kept
    lines = text.splitlines()
    meter().charge(len(text) + len(lines) * (64 + len(margin)))
    lines[1:] = [margin + line if line or blank else line for line in lines[1:]]
    return (margin if first else "") + "\n".join(lines)


def _list(items: Any) -> list[Any]:
    count = meter().charge
    result = []
    for item in items:
        count(metering.VISIT)
        result.append(item)
    return result


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    values: Any = kwargs or args
    meter().charge(metering.size_of_percent(text, values))
    return str(str(text) % values)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    scale = 10.0 ** max(-20, min(int(precision), 20))
    if method == "common":
        return round(float(value), max(-20, min(int(precision), 20)))
    floor = float(value) * scale // 1
    up = method == "ceil" and floor != float(value) * scale
    return (floor + up) / scale


OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "list": _list,
    "replace": _replace,
    "round": _round,
    "safe": text_of,
    "string": text_of,
}
FORBIDDEN_FILTERS = frozenset(
    (
        "batch",
        "center",
        "filesizeformat",
        "pprint",
        "random",
        "slice",
        "sum",
        "urlencode",
        "urlize",
        "wordwrap",
        "xmlattr",
    )
)
COST_OF_CHARACTER = {"title": 64, "wordcount": 64, "striptags": 8, "int": 8}
COMPARING_FILTERS = frozenset(("sort", "min", "max", "unique", "groupby", "dictsort"))
COMPARING_TESTS = frozenset(
    (
        "==",
        "!=",
        "<",
        "<=",
        ">",
        ">=",
        "eq",
        "equalto",
        "ne",
        "lt",
        "lessthan",
        "le",
        "gt",
        "greaterthan",
        "ge",
        "in",
    )
)
SIZE_OF_METHOD: dict[str, Callable[..., int]] = {
    "replace": metering.size_of_replace,
    "split": metering.size_of_split,
    "rsplit": metering.size_of_split,
    "splitlines": lambda text, *_: metering.size_of_split(text, "\n"),
    "join": metering.size_of_join,
    "index": metering.deep_size_first,
    "count": metering.deep_size_first,
}
_TEXT_METHODS = (
    "capitalize casefold count endswith find format index isalnum isalpha isdecimal isdigit "
    "islower isnumeric isspace istitle isupper join lower lstrip partition removeprefix "
    "removesuffix replace rfind rindex rpartition rsplit rstrip split splitlines startswith "
    "strip swapcase title upper"
)
SAFE_METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_TEXT_METHODS.split()),
    dict: frozenset(("get", "items", "keys", "values", "copy")),
    list: frozenset(("count", "index", "copy")),
    tuple: frozenset(("count", "index")),
    int: frozenset(),
    float: frozenset(("is_integer",)),
    bytes: frozenset(),
    set: frozenset(),
}
