"""Names that users have written down stay, unless somebody decides otherwise: in tests/fixtures/public-names.txt."""

from __future__ import annotations

from pathlib import Path

from tests.docs.public_names import names

KEPT = Path(__file__).parents[1] / "fixtures" / "public-names.txt"
REMADE = "python -m tests.docs.public_names > tests/fixtures/public-names.txt"


def test_public_names_are_those_of_the_kept_list() -> None:
    kept, found = KEPT.read_text().splitlines(), list(names())
    assert sorted(set(kept) - set(found)) == [], f"gone, or changed; if that is meant: {REMADE}"
    assert sorted(set(found) - set(kept)) == [], f"new, and not in the list: {REMADE}"
    assert found == kept, REMADE


def test_every_kind_of_name_is_in_the_list() -> None:
    kinds = {line.partition(" ")[0] for line in KEPT.read_text().splitlines()}
    assert kinds == {
        *("import", "method", "attribute", "error"),
        *("setting", "command", "option", "argument", "page"),
        *("metric", "log", "call", "stream"),
    }
