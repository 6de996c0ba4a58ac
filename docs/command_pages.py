#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/command_pages.py FOLDER: writes the manual page as pages, one a subcommand.

tests/cli/usage.bats holds the manual page to what --help says. Needs scdoc and mandoc.
"""

import pathlib
import re
import subprocess
import sys

PAGE = pathlib.Path(__file__).resolve().parents[1] / "tools" / "nixl-fetch.1.scd"


def html(text):
    """A part of the page, without the header and footer of a manual."""
    page = f"nixl-fetch(1)\n\n{text}"
    roff = subprocess.run(["scdoc"], input=page.encode(), check=True, capture_output=True)
    made = subprocess.run(
        ["mandoc", "-T", "html", "-O", "fragment", "-K", "utf-8"],
        input=roff.stdout, check=True, capture_output=True,
    ).stdout.decode()
    return re.sub(r'<table class="(head|foot)">.*?</table>', "", made, flags=re.S)


def main():
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    text = PAGE.read_text().split("\n", 1)[1]
    sections = re.split(r"^# (.*)\n", text, flags=re.M)[1:]
    links, rest = [], ""
    for title, body in zip(sections[::2], sections[1::2]):
        if title == "COMMANDS":
            commands = re.split(r"^## (nixl-fetch .*)\n", body, flags=re.M)[1:]
            for head, about in zip(commands[::2], commands[1::2]):
                name = head.split()[1]
                links.append(f"- [`{head}`]({name}.md)")
                content = html(f"# {head.upper()}\n{about}")
                content = re.sub(r"<h1 .*?</h1>", "", content, count=1, flags=re.S)
                (folder / f"{name}.md").write_text(f"# {head}\n\n<div>\n{content}\n</div>\n")
        elif title in ("NAME", "SYNOPSIS"):
            continue
        elif title == "DESCRIPTION":
            content = re.sub(r"<h1 .*?</h1>", "", html(f"# {title}\n{body}"), flags=re.S)
            rest += f"<div>\n{content}\n</div>\n\nLINKS\n\n"
        else:
            name = title.lower().replace(" ", "-")
            title = title if title == "JSON" else title.capitalize()
            links.append(f"- [{title}]({name}.md)")
            content = re.sub(r"<h1 .*?</h1>", "", html(f"# {title.upper()}\n{body}"), flags=re.S)
            (folder / f"{name}.md").write_text(f"# {title}\n\n<div>\n{content}\n</div>\n")
    index = "# nixl-fetch\n\n" + rest.replace("LINKS", "\n".join(links))
    (folder / "index.md").write_text(index)
    return 0


if __name__ == "__main__":
    sys.exit(main())
