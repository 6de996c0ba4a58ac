#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/python_api.py FOLDER: writes a page for each public class and module of the Python package.

What is public: names in __all__ of MODULES. The text is that of the docstrings, read without
importing anything. A public class, method or function without a docstring is an error.
"""

import ast
import inspect
import pathlib
import re
import sys

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "python" / "fanin"

# In the order of the site: module, title.
MODULES = {
    "fanin.torch": "Trainers in PyTorch",
    "fanin.torch.names": "Names of published tensors",
    "fanin": "Server, client and helpers",
    "fanin.sync": "One step to many engines",
    "fanin.pool": "Adapters to many engines",
    "fanin.check": "Checks of what is served",
    "fanin.trl": "TRL",
    "fanin.sglang": "SGLang",
    "fanin.vllm.worker": "vLLM without plugins",
    "fanin.vllm.weights_trainer": "vLLM's own trainer interface",
    "fanin.mapping": "Mappings",
    "fanin.config": "Configuration",
    "fanin.info": "nixl_info.json",
    "fanin.names": "Adapters' names",
    "fanin.errors": "Errors",
    "fanin.parameter_server": "NIXL-style parameter server",
    "fanin.parameter_client": "NIXL-style parameter client",
}
LONG = 9000  # bytes of a page, above which each class has a page of its own


def source(module):
    path = PACKAGE.parent / pathlib.Path(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def public(tree):
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(one, ast.Name) and one.id == "__all__" for one in targets):
            return ast.literal_eval(node.value)
    return []


def find(module, name, seen=()):
    """Where *name* of *module* is defined: its node, or None of a constant."""
    tree = ast.parse(source(module).read_text())
    for node in tree.body:
        kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        if isinstance(node, kinds) and node.name == name:
            return module, node
    package = module if source(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (module, name) not in seen:
            above = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1])
            origin = node.module or ""
            if node.level:
                origin = f"{above}.{origin}" if origin else above
            for alias in node.names:
                if (alias.asname or alias.name) == name and origin.startswith("fanin"):
                    return find(origin, alias.name, (*seen, (module, name)))
    return module, None


def markdown(text):
    """A docstring's markup as Markdown: roles, literals, field lists and Google's sections."""
    text = inspect.cleandoc(text)
    text = re.sub(r":(?:class|meth|func|mod|attr|exc|data):`~?([^`]+)`", r"`\1`", text)
    text = re.sub(r"``([^`]+)``", r"`\1`", text)
    text = re.sub(r"\. ::$", ".", text, flags=re.M)
    text = re.sub(r"::$", ":", text, flags=re.M)
    text = re.sub(r"^=+ +=+\n(.*?)^=+ +=+$", table, text, flags=re.M | re.S)
    text = re.sub(r"^(Args|Returns|Raises|Yields|Attributes):\n((?:[ ]{4}.*\n?|\n)+)", section,
                  text + "\n", flags=re.M)
    fields = re.split(r"^(?=:(?:param|raises?|returns?|ivar)\b)", text, flags=re.M)
    done = fields[0].rstrip()
    for field in fields[1:]:
        kind, name, about = re.match(r":(\w+) ?([^:]*): ?(.*)", field, re.S).groups()
        about = re.sub(r"\s+", " ", about).strip()
        head = {"param": f"`{name}`", "ivar": f"`{name}`"}.get(kind)
        if head is None:
            head = f"Raises `{name}`" if kind.startswith("raise") else "Returns"
        done += ("\n\n" if done and not done.rsplit("\n", 1)[-1].startswith("- ") else "\n")
        done += f"- {head}: {about}"
    return done.strip() + "\n"


def table(match):
    rows = [re.split(r" {2,}", line.strip(), maxsplit=1) for line in match[1].strip().split("\n")]
    rows = [row for row in rows if len(row) == 2 and not row[0].startswith("=")]
    return "| | |\n|---|---|\n" + "\n".join(f"| {a} | {b} |" for a, b in rows)


def section(match):
    body = inspect.cleandoc(match[2])
    entries = re.split(r"\n(?=\S)", body)
    lines = []
    for entry in entries:
        name, colon, about = entry.partition(":")
        flat = re.sub(r"\s+", " ", about if colon else entry).strip()
        named = colon and match[1] != "Returns"
        lines.append(f"- `{name.strip()}`: {flat}" if named else "- " + " ".join(entry.split()))
    return f"**{match[1]}**\n\n" + "\n".join(lines) + "\n\n"


def signature(node, name):
    arguments = ast.unparse(node.args)
    arguments = re.sub(r"^self(, |$)|^cls(, |$)", "", arguments)
    back = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    if node.name == "__init__":
        back = ""
    line = f"{name}({arguments}){back}"
    if len(line) > 96:
        parts = re.split(r", (?![^\[]*\])", arguments)
        line = f"{name}(\n    " + ",\n    ".join(parts) + f",\n){back}"
    return f"```python\n{line}\n```\n"


def told(node, where, missing):
    text = ast.get_docstring(node)
    if text is None:
        missing.append(where)
        return ""
    return markdown(text)


def function(node, where, missing, level, shown=None):
    head = "#" * level + f" {node.name}\n\n"
    return head + signature(node, shown or node.name) + "\n" + told(node, where, missing) + "\n"


def is_method(node):
    if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        return False
    return not node.name.startswith("_") and not any(
        isinstance(one, ast.Attribute) and one.attr == "setter" for one in node.decorator_list
    )


def inherited(module, node):
    """The class's methods and those of its bases in fanin, once each."""
    found = {one.name: one for one in node.body if is_method(one)}
    for base in node.bases:
        if isinstance(base, ast.Name) and not base.id.endswith("Error"):
            where, above = find(module, base.id)
            if isinstance(above, ast.ClassDef):
                for name, method in inherited(where, above).items():
                    found.setdefault(name, method)
    return found


def fields(module, node):
    """The fields of a dataclass and its bases in fanin, and what the docstrings say of each."""
    found, texts = {}, {}
    for base in node.bases:
        where, above = find(module, base.id) if isinstance(base, ast.Name) else (module, None)
        if isinstance(above, ast.ClassDef):
            more, told_of = fields(where, above)
            found, texts = {**found, **more}, {**texts, **told_of}
    own = [one for one in node.body if isinstance(one, ast.AnnAssign) and one.target.id != "_"]
    for one in own:
        value = one.value
        if isinstance(value, ast.Call) and getattr(value.func, "id", "") == "option":
            value = value.args[0] if value.args else None
        default = "" if value is None else f" = {ast.unparse(value)}"
        found[one.target.id] = f"{one.target.id}: {ast.unparse(one.annotation)}{default}"
    text = (ast.get_docstring(node) or "").partition("\nArgs:\n")[2]
    for name, about in re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", text, re.M):
        texts[name] = about
    return found, texts


def arguments_of(texts):
    lines = (f"- `{name}`: {' '.join(markdown(text).split())}\n" for name, text in texts.items())
    return f"**Args**\n\n{''.join(lines)}\n"


def options(module, init):
    """The dataclass of the options that ``@takes`` says of a constructor; None: it has none."""
    for one in init.decorator_list:
        if isinstance(one, ast.Call) and getattr(one.func, "id", "") == "takes":
            return fields(*find(module, one.args[0].id))
    return None


def class_page(module, node, where, missing, level):
    text = "#" * level + f" {node.name}\n\n"
    init = next((one for one in node.body if getattr(one, "name", "") == "__init__"), None)
    taken = options(module, init) if init is not None else None
    if init is not None and taken is None:
        text += signature(init, node.name) + "\n"
    about = told(node, where, missing) + "\n"
    if taken is not None:
        found, texts = taken
        first = [name for name in found if name in ("model", "addresses")]
        names = [*first, "*", *(name for name in found if name not in first)]
        arguments = ",\n    ".join(found.get(name, name) for name in names)
        text += f"```python\n{node.name}(\n    {arguments},\n)\n```\n\n"
        about += arguments_of({name: texts[name] for name in names if name in texts})
    elif any(isinstance(one, ast.AnnAssign) for one in node.body) and node.bases:
        about = re.sub(r"\*\*Args\*\*\n.*", "", about, flags=re.S)
        about += arguments_of(fields(module, node)[1])
    text += about
    for name, method in inherited(module, node).items():
        if any(isinstance(one, ast.Name) and one.id == "property" for one in method.decorator_list):
            back = f": `{ast.unparse(method.returns)}`" if method.returns else ""
            about = told(method, f"{where}.{name}", missing)
            text += "#" * (level + 1) + f" {name}\n\n`{name}`{back}\n\n{about}\n"
        else:
            text += function(method, f"{where}.{name}", missing, level + 1)
    return text


def module_pages(module, title, missing):
    """The pages of a module: name and text."""
    tree = ast.parse(source(module).read_text())
    names = [name for name in public(tree) if not name.startswith("__")]
    parts = []
    for name in names:
        if module == "fanin" and name.endswith("Error"):
            continue  # of fanin.errors
        where, node = find(module, name)
        full = f"{module}.{name}"
        if isinstance(node, ast.ClassDef):
            parts.append((name, class_page(where, node, full, missing, 2)))
        elif node is not None:
            parts.append((name, function(node, full, missing, 2)))
    intro = f"# {module}\n\n{title}.\n\n" + markdown(ast.get_docstring(tree) or "") + "\n"
    if len(intro) + sum(len(text) for _, text in parts) < LONG:
        yield module, intro + "\n".join(text for _, text in parts)
        return
    large = [(name, text) for name, text in parts if len(text) > 2500]
    small = [text for name, text in parts if len(text) <= 2500]
    links = "".join(f"- [`{name}`]({module}.{name}.md)\n" for name, _ in large)
    yield module, intro + links + "\n" + "\n".join(small)
    for name, text in large:
        text = text.replace(f"## {name}", f"# {module}.{name}", 1)
        yield f"{module}.{name}", re.sub(r"^### ", "## ", text, flags=re.M)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    index = "# Python\n\nMade of the docstrings of the package.\n\n"
    for module, title in MODULES.items():
        index += f"- [`{module}`]({module}.md): {title}\n"
        for name, text in module_pages(module, title, missing):
            (folder / f"{name}.md").write_text(text)
    (folder / "index.md").write_text(index)
    for one in missing:
        print(f"{one} has no docstring")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
