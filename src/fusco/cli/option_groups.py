"""Options that several commands share, as dataclasses among a command's parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with an option for each field of the dataclasses among its parameters, which it is given.

    >>> from dataclasses import dataclass
    >>> @dataclass
    ... class Size:
    ...     width: int = 4
    ...     height: int = 3
    >>> @with_groups
    ... def draw(*, colour: str, size: Size) -> None:
    ...     print(colour, size)
    >>> list(inspect.signature(draw).parameters)
    ['colour', 'width', 'height']
    >>> draw(colour="red", width=5, height=2)
    red Size(width=5, height=2)
    """
    groups: dict[str, Callable[..., Any]] = {}
    option_to_group: dict[str, str] = {}
    options: list[inspect.Parameter] = []
    hints = get_type_hints(command, include_extras=True)
    for name, parameter in inspect.signature(command).parameters.items():
        group = hints[name]
        if not is_dataclass(group):
            options.append(parameter.replace(annotation=group))
            continue
        assert isinstance(group, type)
        groups[name] = group
        of_group = get_type_hints(group, include_extras=True)
        for field in fields(group):
            option_to_group[field.name] = name
            options.append(
                inspect.Parameter(
                    field.name, parameter.KEYWORD_ONLY, default=field.default, annotation=of_group[field.name]
                )
            )

    @wraps(command)
    def run(**given: Any) -> None:
        of_groups: dict[str, dict[str, Any]] = {name: {} for name in groups}
        for option, name in option_to_group.items():
            of_groups[name][option] = given.pop(option)
        command(**given, **{name: group(**of_groups[name]) for name, group in groups.items()})

    run.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]  # what typer reads
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run
