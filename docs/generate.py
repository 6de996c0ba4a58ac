#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/generate.py [--check]: writes the reference pages that the code tells.

docs/reference/configuration.md is made of the options in fanin._options and fanin.config,
metrics.md of the tables of counters in C and of vLLM's metrics, errors.md of the status codes and
their Python classes. docs/README.md is docs/nav.yml as a page, for those who read the tree.
Of common/counters/counters.h are made python/fanin/_counters.py and the rows of stats_ok in
proto/PROTOCOL.md. Counters that public structs and schemas lack are written behind theirs. The
other fields of PROTOCOL.md are compared with those in proto/fields.c.
--check writes nothing, and fails if a page is not what the code says.
"""

import ast
import dataclasses
import json
import pathlib
import re
import sys
import textwrap
from typing import NamedTuple

HERE = pathlib.Path(__file__).resolve().parent
TREE = HERE.parent
REFERENCE = HERE / "reference"
NAV = HERE / "nav.yml"
sys.path.insert(0, str(TREE / "python"))

from fanin import _counters, _exporter, _options, config, errors  # noqa: E402

MADE = "<!-- Made by docs/generate.py: change the code, then run it. -->\n"

LONGEST = 230  # characters of a cell
OTHERS = (
    ("FANIN_CONFIG", "engines", "The TOML file of the engine's settings."),
    ("FANIN_LOG", "all", "`debug`, `info` or `warn`; with `,FILE` behind it into a file."),
    ("FANIN_TRACE", "all", "A folder in which each process makes a trace."),
    ("FANIN_INSECURE", "trainer", "1: serve a network without a secret or certificates."),
    ("FANIN_TRUST_CONTAINERS", "both ends", "1: containers of this user are this user."),
    ("FANIN_TRUST_OTHER_USERS", "engines", "1: accept ranks of other users on loopback."),
    ("FANIN_LIBRARY", "Python", "The `libfanin.so.0` to load."),
    ("FANIN_UCX_LIBRARY", "all", "The `libucp.so.0` to load."),
    ("FANIN_CUDA_LIBRARY", "all", "The CUDA driver to load; empty: none."),
    ("FANIN_OPENSSL_LIBRARY", "all", "The libssl of OpenSSL 3 to load."),
    ("FANIN_SYNC_API_KEY", "`fanin.sync`", "The key that callers of the service must send."),
    ("FANIN_ENGINE_API_KEY", "`fanin.sync`", "The key that the engines want."),
    ("NIXL_FETCH_SERVERS, FANIN_TRAINER", "`nixl-fetch`", "TARGET if none is given."),
    ("NIXL_FETCH_TIMEOUT", "`nixl-fetch`", "`--timeout` if none is given."),
)


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)]) + "\n"


# ------------------------------------------------------------------- configuration


def default(field):
    """The default of a field, as a file would have it."""
    value = field.default
    if value in (None, (), dataclasses.MISSING):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def short(text):
    """Sentences of *text* that fit into a cell; the page of the class has all of it."""
    kept = ""
    for sentence in re.split(r"(?<=\.) (?=\S)", text):
        if kept and len(kept) + len(sentence) > LONGEST:
            break
        kept += f" {sentence}"
    return kept.strip()


def settings(kind):
    """The options of one part of a job."""
    rows, texts = [], _options.texts_of(kind)
    fields = {one.name: one for one in dataclasses.fields(kind)}
    for name, one in _options.options_of(kind).items():
        variable = f"`{one.variable}`" if one.variable else "–"
        about = re.sub(r"\*(\w+)\*", r"`\1`", short(texts[name]))
        rows.append((f"`{one.where or name}`", variable, default(fields[name]), about))
    return table(("key", "variable", "default", ""), rows)


def configuration():
    groups = (
        ("Engine", config.InferenceConfig),
        ("Trainer", config.TrainerConfig),
        ("Orchestrator", config.OrchestratorConfig),
        ("Secret or certificate, of each of them", _options.Credentials),
    )
    text = f"""# Configuration

{MADE}
Settings come from the section `[weight_broadcast]` (with `type = "nixl"`) of a TOML file. A
variable overrides its key. `fanin.config` reads them: `trainer_config(path)`,
`orchestrator_config(path)` and `inference_config()`, which reads the file that `FANIN_CONFIG`
names. Unknown keys, wrong kinds and contradictions are a `ConfigError` that names the place and the
remedy.

Engines with fanin's plugin read theirs by themselves. A trainer does not: hand them on by
`WeightServer(model, **trainer_config().server_arguments())`. Without that a server reads the
variables of its secret or certificates only, and `FANIN_INSECURE`, `FANIN_TRUST_CONTAINERS`.
"""
    for title, kind in groups:
        text += f"\n## {title}\n\n{settings(kind)}"
    rows = [(", ".join(f"`{one}`" for one in v.split(", ")), who, what) for v, who, what in OTHERS]
    text += f"\n## Other variables\n\n{table(('variable', 'of', ''), rows)}"
    text += """
## Rules

- Give a secret or a certificate with its key and authorities, never both.
- Files have absolute paths, because several processes read them.
- `bind` on a network needs `allow`. `cast` needs `snapshot`.
- `cache_dir` must belong to this user or root, and nobody else may write to it unless it is sticky.
- An engine without credentials uses the secret that `nixl_info.json` names, if it names one.
- `validate_together(trainer, orchestrator, inference)` checks that the files of one job fit.
- A misspelt variable is a warning in the log.
"""
    return text


def used_variables():
    """All FANIN_... that the code reads from the environment."""
    found = set()
    for room in ("common", "client", "server", "tools"):
        for source in (TREE / room).rglob("*.c"):
            found |= set(re.findall(r'getenv\("(FANIN_\w+)"\)', source.read_text()))
    for source in (TREE / "python" / "fanin").rglob("*.py"):
        found |= set(re.findall(r'environ(?:\.get\(|\[)"(FANIN_\w+)"', source.read_text()))
    return found


# ------------------------------------------------------------------------- metrics


def strings(text):
    """C's adjacent literals as one."""
    return "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', text)).replace('\\"', '"')


class Counter(NamedTuple):
    kind: str  # BOTH, OWN, TOLD
    key: int  # of stats_ok; 0: OWN
    name: str
    metric: str
    label: str
    about: str


def counters():
    text = (TREE / "common/counters/counters.h").read_text()
    string = r'((?:"(?:[^"\\]|\\.)*"[\s\\]*)+|NULL)'
    row = rf"(BOTH|OWN|TOLD)\((?:(\d+), )?(\w+), {string}, {string},[\s\\]*{string}\)"
    found = re.findall(row, text[text.index("#define COUNTERS") :])
    return [
        Counter(kind, int(key or 0), name, *(strings(text) for text in texts))
        for kind, key, name, *texts in found
    ]


def helps(kinds):
    return {one.metric: one.about for one in counters() if one.kind in kinds and one.about and one.metric}


COUNTERS_PY = '''# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E501
# fmt: off
"""What a rank counts. Made by docs/generate.py of common/counters/counters.h."""

SERVER_STATS = tuple(
    """
{members}
""".split()
)
"""Members of ``fanin_server_stats`` behind its size, in their order."""

TOLD: dict[str, tuple[str, dict[str, str]]] = {{
{told}}}
"""What ``nixl-fetch status`` tells of a rank: the metric of each member, and its labels."""

METRICS = {{
{metrics}}}
"""Those metrics, and what they are."""
'''


def counters_py():
    header = (TREE / "server/include/fanin/server.h").read_text()
    members = struct_members(with_counters(header, "fanin_server_stats", "BOTH", "OWN"))
    told = [one for one in counters() if one.kind != "OWN" and one.metric]
    labels = [dict(re.findall(r'(\w+)="(\w+)"', one.label)) for one in told]
    return COUNTERS_PY.format(
        members=textwrap.fill(" ".join(members), 96),
        told="".join(
            f'    "{one.name}": ("{one.metric}", {json.dumps(label)}),\n'
            for one, label in zip(told, labels, strict=True)
        ),
        metrics="".join(
            f'    "{name}": "{about}",\n' for name, about in helps(("BOTH", "TOLD")).items()
        ),
    )


def struct_members(text, name="fanin_server_stats"):
    body = text[text.index(f"typedef struct {name} {{") : text.index(f"}} {name};")]
    body = re.sub(r"/\*.*?\*/", "", body, flags=re.S)
    return [one for one in re.findall(r"(\w+)(?:\[\w+\])?(?=[,;])", body) if one != "struct_size"]


def with_counters(text, name, *kinds):
    """*text* with the members that struct *name* lacks behind its last."""
    there = struct_members(text, name)
    more = "".join(
        f"    /** {one.about} */\n    uint64_t {one.name};\n"
        for one in counters()
        if one.kind in kinds and one.name not in there
    )
    return text.replace(f"}} {name};", f"{more}}} {name};")


def with_properties(text, before, *kinds):
    """A schema, with the properties that it lacks before the property *before*."""
    at = text.index(f'"{before}": {{')
    start = text.rindex("\n", 0, at) + 1
    there = text[text.rindex('"rank": {', 0, at) : at]
    more = "".join(
        f'{" " * (at - start)}"{one.name}": {{"type": "integer", "minimum": 0}},\n'
        for one in counters()
        if one.kind in kinds and f'"{one.name}": {{' not in there
    )
    return text[:start] + more + text[start:]


def with_rows(text):
    """PROTOCOL.md, with the counters' rows of stats_ok."""
    start = text.index("|---|---|---|\n", text.index("| key | stats_ok")) + len("|---|---|---|\n")
    old = text[start : text.index("\n\n", start) + 1].splitlines(keepends=True)
    rows = [line for line in old if re.match(r"\| (13\.\.25|4\d) ", line)]
    last = {}
    for one in counters():
        last[one.metric] = about = one.about or last[one.metric]
        if one.key:
            result = ", ".join(re.findall(r'"(\w+)"', one.label))
            about = f"{about[:-1]}: {result}." if result else about
            unit = "ns. " if "_ns" in one.name else ""
            rows.append(f"| {one.key} | {one.name} ? | {unit}{about} |\n")
    rows.sort(key=lambda line: int(re.search(r"\d+", line)[0]))
    return text[:start] + "".join(rows) + text[start + sum(map(len, old)) :]


def of_vllm():
    found = {}
    for call in ast.walk(ast.parse((TREE / "python/fanin/engine/metrics.py").read_text())):
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in (
            "Counter",
            "Gauge",
            "Histogram",
        ):
            name, about = (one.value for one in call.args[:2])
            labels = [one.value for one in call.args[2].elts] if len(call.args) > 2 else []
            name += "_total" if call.func.id == "Counter" else ""
            found[name + ("{" + ", ".join(labels) + "}" if labels else "")] = about
    return found


def run_metrics():
    """The exporter's, with the counters as the table has them now."""
    mine = {name: about for name, about in _exporter.METRICS.items() if name not in _counters.METRICS}
    return mine | helps(("BOTH", "TOLD"))


def metrics():
    text = f"""# Metrics

{MADE}
[Monitoring](../monitoring/README.md) says how to scrape them, and has alerts and a dashboard.
"""
    run, own = run_metrics(), helps(("BOTH", "OWN"))
    rows = [
        (f"`{name}`", "all" if name in run and name in own else "run" if name in run else "rank", about)
        for name, about in (run | own).items()
    ]
    text += f"""
## Of a run, of one rank

`nixl-fetch exporter` asks all ranks: *run*. `Server.serve_metrics()` and `fanin_server_metrics()`
tell of one: *rank*.

{table(("metric", "where", ""), rows)}"""
    rows = [(f"`{name}`", about) for name, about in of_vllm().items()]
    text += f"""
## Of an engine

vLLM's `/metrics`, with fanin's plugin:

{table(("metric", ""), rows)}"""
    return text


# ------------------------------------------------------------------------ the protocol

HEADS = {  # the tables of PROTOCOL.md that are not called as those of proto/fields.c
    "open_path": "both",
    "list_entry": "entry",
    "stats_entry": "entry",
    "stats_holder": "holder",
    "stats_relay": "relay",
    "holder_entry": "entry",
    "page": "reply",
    "begin_verdict": "begin_ok",
    "begin_granted": "begin_ok",
    "begin_refused": "begin_ok",
}


def described():
    """The tables of fields in PROTOCOL.md, in order: head, and by key the names and marks."""
    text = (TREE / "proto/PROTOCOL.md").read_text()
    for heads, body in re.findall(r"^\| key \| (.*?)\|\n[|-]+\n((?:\|.*\n)+)", text, re.M):
        rows = {}
        for line in body.splitlines():
            keys, names, *marks = (one.strip() for one in line.strip("|").split("|"))
            if keys.replace(", ", "").isdigit():
                names = [re.sub(r" \(.*", "", name) for name in names.split(", ")]
                rows |= dict(zip(map(int, keys.split(", ")), ((n, marks) for n in names)))
        yield [one.strip() for one in heads.split("|")], rows


def coded():
    """The tables of proto/fields.c: by key the member, with " ?" behind it if it is optional."""
    text = (TREE / "proto/fields.c").read_text().replace("KEY_CRITICAL", "64")
    text = text.replace("FIRST_REGION", "OPTIONAL_NUMBER(64, FIELD_U32, m, first_region)")
    row = r"(\w+\(|\{)(\d+), (?:(FIELD_\w+), )?(?:(true|false), )?(?:AT\()?\w+,\s+(\w+)"
    for name, body in re.findall(r"^(?:CHECKED_)?TABLE\(\s*fields_(\w+),(.*?)\);", text, re.M | re.S):
        yield name, {
            int(key): member + (" ?" if "OPT" in kind or kind == "COUNT(" or must == "false" else "")
            for kind, key, _, must, member in re.findall(row, body)
        }


def protocol_faults():
    """Fields that PROTOCOL.md and proto/fields.c do not both name, and numbers of messages."""
    document = (TREE / "proto/PROTOCOL.md").read_text()
    header = (TREE / "proto/frame.h").read_text()
    pairs = re.findall(r"^\| (\d+(?:, \d+)?) \| (\w+(?:, \w+)?)[^|]*\| (?:both|control|data) \|$", document, re.M)
    told = {pair for row in pairs for pair in zip(*(cell.split(", ") for cell in row), strict=True)}
    for name, number in re.findall(r"MSG_(\w+) = (\d+),(?! +/\* reserved)", header):
        if (number, name.lower()) not in told:
            yield f"message {number} is not {name.lower()}"
    tables, at = list(described()), 0
    for name, fields in coded():
        if name == "stats":
            continue  # with_rows() writes it
        head, places = HEADS.get(name, name), (*range(at, len(tables)), *range(at))
        found = next((n for n in places if head in tables[n][0]), None)
        if found is None:
            yield f"fields_{name} is not described"
            continue
        at = found if head != "entry" else found + 1
        heads, rows = tables[found]
        column = heads.index(head) if len(heads) > 2 else 0
        for key, field in fields.items():
            said, marks = rows.get(key, ("nothing", []))
            if said != field or (column and not marks[column - 1]):
                yield f"key {key} of {name} is {field}, not {said}"


# -------------------------------------------------------------------------- errors


def codes():
    """Hundred by hundred: what to do, and the codes with what they mean."""
    header = (TREE / "common/core/include/fanin/error.h").read_text()
    body = header[header.index("FANIN_OK = 0") :].split("};")[0]
    for remedy, block in re.findall(r"/\* ([^*]+?) \*/\n(.*?)(?=\n\n|\Z)", body, re.S):
        found = re.findall(r"(FANIN_ERR_\w+) = (-\d+),\s*/\*\*< (.*?) \*/", block)
        yield remedy, [(name, int(code), about) for name, code, about in found]


def error_page():
    text = f"""# Errors

{MADE}
Every call of C returns a `fanin_status` and fills a `fanin_error`. Python raises a
`fanin.FaninError`. Both carry message, remedy, rank, key, address and phase, as far as they are
known.

The hundred of a code says who has to act. *Again* means that the same call may succeed without any
change (`error.retryable`).
"""
    for remedy, found in codes():
        rows = []
        for name, code, about in found:
            error = errors.error_class(code)(code=code)
            again = "yes" if error.retryable else ""
            rows.append((f"`{name}`", str(code), f"`{type(error).__name__}`", again, about))
        title, _, rest = remedy.partition(": ")
        text += f"\n## {title}\n\n{rest[0].upper()}{rest[1:]}\n\n"
        text += table(("C", "code", "Python", "again", ""), rows)
    return text


# ------------------------------------------------------------------------- contents


def contents():
    text = f"""# Contents

{MADE}
`tools/docs` makes a site of these pages, with search, the pages of names and subcommands, and the
C headers.
"""
    for title, page in re.findall(r"^ +- \"?(.*?)\"?:(?: (\S+))?$", NAV.read_text(), re.M):
        if not page:
            text += f"\n## {title}\n\n"
        elif title != "Home" and (TREE / page).exists():
            to = page[5:] if page.startswith("docs/") else f"../{page}"
            text += f"- [{title}]({to})\n"
    return text


def main():
    missing = used_variables() - {
        word for word in re.findall(r"FANIN_\w+", configuration()) if word
    }
    if missing:
        print(f"docs/generate.py: say what these variables do: {', '.join(sorted(missing))}")
        return 1
    stale = []
    parts = {  # files of which a part is made
        "proto/PROTOCOL.md": (with_rows,),
        "server/include/fanin/server.h": (with_counters, "fanin_server_stats", "BOTH", "OWN"),
        "client/include/fanin/client.h": (with_counters, "fanin_rank_stats", "BOTH", "TOLD"),
        "docs/schemas/serve.json": (with_properties, "commit_ns", "BOTH", "OWN"),
        "docs/schemas/status.json": (with_properties, "rtt_ns", "BOTH", "TOLD"),
    }
    pages = {
        TREE / "python/fanin/_counters.py": counters_py,
        HERE / "README.md": contents,
        REFERENCE / "configuration.md": configuration,
        REFERENCE / "metrics.md": metrics,
        REFERENCE / "errors.md": error_page,
    }
    texts = {target: make() for target, make in pages.items()}
    for path, (change, *more) in parts.items():
        texts[TREE / path] = change((TREE / path).read_text(), *more)
    for target, text in texts.items():
        if "--check" not in sys.argv:
            target.write_text(text)
        elif not target.exists() or target.read_text() != text:
            stale.append(target.relative_to(TREE))
    faults = list(protocol_faults())
    for fault in faults:
        print(f"proto/PROTOCOL.md is not what proto/fields.c and frame.h say: {fault}")
    for name in stale:
        print(f"{name} is not what the code says: run docs/generate.py")
    return 1 if stale or faults else 0


if __name__ == "__main__":
    sys.exit(main())
