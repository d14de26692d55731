"""A configuration as text: YAML that gives the same run, if wanted with the place that each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from composerlite.config.origin import Origin, YamlPath

if TYPE_CHECKING:
    import yaml

__all__ = ["as_yaml", "with_origins"]


def as_yaml(values: Mapping[str, Any], origin: Origin) -> str:
    """``values`` as YAML. What depends on the environment is as the files write it."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(_written(values, (), origin)))


def with_origins(values: Mapping[str, Any], origin: Origin) -> str:
    """:func:`as_yaml` with a comment behind each value: the file and line, or the override, that says it."""
    import yaml

    text = as_yaml(values, origin)
    lines = text.splitlines()
    wanted = [(mark, origin.where(path)) for path, mark in _ends(yaml.compose(text, Loader=yaml.SafeLoader), ())]
    width = min(max(len(lines[line]) for line, _ in wanted), 60)
    for line, where in wanted:
        lines[line] = f"{lines[line]:<{width}}  # {where}"
    return "\n".join(lines) + "\n"


def _written(value: Any, path: YamlPath, origin: Origin) -> Any:
    """``value`` with what depends on the environment as it is written, and no other interpolation in it."""
    if (text := origin.written.get(path)) is not None:
        return text
    if isinstance(value, dict):
        return {key: _written(inner, (*path, str(key)), origin) for key, inner in value.items()}
    if isinstance(value, list):
        return [_written(inner, (*path, str(index)), origin) for index, inner in enumerate(value)]
    return value.replace("${", r"\${") if isinstance(value, str) else value


def _ends(node: yaml.Node, path: YamlPath) -> Iterator[tuple[YamlPath, int]]:
    """Every value without parts of its own, and the line, counted from 0, on which it ends."""
    import yaml

    if isinstance(node, yaml.MappingNode) and node.value:
        for key, value in node.value:
            yield from _ends(value, (*path, str(key.value)))
    elif isinstance(node, yaml.SequenceNode) and node.value:
        for index, value in enumerate(node.value):
            yield from _ends(value, (*path, str(index)))
    else:
        yield path, node.end_mark.line
