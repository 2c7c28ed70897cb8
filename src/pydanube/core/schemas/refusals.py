"""What the registry, and a topic that has a schema, refuse: the part of the tree of `errors.py` that is about schemas.

Refused
├── SchemaUnknown        no such subject, version or id
├── SubjectMissing       a topic is to use a subject that is not registered
├── SchemaInvalid        a definition that is none
├── SchemaIncompatible   a version that its subject's mode does not allow after the others
├── ParserMissing        this broker was installed without what parses such schemas
├── SchemaTooCostly      a definition, or a payload, that takes too long or too much memory to understand
└── SchemaRefused        a message that does not fit, under `enforce`
"""

from __future__ import annotations

from pydanube.core.declared import says
from pydanube.errors import Refused


@says("{what} not found: register it first, or check the name")
class SchemaUnknown(Refused):
    what: str


@says("topic {topic} cannot use schema subject {subject}: not found, register a schema under it first")
class SubjectMissing(Refused):
    topic: str
    subject: str


@says("not a valid {kind} definition: {why}")
class SchemaInvalid(Refused):
    kind: str
    why: str


@says("the schema may not follow those of subject {subject}, whose compatibility mode is {mode}: {why}")
class SchemaIncompatible(Refused):
    subject: str
    mode: str
    why: str


@says(
    "this broker has nothing that parses {kind} schemas: install pydanube[schemas] with it; bytes, string and number "
    "need no parser"
)
class ParserMissing(Refused):
    kind: str


@says("{why}")
class SchemaTooCostly(Refused):
    why: str


@says("topic {topic} refuses the message: {why}")
class SchemaRefused(Refused):
    """`reason` is one of `core.schemas.enforcing.Reason`, as metrics have it."""

    topic: str
    reason: str
    why: str
