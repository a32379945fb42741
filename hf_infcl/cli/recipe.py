"""Recipe files as they are written: what an unquoted word means is left to the type of its field."""

from typing import Any

import yaml


class RecipeError(ValueError):
    """A recipe or a command line that cannot be followed; the message says what to change."""


class Word(str):
    """An unquoted value of a recipe, letter by letter. `hf_infcl.cli.coerce` reads it by its field's type.

    YAML 1.1 would read `010` as 8, `1:30` as 90, `1e-4` as text and `no` as False, and would forget what was written:
    a revision `0123e4` cannot be had back from a number.
    """

    __slots__ = ()


_DEEPEST = 100  # levels: more than any field takes, and less than the stack of what reads them recursively


class _Loader(yaml.SafeLoader):
    """YAML whose plain values stay words, and in which a key given twice is an error: the first would go unnoticed."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            # Only a list or a mapping that is still being read has no end.
            if event.anchor in self.anchors and self.anchors[event.anchor].end_mark is None:
                raise RecipeError(f"line {line}: the alias *{event.anchor} stands inside what it names")
        elif event.tag is not None:
            tag = event.tag.replace("tag:yaml.org,2002:", "!!")
            raise RecipeError(
                f"line {line}: tags such as {tag} are not read; the type of its field says what a value is"
            )
        if self._depth == _DEEPEST:
            raise RecipeError(f"line {line}: more than {_DEEPEST} lists and mappings inside each other")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        lines: dict[str, int] = {}
        for key, _ in node.value:
            # A merge (<<) may come several times; keys that are no scalars have no field's name.
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in lines:
                raise RecipeError(f"{key.value!r} is given twice, in lines {lines[key.value]} and {_line_of(key)}")
            lines[key.value] = _line_of(key)
        return super().construct_mapping(node, deep)

    def construct_word(self, node: yaml.ScalarNode) -> str:
        return Word(node.value) if node.style is None else node.value


_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
_Loader.yaml_implicit_resolvers = {
    first: kept
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    if (kept := [(tag, pattern) for tag, pattern in resolvers if tag in _KEPT])
}
_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_word)


def _line_of(node: yaml.Node) -> int:
    return node.start_mark.line + 1


def read_recipe(text: str) -> tuple[Any, dict[str, int]]:
    """Reads YAML, leaving unquoted values as they are written.

    Args:
        text: of the file.

    Returns:
        The content, made of dictionaries, lists, None, strings, and `Word` for what was not quoted; and for a mapping
        the line in which each of its keys stands.

    Raises:
        RecipeError: a key that is given twice, a tag, an alias inside what it names, too many levels.
        yaml.YAMLError: no valid YAML.

    Example:
        >>> read_recipe("seed: 010\\nrun_name: '7'")
        ({'seed': '010', 'run_name': '7'}, {'seed': 1, 'run_name': 2})
    """
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None, {}
    content = loader.construct_document(node)
    keys = [key for key, _ in node.value] if isinstance(node, yaml.MappingNode) else []
    return content, {key.value: _line_of(key) for key in keys if isinstance(key, yaml.ScalarNode)}
