"""What artifacts were made from: as a tree, and as Mermaid, which GitHub and others show as a picture."""

import io
from collections.abc import Callable, Iterable, Mapping

from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from model.wording import printable
from tasks.store.lineage import Links, origins


def grow(tree: Tree, names: Iterable[str], links: Links, seen: set[str], label: Callable[[str], str] = str) -> Tree:
    """Add a branch for each name, with those that it links to. What was `seen` in the tree is not followed again."""
    for name in names:
        linked = links.get(name, [])
        is_repeated = name in seen and bool(linked)
        branch = tree.add(Text(printable(label(name)) + ("  (see above)" if is_repeated else "")))
        if name not in seen:
            seen.add(name)
            grow(branch, linked, links, seen, label)
    return tree


def as_text(title: str, lineage: Mapping[str, dict]) -> str:
    """The tree of these manifests below a title, from what no other of them was made from."""
    links = origins(lineage)
    read = {given for every in links.values() for given in every}
    last = [name for name in links if name not in read]
    text = io.StringIO()
    Console(file=text, width=200).print(grow(Tree(Text(title)), last, links, set()))
    return text.getvalue().rstrip()


def mermaid(links: Links, label: Callable[[str], str] = str) -> str:
    """The links as a flowchart, from what was read to what was made."""
    ids: dict[str, str] = {}  # as some names are words of Mermaid's
    for made, given in links.items():
        for name in (*given, made):
            ids.setdefault(name, f"a{len(ids)}")
    lines = ["flowchart LR"]
    for name, own in ids.items():
        text = printable(label(name)).replace('"', "#quot;")
        lines.append(f'    {own}["{text}"]')
    for made, given in links.items():
        lines += [f"    {ids[name]} --> {ids[made]}" for name in given]
    return "\n".join(lines)
