"""Generate the reference of the HTTP API from its OpenAPI description, and the list of metrics.

Sphinx calls `setup`. It then replaces the comments `<!-- http-api: operations -->`, `schemas`, `problems` and
`metrics` in the pages, so that these never differ from the program.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from prometheus_client import CollectorRegistry

from oocgemm.service.http import routes, server
from oocgemm.service.http.service import Config, open_service
from oocgemm.service.limits import Root
from oocgemm.service.protocol import PROBLEMS

MARK = re.compile(r"<!-- http-api: (\w+) -->")
Plain = Mapping[str, Any]


def described() -> Plain:
    """Return the OpenAPI description of the service."""
    return server.create(None).openapi()  # type: ignore[arg-type]  # describing it needs no service


def operations() -> str:
    """Return a section for each operation, grouped by tag."""
    found: dict[str, list[str]] = {}
    for path, methods in described()["paths"].items():
        for method, operation in methods.items():
            tag = (operation.get("tags") or ["page"])[0]
            found.setdefault(tag, []).append(_operation(method.upper(), path, operation))
    return "\n\n".join(f"## {tag.capitalize()}\n\n" + "\n\n".join(texts) for tag, texts in found.items())


def _operation(method: str, path: str, operation: Plain) -> str:
    lines = [f"### `{method} {path}`", operation.get("description", "")]
    if parameters := [each for each in operation.get("parameters", ()) if each["in"] != "path"]:
        rows = [
            (f"`{each['name']}`", each["in"], shape(each["schema"]), _default(each["schema"]))
            for each in parameters
        ]
        lines.append(table(("parameter", "in", "type", "default"), rows))
    if body := operation.get("requestBody"):
        lines.append(f"Body: {_content(body)}")
    answers = [
        f"`{status}` {_content(answer) or answer['description'].lower()}".rstrip(".")
        for status, answer in sorted(operation["responses"].items())
        if status[0] in "23"
    ]
    return "\n\n".join(filter(None, [*lines, f"Answer: {'; '.join(answers)}"]))


def _content(holder: Plain) -> str:
    """Return the types of a body."""
    kinds = []
    for media, content in holder.get("content", {}).items():
        is_json = media == "application/json"
        kinds.append(shape(content.get("schema", {})) if is_json else f"`{media}`")
    return " or ".join(kinds)


def schemas() -> str:
    """Return a section for each type of the API."""
    texts = []
    for name, schema in described()["components"]["schemas"].items():
        lines = [f"### {name}", schema.get("description", "")]
        if "enum" in schema:
            lines.append("One of " + ", ".join(f"`{each}`" for each in schema["enum"]) + ".")
        rows = []
        for field, one in schema.get("properties", {}).items():
            needed = "required" if field in schema.get("required", ()) else _default(one)
            rows.append((f"`{field}`", shape(one), _limits(one), needed))
        if rows:
            views = name.endswith("View")  # an answer has all of its fields
            kept = [row[:2] for row in rows] if views else rows
            lines.append(table(("field", "type", "limits", "default")[: len(kept[0])], kept))
        texts.append("\n\n".join(filter(None, lines)))
    return "\n\n".join(texts)


def shape(schema: Plain) -> str:
    """Return the type that a schema describes, as Markdown.

    >>> shape({"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]})
    'list of string, or null'
    """
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return ", or ".join(dict.fromkeys(map(shape, alternatives)))
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{each}`" for each in schema.get("enum", [schema.get("const")]))
    kind = str(schema.get("type", "any"))
    if kind == "array":
        items = schema.get("items") or (schema.get("prefixItems") or [{}])[0]
        return f"list of {shape(items)}"
    return kind


def _limits(schema: Plain) -> str:
    """Return the limits of a value."""
    found = []
    for each in schema.get("anyOf", [schema]):
        low, high = each.get("minimum"), each.get("maximum")
        if low is not None and high is not None:
            found.append(f"{low:g} to {high:g}")
        elif low is not None or "exclusiveMinimum" in each:
            found.append(f"at least {low:g}" if low is not None else f"above {each['exclusiveMinimum']:g}")
        if "maxLength" in each:
            found.append(f"at most {each['maxLength']} characters")
        if "maxItems" in each:
            fewest, most = each.get("minItems", 0), each["maxItems"]
            found.append(f"{most} items" if fewest == most else f"{fewest} to {most} items")
    return ", ".join(found)


def _default(schema: Plain) -> str:
    return f"`{schema['default']}`" if schema.get("default") not in (None, "", [], {}) else ""


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a Markdown table."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def listed_problems() -> str:
    """Return a table of the types of errors."""
    rows = [(f"`/problems/{slug}`", str(each.status), each.title) for slug, each in PROBLEMS.items()]
    return table(("type", "status", "title"), rows)


def metrics() -> str:
    """Return a table of the metrics, as a service reports them that has a folder and no jobs."""
    with TemporaryDirectory() as folder:
        path = Path(folder).resolve()
        (path / "out").mkdir()
        root = Root("out", path / "out", writable=True)
        config = Config(
            state=path / "state", roots={"out": root}, socket=path / "socket", backend="host", confine=False
        )
        service = open_service(config)
        try:
            registry = CollectorRegistry(auto_describe=False)
            registry.register(routes._Figures(service))
            found = list(registry.collect())
        finally:
            service.close()
    rows = []
    for metric in sorted(found, key=lambda metric: metric.name):
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = sorted({label for sample in metric.samples for label in sample.labels})
        shown = f"`{name}{{{','.join(labels)}}}`" if labels else f"`{name}`"
        rows.append((shown, metric.type, metric.documentation))
    return table(("metric", "type", "what it tells"), rows)


PARTS: dict[str, Callable[[], str]] = {
    "operations": operations,
    "schemas": schemas,
    "problems": listed_problems,
    "metrics": metrics,
}


def fill(text: str) -> str:
    """Return the text of a page with its marks replaced."""
    return MARK.sub(lambda found: PARTS[found[1]](), text)


def setup(sphinx: Any) -> dict[str, bool]:
    """Fill the pages that Sphinx reads."""

    def read(_: object, name: str, source: list[str]) -> None:
        source[0] = fill(source[0])

    sphinx.connect("source-read", read)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    for name, make in PARTS.items():
        print(f"<!-- {name} -->\n\n{make()}\n")
