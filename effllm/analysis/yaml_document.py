"""Reads a YAML document of a user; a key that is given twice, and aliases of a huge document, are refused."""

from __future__ import annotations

from collections import Counter
from typing import Any

#: Limit of the nodes of a document in which each alias, and each merge key, counts as a copy.
MAX_NODES = 100_000


def load_yaml(content: str | bytes) -> Any:
    """Return the content of a YAML document; merge keys (``<<: *base``) are expanded."""
    import yaml

    try:
        loader = yaml.SafeLoader(content)
        node = loader.get_single_node()
        if node is None:
            return None
        _num_expanded_nodes(node, {})  # raises for a repeated key, a cycle, or a huge document
        return loader.construct_document(node)
    except (ValueError, RecursionError) as error:  # a date such as 2026-99-99; a deep document
        raise yaml.YAMLError(str(error)) from error


def _num_expanded_nodes(node: Any, sizes: dict[int, int]) -> int:
    """Return the number of nodes below a node, with expanded aliases; ``sizes`` has the results so far, by id."""
    import yaml

    if id(node) in sizes:
        if not sizes[id(node)]:
            raise yaml.YAMLError("an alias refers to itself")
        return sizes[id(node)]
    sizes[id(node)] = 0  # until its parts are counted
    parts: list[Any] = []
    if isinstance(node, yaml.SequenceNode):
        parts = node.value
    elif isinstance(node, yaml.MappingNode):
        counts = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        if repeated := [key for key, count in counts.items() if count > 1]:
            raise yaml.YAMLError(f"the key {repeated[0]} is given twice")
        parts = [part for pair in node.value for part in pair]
    sizes[id(node)] = 1 + sum(_num_expanded_nodes(part, sizes) for part in parts)
    if sizes[id(node)] > MAX_NODES:
        raise yaml.YAMLError(f"with its aliases the document has more than {MAX_NODES:,} values")
    return sizes[id(node)]
