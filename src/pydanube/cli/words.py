"""What was meant by a command that does not exist.

danube topics list      No such command 'topics'. Did you mean 'danube admin topics'?
danube prodce           No such command 'prodce'. Did you mean 'produce'?
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from typer.core import TyperGroup


class Words(TyperGroup):
    """`danube` itself. Typer looks among its commands; people also look for those that are a level below."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        typed = args[0] if args else ""
        below = getattr(self.commands.get("admin"), "commands", {})
        if typed and not typed.startswith("-") and self.get_command(ctx, typed) is None:
            meant = get_close_matches(typed, [*below, *self.commands], n=1)
            if meant and meant[0] in below:
                ctx.fail(f"No such command {typed!r}. Did you mean 'danube admin {meant[0]}'?")
        return super().resolve_command(ctx, args)
