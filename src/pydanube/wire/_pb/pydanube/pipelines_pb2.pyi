from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ApplyPipelineRequest(_message.Message):
    __slots__ = ("declaration", "name")
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    declaration: str
    name: str
    def __init__(self, declaration: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class ApplyPipelineResponse(_message.Message):
    __slots__ = ("outcome", "paused")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    paused: bool
    def __init__(self, outcome: _Optional[str] = ..., paused: bool = ...) -> None: ...

class ListPipelinesRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class ListPipelinesResponse(_message.Message):
    __slots__ = ("pipelines", "unreadable")
    PIPELINES_FIELD_NUMBER: _ClassVar[int]
    UNREADABLE_FIELD_NUMBER: _ClassVar[int]
    pipelines: _containers.RepeatedCompositeFieldContainer[PipelineState]
    unreadable: int
    def __init__(self, pipelines: _Optional[_Iterable[_Union[PipelineState, _Mapping]]] = ..., unreadable: _Optional[int] = ...) -> None: ...

class PipelineState(_message.Message):
    __slots__ = ("name", "job", "when", "health", "sentence", "state", "supervisor", "fresh_seconds", "freshness_goal_seconds", "behind_messages", "messages", "quarantined", "quarantined_total", "failures", "restarts", "runs", "started_us", "ended_us", "good_us", "next_us", "outcome", "error", "declaration", "revision")
    NAME_FIELD_NUMBER: _ClassVar[int]
    JOB_FIELD_NUMBER: _ClassVar[int]
    WHEN_FIELD_NUMBER: _ClassVar[int]
    HEALTH_FIELD_NUMBER: _ClassVar[int]
    SENTENCE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    FRESH_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FRESHNESS_GOAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BEHIND_MESSAGES_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_TOTAL_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    STARTED_US_FIELD_NUMBER: _ClassVar[int]
    ENDED_US_FIELD_NUMBER: _ClassVar[int]
    GOOD_US_FIELD_NUMBER: _ClassVar[int]
    NEXT_US_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    DECLARATION_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    name: str
    job: str
    when: str
    health: str
    sentence: str
    state: str
    supervisor: str
    fresh_seconds: float
    freshness_goal_seconds: int
    behind_messages: int
    messages: int
    quarantined: int
    quarantined_total: int
    failures: int
    restarts: int
    runs: int
    started_us: int
    ended_us: int
    good_us: int
    next_us: int
    outcome: str
    error: str
    declaration: str
    revision: int
    def __init__(self, name: _Optional[str] = ..., job: _Optional[str] = ..., when: _Optional[str] = ..., health: _Optional[str] = ..., sentence: _Optional[str] = ..., state: _Optional[str] = ..., supervisor: _Optional[str] = ..., fresh_seconds: _Optional[float] = ..., freshness_goal_seconds: _Optional[int] = ..., behind_messages: _Optional[int] = ..., messages: _Optional[int] = ..., quarantined: _Optional[int] = ..., quarantined_total: _Optional[int] = ..., failures: _Optional[int] = ..., restarts: _Optional[int] = ..., runs: _Optional[int] = ..., started_us: _Optional[int] = ..., ended_us: _Optional[int] = ..., good_us: _Optional[int] = ..., next_us: _Optional[int] = ..., outcome: _Optional[str] = ..., error: _Optional[str] = ..., declaration: _Optional[str] = ..., revision: _Optional[int] = ...) -> None: ...

class DeletePipelineRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class DeletePipelineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PausePipelineRequest(_message.Message):
    __slots__ = ("name", "paused")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PAUSED_FIELD_NUMBER: _ClassVar[int]
    name: str
    paused: bool
    def __init__(self, name: _Optional[str] = ..., paused: bool = ...) -> None: ...

class PausePipelineResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: bool = ...) -> None: ...

class JoinSupervisorRequest(_message.Message):
    __slots__ = ("supervisor",)
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    supervisor: str
    def __init__(self, supervisor: _Optional[str] = ...) -> None: ...

class JoinSupervisorResponse(_message.Message):
    __slots__ = ("lease", "ttl_seconds")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    ttl_seconds: float
    def __init__(self, lease: _Optional[int] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class RenewSupervisorRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class RenewSupervisorResponse(_message.Message):
    __slots__ = ("lasts",)
    LASTS_FIELD_NUMBER: _ClassVar[int]
    lasts: bool
    def __init__(self, lasts: bool = ...) -> None: ...

class LeaveSupervisorRequest(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: int
    def __init__(self, lease: _Optional[int] = ...) -> None: ...

class LeaveSupervisorResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ClaimPipelineRequest(_message.Message):
    __slots__ = ("lease", "name", "supervisor")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    SUPERVISOR_FIELD_NUMBER: _ClassVar[int]
    lease: int
    name: str
    supervisor: str
    def __init__(self, lease: _Optional[int] = ..., name: _Optional[str] = ..., supervisor: _Optional[str] = ...) -> None: ...

class ClaimPipelineResponse(_message.Message):
    __slots__ = ("granted", "holder", "status")
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    granted: bool
    holder: str
    status: str
    def __init__(self, granted: bool = ..., holder: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class ReleasePipelineRequest(_message.Message):
    __slots__ = ("lease", "name")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    lease: int
    name: str
    def __init__(self, lease: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class ReleasePipelineResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReportPipelineRequest(_message.Message):
    __slots__ = ("lease", "name", "status")
    LEASE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    lease: int
    name: str
    status: str
    def __init__(self, lease: _Optional[int] = ..., name: _Optional[str] = ..., status: _Optional[str] = ...) -> None: ...

class ReportPipelineResponse(_message.Message):
    __slots__ = ("is_held",)
    IS_HELD_FIELD_NUMBER: _ClassVar[int]
    is_held: bool
    def __init__(self, is_held: bool = ...) -> None: ...
