"""Background jobs of bash_tool: commands that continue after their call has ended."""

from collections.abc import Mapping
from typing import Any

from pydantic import JsonValue

from toolcrew.contract.calls import NO_OUTPUT
from toolcrew.contract.errors import ErrorCode, ToolFailure
from toolcrew.contract.guest_protocol import (
    GuestReply,
    JobInputRequest,
    JobKillRequest,
    JobListRequest,
    JobOutputAnswer,
    JobPollRequest,
    JobReport,
    JobStartRequest,
)
from toolcrew.contract.plurals import count
from toolcrew.workers.tools.base import Outcome, ToolEnvironment
from toolcrew.workers.tools.text import (
    MAX_OUTPUT_BYTES,
    build_invalid_notes,
    build_read_call,
    encode,
    name_signal,
    show_name,
    show_output,
)

FIRST_OUTPUT_MS = 1000
"""Milliseconds that the call waits for the first output of a new job."""
LOG_MIB = 4
_LABEL_CHARS = 120


def start_job(arguments: Mapping[str, Any], environment: ToolEnvironment) -> Outcome:
    """Start a command as a job. Return its id, its log, and the output of its first second."""
    script, body = encode(arguments["command"], "command"), encode(arguments["stdin"], "stdin")
    label = arguments.get("description") or arguments["command"].strip()
    if arguments["reset_state"]:
        raise ToolFailure(
            ErrorCode.INVALID_ARGUMENTS,
            "a job does not change the session's state: use reset_state with a command in the foreground",
        )
    request = JobStartRequest(
        script_bytes=len(script),
        cwd=arguments.get("cwd"),
        label=show_name(label.partition("\n")[0])[:_LABEL_CHARS] or "job",
        wait_ms=min(FIRST_OUTPUT_MS, int(environment.context.timeout_s * 500)),
        max_bytes=MAX_OUTPUT_BYTES,
        timeout_s=environment.context.timeout_s,
    )
    reply = environment.run(request, script)
    job = reply.answer.job
    notes = [_state_note(job)]
    if body or arguments["close_stdin"]:
        notes += _send_first_input(job, body, environment, close=arguments["close_stdin"])
    if job.state == "running":
        return _show(reply, "(no output yet)", [*notes, _usage_note(job)])
    return _show(reply, NO_OUTPUT, [*notes, *_log_notes(job)])


def _send_first_input(job: JobReport, data: bytes, environment: ToolEnvironment, *, close: bool) -> list[str]:
    """Send the input of a new job. A failure only adds a note to the result, because the job has already started."""
    if job.state != "running":
        return ["[it had ended before its stdin was sent]"]
    try:
        environment.run(JobInputRequest(job=job.job, close=close, timeout_s=environment.context.timeout_s), data)
    except ToolFailure as failure:
        return [f"[its stdin was not sent: {show_name(str(failure))}]"]
    return []


def poll_job(job_id: str, environment: ToolEnvironment) -> Outcome:
    """Return the state of a job, and its output since the last poll."""
    timeout_s = environment.context.timeout_s
    reply = environment.run(JobPollRequest(job=job_id, max_bytes=MAX_OUTPUT_BYTES, timeout_s=timeout_s))
    job = reply.answer.job
    return _show(reply, "(no new output)", [_state_note(job), *_log_notes(job)])


def kill_job(job_id: str, environment: ToolEnvironment) -> Outcome:
    """Kill a job and all processes that it has started."""
    timeout_s = environment.context.timeout_s
    reply = environment.run(JobKillRequest(job=job_id, max_bytes=MAX_OUTPUT_BYTES, timeout_s=timeout_s))
    job = reply.answer.job
    kill = reply.answer.kill
    kill_note = (
        f"[{job.job} was killed: {count(kill.signalled, 'process', 'processes')}]"
        if kill
        else f"[nothing was killed: {_state_note(job)[1:]}"
    )
    return _show(reply, "(no new output)", [kill_note, *_log_notes(job)])


def feed_job(job_id: str, text: str, environment: ToolEnvironment, *, close: bool) -> Outcome:
    """Send text to a job's standard input. With `close`, the input ends after the text."""
    if not text and not close:
        raise ToolFailure(ErrorCode.INVALID_ARGUMENTS, "action input needs text in 'stdin', or close_stdin=true")
    data = encode(text, "stdin")
    request = JobInputRequest(job=job_id, close=close, timeout_s=environment.context.timeout_s)
    answer = environment.run(request, data).answer
    notes = [f"{count(len(data), 'byte')} sent to {answer.job.job}{', its standard input is closed' if close else ''}"]
    if answer.pending:
        notes.append(f"[the job has not yet read {count(answer.pending, 'byte')} of its standard input]")
    return Outcome("\n".join(notes), _metadata(answer.job))


def list_jobs(environment: ToolEnvironment) -> Outcome:
    """Return every job of the session, the oldest first."""
    jobs = environment.run(JobListRequest(timeout_s=environment.context.timeout_s)).answer.jobs
    lines = [
        (f"{job.job}\t{_state(job)}\t{job.age_s:.0f} s ago\t{show_name(job.label)}\t{show_name(job.log)}")
        for job in jobs
    ]
    return Outcome("\n".join(lines) or "(no jobs)", {"jobs": [_metadata(job) for job in jobs]})


def _show(reply: GuestReply[JobOutputAnswer], empty_text: str, notes: list[str]) -> Outcome:
    job = reply.answer.job
    rest = f"the log has the last {LOG_MIB} MiB: {build_read_call(job.log)}"
    body, is_cut, invalid = show_output(reply.streams.get("merged", b""), reply.answer.streams.get("merged"), rest)
    metadata = {**_metadata(job), **({"not_utf8_bytes": invalid} if invalid else {})}
    notes = [*build_invalid_notes(invalid), *notes]
    return Outcome("\n".join([body.rstrip("\n") or empty_text, *notes]), metadata, is_cut)


def _state(job: JobReport) -> str:
    if job.state == "running":
        return (
            "running"
            if job.exit_code is None and job.signal is None
            else "running: its shell has ended, but processes that it started still run"
        )
    if job.state == "lost":
        return "lost: a program killed the supervisor of the job, and all its processes were ended"
    ending = f"exit code {job.exit_code}" if job.exit_code is not None else f"by {name_signal(job.signal or 9)}"
    cause = ", likely out of memory" if job.oom else ""
    return f"{'was killed' if job.state == 'killed' else 'has ended'}, {ending}{cause}"


def _state_note(job: JobReport) -> str:
    state = _state(job)
    return f"[{job.job} {'is ' if state.startswith('running') else ''}{state}]"


def _usage_note(job: JobReport) -> str:
    return (
        f'[log: {show_name(job.log)}; new output: bash_tool {{"action": "poll", "job_id": "{job.job}"}}; '
        "text for it: action input with stdin; its end: action kill]"
    )


def _log_notes(job: JobReport) -> list[str]:
    notes = []
    if job.unread:
        notes.append(f"[{job.unread} bytes that no poll has shown are in its log: {build_read_call(job.log)}]")
    if job.dropped:
        notes.append(
            f"[{job.dropped} bytes of its earlier output were dropped: the log keeps the last {LOG_MIB} MiB, or "
            "less if /output is full]"
        )
    return notes


def _metadata(job: JobReport) -> dict[str, JsonValue]:
    names = {"state", "exit_code", "signal", "age_s", "unread"}
    return {"job_id": job.job, "log": show_name(job.log), **job.model_dump(include=names)}
